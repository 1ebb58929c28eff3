"""What trains in the processes of Keras, beside what users measure."""

from __future__ import annotations

import time

import keras
import tensorflow as tf

from tfmulti.bench.training import BUFFERED_BATCHES, SEED, Trained, create_workload, note_ends
from tfmulti.callbacks import Devices, Throughput


def by_hand(split, batch_size: int, steps: int, autotune: bool = False) -> tf.data.Dataset:
    """Returns a pipeline as one writes it for one device: shuffle, batch, prefetch.

    Args:
        split: The data, as `load_dataset` gives a split.
        batch_size: The rows of a batch.
        steps: The number of batches.
        autotune: Whether it has tf.data's autotune, as by default. Its thread keeps `fit` waiting
            for seconds after the last step, so it is for measuring that alone.
    """
    if isinstance(split, tf.data.Dataset):
        data = split.shuffle(BUFFERED_BATCHES * batch_size, seed=SEED)
    else:
        examples = len(tf.nest.flatten(split)[0])
        data = tf.data.Dataset.from_tensor_slices(split).shuffle(examples, seed=SEED)
    data = data.repeat().batch(batch_size, drop_remainder=True).take(steps).prefetch(2)
    options = tf.data.Options()
    options.autotune.enabled = autotune
    return data.with_options(options)


class ByHand(Trained):
    """Trains on a pipeline by hand."""

    def create_dataset(self, batch_size, steps, **more):
        """Creates the pipeline of a block."""
        return by_hand(self.data, batch_size, steps, **more)


class Monitored(Trained):
    """Trains with the monitors where an order has `monitored`."""

    def create_callbacks(self, data, monitored=False):
        """Creates the monitors, and a clock of the processor."""
        self._cpu_ends = []
        clock = note_ends(self._cpu_ends, time.process_time)
        if not monitored:
            return [clock]
        return [Throughput(data, print_fn=_forget), Devices(print_fn=_forget), clock]

    def __call__(self, steps, **more):
        """Trains; adds the processor's seconds at the end of each call."""
        return {**super().__call__(steps, **more), "cpu_ends": self._cpu_ends}


def _forget(line):
    """Tells nobody."""


def train_stock(strategy: tf.distribute.Strategy, task):
    """Builds and compiles in a stock strategy's scope; returns a function that does steps."""
    data, create = create_workload(task)
    global_batch_size = task["batch_size"] * strategy.num_replicas_in_sync
    with strategy.scope():
        model = create()
        model.compile(
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    pipelines = {}

    def train(steps):
        if steps not in pipelines:
            pipelines[steps] = by_hand(data, global_batch_size, steps)
        ends = []
        model.fit(pipelines[steps], verbose=0, callbacks=[note_ends(ends)])
        return {"ends": ends}

    return train
