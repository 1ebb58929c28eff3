"""The speed of training: of steps and examples, the wait for data, and the time left."""

import contextlib
import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from monitored import create_data, create_model
from replicas import create_strategy

import tfmulti
from tfmulti.callbacks import Throughput


class Clock:
    """Each reading is one second later than the last."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return float(self.now)


def fit(callbacks, *, epochs=3, num_replicas=2, steps_per_execution=1, position=None):
    """Trains three steps an epoch; `callbacks` can be a function of the dataset."""
    strategy = create_strategy(num_replicas)
    data = np.zeros((10, 4), "float32"), np.zeros((10, 1), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    train = tfmulti.distribute_train(data, strategy, 4, seed=0)
    if position is not None:
        train.set_position(*position)
        callbacks = callbacks(train)
    test = tfmulti.distribute_eval(data, strategy, 4)
    return model.fit(train, epochs=epochs, validation_data=test, verbose=0, callbacks=callbacks)


def test_throughput_counts_global_examples_without_the_first_call():
    callback = tfmulti.callbacks.Throughput(clock=Clock())
    history = fit([callback])
    assert (callback.steps, callback.examples) == (9, 30)
    # A second for each step; of nine steps the first is not timed.
    assert callback.seconds == 8.0
    assert callback.examples_per_second == pytest.approx(30 / 9)
    assert len(history.history["examples_per_second"]) == 3


@pytest.mark.slow
def test_throughput_counts_what_is_left_of_an_epoch_that_was_begun():
    made = []

    def callbacks(dataset):
        made.append(tfmulti.callbacks.Throughput(dataset, clock=Clock()))
        return made

    fit(callbacks, epochs=2, position=(0, 1))
    # Batches of 4, 4 and 2 rows: the first was taken before.
    assert (made[0].steps, made[0].examples) == (5, 16)


@pytest.mark.slow
def test_throughput_counts_the_steps_of_a_call():
    callback = tfmulti.callbacks.Throughput(clock=Clock())
    fit([callback], steps_per_execution=3)
    assert (callback.steps, callback.examples) == (9, 30)


def test_calls_that_do_not_divide_an_epoch_count_its_steps(tmp_path):
    """Keras counts two steps for a call with the last one."""
    lines = []
    throughput, made = tfmulti.callbacks.Throughput(clock=Clock()), []

    def callbacks(train):
        # So much later at each reading that every call prints a line.
        clock = itertools.count(0.0, 100.0).__next__
        progress = tfmulti.callbacks.Progress(train, print_fn=lines.append, clock=clock)
        made.append(tfmulti.callbacks.Checkpoint(tmp_path, train))
        return [throughput, progress, *made]

    fit(callbacks, epochs=2, steps_per_execution=2, position=(0, 0))
    assert (throughput.steps, throughput.examples, made[0].saved) == (6, 20, [3, 6])
    assert any("step 3/3" in line for line in lines)
    assert not any("step 4/3" in line for line in lines)


def test_examples_of_an_epoch_that_a_callback_ends_are_those_of_its_steps():
    made = []

    def callbacks(train):
        made.append(tfmulti.callbacks.Throughput(train, clock=Clock()))
        stop = lambda batch, logs: setattr(made[0].model, "stop_training", batch == 1)
        return [*made, keras.callbacks.LambdaCallback(on_train_batch_end=stop)]

    fit(callbacks, position=(0, 0))
    assert (made[0].steps, made[0].examples) == (2, 8)


@pytest.mark.parametrize("kind", [Throughput, tfmulti.callbacks.Progress])
def test_a_dataset_without_a_position_is_refused(kind):
    with pytest.raises(ValueError, match="a result of distribute_train. Received: .* leave it out"):
        kind(tf.data.Dataset.range(3))


def test_throughput_of_one_call_is_not_measured():
    callback = tfmulti.callbacks.Throughput(clock=Clock())
    history = fit([callback], epochs=1, steps_per_execution=3)
    assert callback.examples_per_second is None
    assert "examples_per_second" not in history.history


def test_the_share_of_the_input_is_known_with_one_step_a_call():
    for calls, known in ((1, True), (2, False)):
        strategy = create_strategy(2)
        data = create_data(strategy)
        throughput = Throughput(data)
        model = create_model(strategy, steps_per_execution=calls)
        history = model.fit(data, epochs=2, verbose=0, callbacks=[throughput]).history
        assert ("input_share" in history) == known
        assert history["examples_per_second_per_replica"][-1] == pytest.approx(
            history["examples_per_second"][-1] / 2, rel=1e-3
        )
    assert Throughput().input_share is None


def test_a_step_knows_how_long_it_waited():
    strategy, sleep = create_strategy(1), 0.1

    def wait(x):
        time.sleep(sleep)
        return x

    data = create_data(strategy).map(
        lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [None, 4]), y)
    )
    data.measure_waiting()
    batches = iter(strategy.experimental_distribute_dataset(data))
    began, outside = time.perf_counter(), 0.0
    with contextlib.suppress(StopIteration):
        while True:
            left = time.perf_counter()
            next(batches)
            outside += max(0.0, time.perf_counter() - left - sleep)
    total = time.perf_counter() - began
    assert 4 * sleep - outside - 0.05 < data.seconds_waited <= total


def test_the_time_left_counts_what_is_between_epochs():
    strategy = create_strategy(1)
    data = create_data(strategy)
    throughput, left = Throughput(data, clock=Clock()), []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            left.append(throughput.seconds_left)

    model = create_model(strategy)
    model.fit(data, epochs=3, verbose=0, callbacks=[throughput, Look()])
    # Each reading is a second later: a step takes one, and so does what follows an epoch.
    assert left == [8 + 2, 4 + 1, 0.0]
