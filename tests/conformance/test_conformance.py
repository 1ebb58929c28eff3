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
# Each slow test tries a part of the matrix on three replicas, and on one cluster of two workers.
PARTS = 12
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


def test_three_replicas_do_as_one_device():
    guarantee = BY_NAME["padded, with weights of its own"]
    cell = judge(guarantee, training.attempt(guarantee, Origin(create_strategy(3))))
    assert cell.ok, f"{cell.text} {cell.where}"


def test_stages_are_on_devices():
    name = next(name for name in BY_NAME if "stages on two devices" in name)
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
@pytest.mark.parametrize("part", range(PARTS))
def test_every_guarantee_is_kept_on_replicas_and_on_workers(part, tmp_path):
    names = [guarantee.name for guarantee in (*guarantees.ALL, *guarantees.RANDOM)][part::PARTS]
    clusters = [column for column in columns.TFMULTI if column.workers > 1]
    places = [*(c for c in columns.TFMULTI if c.devices == 3), clusters[part % len(clusters)]]
    num_processes = processes.num_processes()
    rows = matrix.measure(names, places, tmp_path, num_processes, orders=1)
    # What differs may be noise, which takes more training to measure.
    again = matrix.measure(broken(rows), places, tmp_path, num_processes)
    assert not broken(again)


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
