"""What one worker keeps of the values of others."""

import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.step import slots


def of_another_worker(shape, dtype):
    variable = keras.Variable(np.zeros(shape), dtype=dtype)
    variable.owner, variable.has_whole = 1, False
    return variable


@pytest.fixture(name="values")
def values_fixture(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return slots.OwnedValues(tf.distribute.get_strategy(), lambda variable: 0)


def test_values_of_other_workers_are_read_back(values):
    variables = [of_another_worker((2, 3), "float32"), of_another_worker((4,), "bfloat16")]
    for factor in (1.0, 2.0):
        for variable in variables:
            value = factor * tf.range(np.prod(variable.shape), dtype=tf.float32)
            kept = tf.reshape(tf.cast(value, variable.dtype), variable.shape).numpy()
            values.keep_value(variable, kept)
        for variable in variables:
            read = values.read(variable)
            assert read.dtype == tf.as_dtype(variable.dtype).as_numpy_dtype
            numbers = factor * np.arange(read.size).reshape(read.shape)
            np.testing.assert_array_equal(read.astype("float32"), numbers)


def test_a_killed_process_leaves_no_file_of_values(values, tmp_path):
    values.keep_value(of_another_worker((2,), "float32"), np.ones(2, "float32"))
    assert not list(tmp_path.iterdir())


def test_a_value_that_was_not_kept_is_an_error(values):
    variable = of_another_worker((2,), "float32")
    with pytest.raises(RuntimeError, match=variable.path):
        values.read(variable)


def test_variables_of_one_shape_are_gathered_by_one_trace(values, monkeypatch):
    traces = []

    def from_owners(strategy, tensors, owners):
        traces.append(owners)
        return enumerate(tensors)

    monkeypatch.setattr(slots.owners, "from_owners", from_owners)
    for shape in ((2, 3), (2, 3), (3, 2)):
        variable = of_another_worker(shape, "float32")
        variable.is_here = True
        variable.assign(np.full(shape, 7.0))
        np.testing.assert_array_equal(values.gathered(variable), np.full(shape, 7.0))
    assert len(traces) == 2
