"""Sharded optimizer state on two workers: the same bits as with copies of the state."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti
from benchmarks import sharded_state
from tfmulti import keras_compat

HERE = Path(__file__).parent

import sharded_state_worker as worker

PROGRAM = "sharded_state_worker"
FAST = ("adamw", "refusals")
# RMSprop cannot divide the sparse gradients of a table, on one device neither.
DIVIDED = (
    *("table loss scale", "table averages", "table lion", "table adadelta"),
    *("tied accumulation", "tied rmsprop", "tied amsgrad", "tied ftrl"),
)
# Those of `DIVIDED` have slots of other weights, too.
ELSEWHERE = (*FAST, "averages", "lion", "adadelta")
SLOW = tuple(x for x in (*worker.OPTIMIZERS, "skips", "two optimizers") if x not in ELSEWHERE)


@pytest.fixture(scope="module", name="fast")
def fast_fixture(over_the_ring):
    _, seen = over_the_ring(PROGRAM)
    return seen


@pytest.fixture(scope="module", name="life")
def life_fixture(run_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_cases(folder, ["life", "divided life"])


@pytest.fixture(scope="module", name="slow")
def slow_fixture(run_cases, tmp_path_factory):
    names = (*SLOW, *DIVIDED, "table adamw", "table muon", "compiled again")
    return run_cases(tmp_path_factory.mktemp("sharded"), names)


def assert_same(seen):
    copies, shards = zip(*(each["held"] for each in seen))
    assert all(each["same"] for each in seen)
    assert all(each["losses"][0] == each["losses"][1] for each in seen if "losses" in each)
    # The count of updates, the rate and what is not sharded are on both.
    assert copies[0] < sum(shards) < 2 * copies[0]


def test_sharded_state_gives_the_bits_of_copies(fast):
    assert_same([each["adamw"] for each in fast])
    copies, shards = zip(*(each["adamw"]["held"] for each in fast))
    assert sum(shards) <= copies[0] + 4


def assert_divided(seen):
    """Two of the slots of a table on two workers: whole to all who read them, half on each."""
    assert all(each["same"] for each in seen)
    assert all(each["losses"][0] == each["losses"][1] for each in seen)
    for rows, each in zip((20000, 20001), seen):
        assert each["slots"] and not each["told"]
        assert all(slot == [[40001, 16], [rows, 16]] for slot in each["slots"])


@pytest.mark.slow
def test_the_rows_of_a_table_larger_than_all_else_are_divided(slow):
    assert_divided([each["table adamw"] for each in slow])
    for copies, shards in (each["table adamw"]["held"] for each in slow):
        assert shards < 0.51 * copies


@pytest.mark.slow
@pytest.mark.parametrize("case", DIVIDED)
def test_every_optimizer_of_elements_divides_rows(slow, case):
    assert_divided([each[case] for each in slow])


@pytest.mark.slow
def test_an_optimizer_that_is_compiled_again_keeps_its_owners_and_slots(slow):
    for each in (each["compiled again"] for each in slow):
        copies, *shards = each["held"]
        assert each["same"] == [True, True] and max(shards) < copies


@pytest.mark.slow
def test_a_table_of_an_optimizer_that_needs_it_whole_is_told(slow):
    for each in slow:
        [told] = each["table muon"]["told"]
        assert each["table muon"]["same"] and not each["table muon"]["slots"]
        assert "keeps 2.6 MB of weights or their slots" in told and "Muon updates it whole" in told


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_optimizer_gives_the_bits_of_copies(slow, case):
    assert_same([each[case] for each in slow])


@pytest.mark.slow
def test_sharded_state_over_mpi_gives_the_bits_of_copies(run_over_mpi, tmp_path):
    names = ("adamw", "accumulation", "muon", "two optimizers", "skips", *worker.OWN_METHODS)
    more = (
        "own models",
        "table adamw",
        "tied accumulation",
        "table loss scale",
        "life",
        "divided life",
    )
    seen = run_over_mpi(tmp_path, (*names, *more))
    for name in names:
        assert_same([each[name] for each in seen])
    for name in more[1:4]:
        assert_divided([each[name] for each in seen])
    for each in seen:
        assert set(each["own models"].values()) == {0.0}
        assert all({**each["life"], **each["divided life"]}.values())
        assert each["skips"]["skipped"] == [2, 2]
        # What only updates read is added for the owners alone.
        assert each["adamw"]["to_owners"] == each["skips"]["to_owners"] == [0, 1]
        assert each["accumulation"]["to_owners"] == []


@pytest.mark.slow
def test_four_workers_over_mpi(run_over_mpi, tmp_path):
    """Where more than two numbers are added, their order is another than that of an all-reduce."""
    names = ("averages at the end", "adamw", "table adamw")
    seen = run_over_mpi(tmp_path, names, num_workers=4)
    # Adam makes the rounding of small gradients larger, on one device too.
    for name, most in zip(names, (1e-6, 2e-5, 2e-5)):
        assert max(each[name]["apart"] for each in seen) < most
    copies, shards = zip(*(each["adamw"]["held"] for each in seen))
    assert sum(shards) < 1.1 * copies[0]


@pytest.mark.slow
def test_checkpoints_resume_bit_for_bit_with_and_without_sharding(life):
    _, seen = life
    for case in ("life", "divided life"):
        assert [set(each[case].values()) for each in seen] == [{True}, {True}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "name"), [(worker.build, "again"), (worker.build_table, "table_None")]
)
def test_a_checkpoint_of_workers_resumes_on_one_device(life, build, name):
    folder, _ = life
    strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
    create = worker.OPTIMIZERS["adamw"]
    whole = build(strategy, create, "state")
    worker.fit(whole, epochs=4)
    resumed = build(strategy, create, "state")
    # Three of the epochs were trained by the workers.
    assert len(worker.fit(resumed, epochs=4, checkpoint=folder / name)) == 4
    for one, other in zip(whole.get_weights(), resumed.get_weights()):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_files_are_those_of_one_device(life):
    folder, _ = life

    def load(name):
        return keras.models.load_model(folder / f"{name}.keras")

    copies = load("adamw_copies")
    assert len(copies.optimizer.variables) == 2 + 2 * len(copies.trainable_variables)
    pairs = [(load(name), copies) for name in ("adamw_sharded", "each", "loaded")]
    pairs += [(load(f"{name}_sharded"), load(f"{name}_copies")) for name in ("adafactor", "table")]
    for model, copies in pairs:
        pairs = zip(model.variables, copies.variables, strict=True)
        own = zip(model.optimizer.variables, copies.optimizer.variables, strict=True)
        for mine, theirs in [*pairs, *own]:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_a_callback_saves_within_the_scope(run_cases, tmp_path):
    run_cases(tmp_path, ["in scope"])
    models = [
        keras.models.load_model(tmp_path / f"in_scope_{shard}.keras")
        for shard in (None, "state", "parameters")
    ]
    copies, *others = [[*model.variables, *model.optimizer.variables] for model in models]
    for one, *same in zip(copies, *others, strict=True):
        for other in same:
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_what_cannot_be_sharded_is_told(fast):
    for told in (each["refusals"] for each in fast):
        assert "read only in the update of its own variable" in told["together"]
        assert "may read only that variable" in told["weights"] and "reads" in told["weights"]
        assert "change only its own slots" in told["counting"] and "count" in told["counting"]
        assert "change only its own slots" in told["own slots"]
        for name in ("counting outside", "counting eagerly"):
            assert "which changes own_count" in told[name]
        assert "which changes seed_generator" in told["noise"]
        for name in ("noise of TensorFlow", "eager noise"):
            assert "TensorFlow's random state (RandomStandardNormal)" in told[name]
        assert told["noise by seeds"] == "nothing"
        assert "before it is built" in told["built"]
        assert "for a Outer, which holds other optimizers" in told["outer"]
        assert "read only in callbacks.Checkpoint" in told["between"]


def test_a_wrong_word_and_replicas_of_one_worker_are_told():
    with pytest.raises(ValueError, match="`shard` must be None or one of state"):
        tfmulti.DistributedOptimizer("adam", shard="states")
    strategy = tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope(), pytest.raises(ValueError, match="workers with one replica each"):
        tfmulti.DistributedOptimizer("adam", shard="state")


def test_rows_of_a_weight_are_updated_as_if_they_were_all():
    whole = keras.Variable(np.zeros((5, 2), "float32"))
    optimizer = keras.optimizers.SGD()
    optimizer.build([whole])
    rows = keras_compat.UpdatedRows(optimizer, whole, 1, 4)
    assert keras_compat.variable_index(optimizer, rows) == 0
    assert rows.shape == keras.ops.shape(rows.value) == (3, 2) and rows.dtype == "float32"
    optimizer.assign(rows, np.full((3, 2), 8.0))
    optimizer.assign_add(rows, np.full((3, 2), 3.0))
    optimizer.assign_sub(rows, np.ones((3, 2)))
    some = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 0, 2]), [3, 2])
    optimizer.assign_add(rows, some)
    assert keras.ops.add(rows, 0)[:, 0].numpy().tolist() == [12, 10, 11]
    optimizer.assign_sub(rows, some)
    optimizer.assign(rows, tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), [3, 2]))
    assert whole.numpy()[:, 1].tolist() == [0, 10, 1, 10, 0]


def test_one_device_trains_as_ever():
    strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
    models = [
        worker.build(strategy, worker.OPTIMIZERS["adamw"], shard) for shard in (None, "state")
    ]
    assert worker.fit(models[0]) == worker.fit(models[1])


@pytest.mark.slow
@pytest.mark.usefixtures("mpiexec")
def test_a_worker_needs_memory_for_its_own_rows_of_slots(monkeypatch):
    # What is freed is given back at once, so that the peak is what is in use: no region of
    # TensorFlow's allocator fits a few tensors of 144 MB without large gaps.
    # On some CPUs oneDNN has such regions too.
    environ = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    environ |= {"TF_CPU_ALLOCATOR_USE_BFC": "false", "TF_ENABLE_ONEDNN_OPTS": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ways = (None, "state")
    # The rows of the only layer are divided.
    copies, shards = (sharded_state.measure(1, 6000, 2, each, "mpi") for each in ways)
    assert copies["bytes"] - shards["bytes"] > 0.8 * copies["slots"] / 2
