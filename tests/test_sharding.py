import numpy as np
import pytest

from tfmulti.sharding import PADDING_WEIGHT, ShardPlan, epoch_order, replica_slice


def rows_of_epoch(plan, epoch=0):
    return [
        [plan.replica_batch(epoch, step, number)[0].tolist() for number in range(plan.num_replicas)]
        for step in range(plan.steps_per_epoch)
    ]


@pytest.mark.parametrize(
    ("num_rows", "num_replicas", "sizes"),
    [
        (16, 3, [6, 5, 5]),
        (5, 2, [3, 2]),
        (1, 4, [1, 0, 0, 0]),
        (8, 4, [2, 2, 2, 2]),
        (0, 2, [0, 0]),
    ],
)
def test_replica_batches_are_contiguous_and_even(num_rows, num_replicas, sizes):
    slices = [replica_slice(num_rows, num_replicas, number) for number in range(num_replicas)]
    assert [stop - start for start, stop in slices] == sizes
    assert [start for start, _ in slices[1:]] == [stop for _, stop in slices[:-1]]


def test_the_order_is_fixed_for_good():
    # A change here changes every seeded training of every user.
    assert epoch_order(8, seed=0, epoch=0).tolist() == [6, 3, 5, 0, 7, 2, 1, 4]
    assert epoch_order(8, seed=0, epoch=1).tolist() != epoch_order(8, seed=0, epoch=0).tolist()
    assert epoch_order(8, seed=1, epoch=0).tolist() != epoch_order(8, seed=0, epoch=0).tolist()


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_examples", "batch"), [(43, 16), (33, 16), (45, 15), (4, 4), (7, 5)])
def test_a_step_has_the_same_examples_on_any_number_of_replicas(num_replicas, num_examples, batch):
    one = ShardPlan(num_examples, batch, 1, seed=5)
    many = ShardPlan(num_examples, batch, num_replicas, seed=5)
    for epoch in range(3):
        for whole, parts in zip(rows_of_epoch(one, epoch), rows_of_epoch(many, epoch)):
            assert whole[0] == [row for part in parts for row in part]
        seen = [row for parts in rows_of_epoch(many, epoch) for part in parts for row in part]
        assert sorted(seen) == list(range(num_examples))


def test_drop_keeps_whole_batches():
    plan = ShardPlan(43, 16, 2, seed=None, remainder="drop")
    assert plan.steps_per_epoch == 2
    assert plan.has_static_shapes
    assert rows_of_epoch(plan)[-1][-1] == list(range(24, 32))


def test_pad_fills_with_rows_of_weight_zero():
    plan = ShardPlan(43, 16, 2, seed=None, remainder="pad")
    rows, weights = plan.replica_batch(0, 2, 1)
    assert len(rows) == 8
    assert weights.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert weights[3:].tobytes() == np.full(5, PADDING_WEIGHT).tobytes()
    assert np.signbit(weights[3:]).all()


def test_repeat_first_fills_short_shards_with_the_first_examples():
    plan = ShardPlan(43, 16, 4, seed=3, remainder="repeat_first")
    last = rows_of_epoch(plan)[-1]
    assert [len(part) for part in last] == [3, 3, 3, 3]
    assert last[-1][-1] == 0
    assert all(plan.replica_batch(0, 2, number)[1].all() for number in range(4))


@pytest.mark.parametrize(
    ("remainder", "count"), [("uneven", 43), ("pad", 43), ("drop", 32), ("repeat_first", 44)]
)
def test_the_rows_of_an_epoch_are_counted_without_filler(remainder, count):
    plan = ShardPlan(43, 16, 4, remainder=remainder)
    assert plan.count_before(1) == count
    assert sum(plan.batch(0, step)[1] for step in range(plan.steps_per_epoch)) == count


@pytest.mark.parametrize("remainder", ["uneven", "pad", "drop", "repeat_first"])
@pytest.mark.parametrize("steps", [None, 1, 2, 7])
@pytest.mark.parametrize(("examples", "batch"), [(43, 16), (43, 15), (48, 16), (16, 16)])
def test_rows_before_a_step_are_those_of_all_steps_before(examples, batch, steps, remainder):
    plan = ShardPlan(examples, batch, 4, remainder=remainder, steps=steps)
    counted = 0
    for epoch in range(3):
        for step in range(plan.steps_per_epoch):
            assert plan.count_before(epoch, step) == counted
            counted += plan.count(epoch, step)


def test_rows_before_a_late_epoch_are_counted_at_once():
    plan = ShardPlan(43, 16, steps=10**9)
    assert plan.count_before(3) == 10**9 * 43


def test_epochs_of_another_length_follow_one_another():
    passes = ShardPlan(10, 4, 1, seed=2)
    short = ShardPlan(10, 4, 1, seed=2, steps=2)
    every = [rows for epoch in range(2) for rows in rows_of_epoch(passes, epoch)]
    assert [rows for epoch in range(3) for rows in rows_of_epoch(short, epoch)] == every


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_examples": 0}, ["at least one example", "num_examples=0"]),
        ({"global_batch_size": 1}, ["`global_batch_size`", "num_replicas=2", "Use 2 or more"]),
        ({"remainder": "keep"}, ["`remainder`", "'keep'", "uneven, pad, drop, repeat_first"]),
        ({"steps": 0}, ["`steps_per_epoch`", "steps_per_epoch=0"]),
        ({"remainder": "drop", "num_examples": 3}, ["whole batches", "num_examples=3"]),
    ],
)
def test_what_cannot_be_laid_out_is_refused(settings, words):
    plan = {"num_examples": 10, "global_batch_size": 4, "num_replicas": 2, **settings}
    with pytest.raises(ValueError) as caught:
        ShardPlan(**plan)
    assert all(word in str(caught.value) for word in ["Received: ", *words])
