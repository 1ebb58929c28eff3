"""The matrix, as far as a test run has time for it; `make conformance` measures all of it."""

import dataclasses

import keras
import numpy as np
import pytest
from replicas import create_strategy

from conformance import columns, compare, guarantees, matrix, processes, training
from conformance.guarantee import TOLD, Origin

# What stock Keras gets wrong without an error; each fails here when upstream is repaired.
STOCK_IS_WRONG = [
    "43 examples in batches of 16",
    "global_clipnorm",
    "clipvalue",
    "one replica overflows",
    "loss that gives one number",
    "token masks",
    "mean_with_sample_weight",
    "batch normalization, each its own",
    "dropout",
    "two steps an execution",
]
# One or two of each kind; the slow tests try all.
IN_EVERY_RUN = [
    "padded, with weights of its own",
    "global_clipnorm",
    "one replica overflows, as compile() has it",
    "custom optimizer",
    "gradients sent as bfloat16",
    "loss that gives one number",
    "batch normalization, each its own",
    "two steps an execution",
    "own train_step by the book",
    "train_step under tf.function",
    "own step, reduce_sum",
    "optimizers in a dict",
    "masked_loss of the transformer",
    "metric: a maximum",
    "own running mean",
]
BY_NAME = {guarantee.name: guarantee for guarantee in guarantees.ALL}


def judge(guarantee, run, several=True):
    """Judges a run; measures the noise only where it decides."""
    reference = training.attempt(guarantee, Origin())
    cell = compare.judge(guarantee, [run], reference, 0.0, several)
    if cell.ok or cell.difference is None or guarantee.ordered:
        return cell
    others = [training.train(guarantee, Origin(order=order)) for order in (1, 2)]
    noise = max(compare.difference(other, reference)[0] for other in others)
    return compare.judge(guarantee, [run], reference, noise, several)


def try_on_replicas(name, num_replicas):
    guarantee = BY_NAME[name]
    cell = judge(guarantee, training.attempt(guarantee, Origin(create_strategy(num_replicas))))
    assert cell.ok, f"{cell.text} {cell.where}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_three_replicas_do_as_one_device(name):
    try_on_replicas(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BY_NAME) - set(IN_EVERY_RUN)))
def test_three_replicas_do_as_one_device_in_the_rest_too(name):
    try_on_replicas(name, 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in BY_NAME if "stages on two devices" in name])
def test_stages_on_devices_do_as_one_device(name):
    guarantee, strategy = BY_NAME[name], create_strategy(1)
    made = []

    def create(wrap):
        made.append(guarantee.create(wrap))
        return made[-1]

    run = training.attempt(dataclasses.replace(guarantee, create=create), Origin(strategy))
    cell = judge(guarantee, run)
    assert cell.ok, f"{cell.text} {cell.where}"
    assert {weight.value.device[-5:] for weight in made[0].weights} == {"CPU:0", "CPU:1"}


def broken(rows):
    return {
        row.guarantee.name: {name: (c.text, c.where) for name, c in row.cells.items() if not c.ok}
        for row in rows
        if not row.kept
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [columns.TFMULTI[0], *columns.TFMULTI[4:]], ids=lambda place: place.name
)
def test_one_device_and_two_workers_do_as_plain_keras(place, tmp_path):
    rows = matrix.measure(BY_NAME, [place], tmp_path, processes.num_processes())
    assert not broken(rows)


@pytest.mark.slow
def test_two_workers_over_mpi_do_as_one_device(tmp_path):
    names = ["gradients sent as float16"]
    [place] = [column for column in columns.TFMULTI if column.communication == "mpi"]
    rows = matrix.measure(names, [place], tmp_path, 1)
    assert not broken(rows)


@pytest.mark.slow
@pytest.mark.parametrize("place", columns.TFMULTI[4:], ids=lambda place: place.name)
def test_two_workers_do_so_for_random_sizes(place, tmp_path):
    names = [guarantee.name for guarantee in guarantees.RANDOM]
    rows = matrix.measure(names, [place], tmp_path, processes.num_processes())
    assert not broken(rows)


@pytest.mark.slow
def test_canary_stock_keras_is_still_wrong(tmp_path):
    rows = matrix.measure(STOCK_IS_WRONG, columns.STOCK[:1], tmp_path, processes.num_processes())
    repaired = [row.guarantee.name for row in rows if all(c.ok for c in row.cells.values())]
    assert not repaired


def test_a_difference_is_seen():
    guarantee = BY_NAME["43 examples in batches of 16"]
    reference = training.train(guarantee, Origin())

    def judged(run):
        return compare.judge(guarantee, [run], reference, 0.0, True)

    run = dict(reference)
    assert judged(run).ok
    run["weight/0"] = reference["weight/0"] + 1e-5
    assert (judged(run).ok, judged(run).where) == (False, "weight/0")
    run["weight/0"] = np.full_like(reference["weight/0"], np.nan)
    assert judged(run).text == "not finite"
    assert not judged("ValueError: some words").ok


WORD = "ValueError: `loss` must be a mean over rows. Received: loss=<function>. Use a mean."


def test_only_a_word_to_the_user_counts_as_told():
    guarantee = dataclasses.replace(BY_NAME["own step, reduce_sum"], must=TOLD)

    def kept(*runs, several=True, guarantee=guarantee):
        return compare.judge(guarantee, list(runs), {}, 0.0, several).ok

    assert kept(WORD) and kept(WORD, WORD)
    assert kept(WORD.replace("Value", "Runtime"))
    # Where one device could do it there is nothing to tell.
    assert not kept(WORD, several=False)
    assert not kept(WORD, guarantee=dataclasses.replace(guarantee, must="exact"))
    assert not kept(WORD, compare.WAITS)
    assert not kept("ValueError: shapes do not match")
    assert not kept(WORD.replace("Value", "Type"))
    assert not kept(f"Late: {compare.LATE}{WORD}")


class Raises(keras.callbacks.Callback):
    def __init__(self, when):
        super().__init__()
        self.when = when

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.when:
            raise ValueError(WORD.split(": ", 1)[1])


@pytest.mark.parametrize("when", [0, 1])
def test_a_word_after_the_first_update_comes_too_late(when):
    guarantee = dataclasses.replace(
        BY_NAME["own step, reduce_sum"], fit={"callbacks": [Raises(when)]}
    )
    assert compare.is_told(training.attempt(guarantee, Origin())) == (when == 0)
