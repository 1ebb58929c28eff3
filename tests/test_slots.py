"""What one worker keeps of the values of others."""

import gc
import tempfile

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.step import refused_updates, slots
from tfmulti.step.sharded_state import Shards


def of_another_worker(shape, dtype):
    variable = keras.Variable(np.zeros(shape), dtype=dtype)
    variable.owner, variable.has_whole = 1, False
    variable.counters, variable.own_counter = [], None
    return variable


@pytest.fixture(name="values")
def values_fixture(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return slots.OwnedValues(tf.distribute.get_strategy())


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


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
def test_an_assigned_value_of_another_dtype_is_read_back_in_that_of_the_variable(values, dtype):
    for own in ("float32", "bfloat16"):
        variable = of_another_worker((2, 3), own)
        values.keep_value(variable, np.arange(6, dtype=dtype).reshape(2, 3))
        read = values.read(variable)
        assert read.dtype == tf.as_dtype(own).as_numpy_dtype
        np.testing.assert_array_equal(read.astype("float32"), np.arange(6).reshape(2, 3))


def test_an_update_does_not_keep_what_a_worker_without_the_slot_has(values):
    class Shards:
        worker, updates = 0, tf.Variable(0)

    Shards.values = values
    slot = slots.SlotVariable(Shards, 1, False, (2,), "zeros", "float32", "average", True)
    slot.assign(np.ones(2, "float32"))
    with keras_compat.held_values():
        slot.assign(slot.value)
    np.testing.assert_array_equal(values.read(slot), np.ones(2))
    np.testing.assert_array_equal(slot.value.numpy(), np.ones(2))
    momentum = slots.SlotVariable(Shards, 1, False, (2,), "zeros", "float32", "momentum")
    with keras_compat.held_values(), pytest.raises(RuntimeError, match="only in the update of its"):
        print(momentum.value)


def test_variables_of_new_models_take_the_places_of_deleted_ones(values):
    def keep(number):
        variable = of_another_worker(shape, "float32")
        values.keep_value(variable, np.full(shape, float(number), "float32"))
        return variable

    shape, sizes = (2, 3), []
    stays = keep(7)
    for number in range(3):
        several = [keep(number + each) for each in range(2)]
        assert [values.read(v)[0, 0] for v in (*several, stays)] == [number, number + 1, 7]
        sizes.append(values._file.seek(0, 2))
        several.clear()
        gc.collect()
    assert len(set(sizes)) == 1


def test_a_value_that_cannot_be_written_is_an_error_only_when_it_is_read(values):
    lost, kept = (of_another_worker((2000,), "float32") for _ in range(2))
    file, values._file = values._file, open("/dev/full", "r+b")
    with pytest.warns(UserWarning, match="No space left.* Training goes on"):
        values.keep_value(lost, np.ones(2000, "float32"))
    with pytest.raises(RuntimeError, match="No space left.*gather_optimizer_state"):
        values.read(lost)
    values._file = file
    for number, variable in enumerate((kept, lost)):
        values.keep_value(variable, np.full(2000, number, "float32"))
    assert values.read(kept)[-1] == 0 and values.read(lost)[-1] == 1


def test_a_killed_process_leaves_no_file_of_values(values, tmp_path):
    values.keep_value(of_another_worker((2,), "float32"), np.ones(2, "float32"))
    assert not list(tmp_path.iterdir())


def test_a_value_that_was_not_kept_is_an_error(values):
    variable = of_another_worker((2,), "float32")
    with pytest.raises(RuntimeError, match=variable.path):
        values.read(variable)


def test_variables_of_one_shape_are_gathered_by_one_trace(values, monkeypatch):
    traces = []

    def receive_from(strategy, value, owner, shape):
        traces.append(shape)
        return value

    monkeypatch.setattr(slots.owners, "receive_from", receive_from)
    for shape in ((2, 3), (2, 3), (3, 2)):
        variable = of_another_worker(shape, "float32")
        variable.is_here = True
        variable.assign(np.full(shape, 7.0))
        np.testing.assert_array_equal(values.gathered(variable), np.full(shape, 7.0))
    assert len(traces) == 2


def test_a_value_of_another_shape_is_not_kept():
    class Slot:
        path, shape = "adam/table_momentum", tf.TensorShape([51, 16])

    for value in (np.ones((60, 16)), [1.0], tf.ones([51])):
        with pytest.raises(ValueError, match="(?s)Received: a value of shape .*adam/table_moment"):
            slots.refuse_other_shape(Slot, value)
    slots.refuse_other_shape(Slot, np.ones((51, 16)))


def test_a_weight_keeps_its_name_where_it_is_held():
    def name():
        with keras_compat.held_values():
            return layer.kernel.value.name

    strategy = replicas.create_strategy(1)
    with strategy.scope():
        layer = keras.layers.Dense(3, name="last")
        layer(np.ones((1, 2)))
    expected = name()
    assert expected.endswith("last/kernel:0")
    keras_compat.hold(layer.kernel, keras_compat.HeldVariable, strategy, is_here=False)
    assert name() == expected
    keras_compat.move_held(layer.kernel, strategy, tf.ones((2, 3)))
    assert name() == expected


def sharded_optimizer():
    with replicas.create_strategy(1).scope():
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, gradient_accumulation_steps=4)
        weight = keras.Variable(np.ones(3, "float32"))
        optimizer.build([weight])
    shards = Shards(optimizer, keras_compat.strategy_of(optimizer), shards_parameters=False)
    marks.SHARDS.set(optimizer, shards)
    weight.owner, weight.has_whole, weight.own_counter = 0, True, None
    weight.counters = [shards.updates]
    return optimizer, weight, shards.values


def assert_stale(values, variable):
    with pytest.raises(RuntimeError, match="gather_optimizer_state"):
        values.read(variable)


def test_averages_are_stale_after_every_call_of_an_optimizer_that_accumulates():
    optimizer, weight, values = sharded_optimizer()
    values.keep_value(weight, np.ones(3))
    values.read(weight)
    optimizer.apply([tf.ones([3])])
    assert_stale(values, weight)


def test_a_count_of_steps_that_is_assigned_makes_no_value_stale_or_valid():
    optimizer, weight, values = sharded_optimizer()
    optimizer.apply([tf.ones([3])])
    values.keep_value(weight, np.ones(3))
    # As `load_weights` does, which loads layers first.
    optimizer._iterations.assign(0)
    values.read(weight)
    optimizer.apply([tf.ones([3])])
    assert_stale(values, weight)


def test_what_a_traced_step_assigns_is_stale_after_each_run(values):
    variable = of_another_worker((2,), "float32")
    step = tf.function(lambda: values.keep_value(variable, tf.ones(2)))
    for value in (3.0, 4.0):
        values.keep_value(variable, np.full(2, value, "float32"))
        step.get_concrete_function()
        np.testing.assert_array_equal(values.read(variable), np.full(2, value))
        step()
        assert_stale(values, variable)


@pytest.mark.parametrize("way", ["eagerly", "in a graph", "in a branch", "in a function"])
def test_an_update_may_read_its_own_variable_only(way):
    weights = [keras.Variable(np.ones(2, "float32"), name=name) for name in ("one", "two")]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(weights)

    def update(read):
        norm = tf.function(lambda: keras.ops.sum(read))
        with refused_updates.refusing_shared_state(optimizer, weights[0]):
            if way == "in a branch":
                keras.ops.cond(weights[0][0] > 0, lambda: norm.python_function(), lambda: 0.0)
            elif way == "in a function":
                norm()
            else:
                norm.python_function()

    around = (lambda run: run) if way == "eagerly" else tf.function
    around(lambda: update(weights[0]))()
    with pytest.raises(RuntimeError, match="which reads two"):
        around(lambda: update(weights[1]))()
