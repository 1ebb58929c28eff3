"""What stands for batches, by which workers compare them."""

import numpy as np
import pytest
import tensorflow as tf

from tfmulti.step.digests import Digest, Digests

ROWS = np.random.RandomState(0).randn(16, 3).astype("float32")


def digest(*values):
    return Digest.of([tf.constant(value) for value in values])


@pytest.mark.parametrize(
    "values", [ROWS, ROWS[:, :1], np.arange(16), np.arange(16).astype(str), ROWS > 0]
)
def test_rows_in_another_order_differ(values):
    assert digest(values).differs(digest(values[::-1]))
    assert not digest(values).differs(digest(values))


def test_numbers_that_are_rounded_otherwise_are_alike():
    assert not digest(ROWS).differs(digest(ROWS * (1 + 1e-6 * np.sign(ROWS[::-1]))))
    with_others = np.where(ROWS > 2, np.nan, np.where(ROWS < -2, np.inf, ROWS))
    assert not digest(with_others).differs(digest(with_others))


def test_batches_of_the_latest_pass_have_digests_of_inputs_and_labels():
    digests = Digests()
    data = tf.data.Dataset.from_tensor_slices((ROWS, np.arange(16))).batch(2)
    for _ in range(2):
        seen = list(digests.of(data))
    np.testing.assert_array_equal(seen[1][0], ROWS[2:4])
    assert digests.at(1) == (digest(ROWS[2:4]), digest(np.array([2, 3])))
    # Not of every batch.
    assert digests.at(3) == (Digest(), Digest()) != digests.at(4)
    # Another pass begins, which reads no second batch ahead.
    next(iter(digests.of(data.take(1))))
    assert digests.at(1) == (Digest(), Digest())
