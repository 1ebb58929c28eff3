"""The two workloads for stock Keras, without tfmulti: models, data, and a clock."""

import time

import keras
import numpy as np
import tensorflow as tf


def create_model(workload):
    """Creates the network of a workload, as tfmulti.bench has it."""
    layers = keras.layers
    if workload == "communication":
        hidden = [layers.Dense(2048, activation="relu") for _ in range(4)]
        return keras.Sequential([keras.Input((2048,)), *hidden, layers.Dense(10)])
    model = [keras.Input((28, 28, 1))]
    for filters in (16, 32):
        model += [layers.Conv2D(filters, 5, padding="same"), layers.BatchNormalization()]
        model += [layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*model, layers.Flatten(), layers.Dense(10)])


def create_data(workload, global_batch_size, steps):
    """Creates a pipeline of so many global batches, which Keras gives to the replicas."""
    shape = (28, 28, 1) if workload == "compute" else (2048,)
    random = np.random.default_rng(0)
    x = random.random((40 * global_batch_size, *shape), dtype="float32")
    y = random.integers(0, 10, len(x))
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).repeat()
    options = tf.data.Options()
    # With it, `fit` waits for seconds after its last step; a step costs the same.
    options.autotune.enabled = False
    data = data.batch(global_batch_size, drop_remainder=True).take(steps).prefetch(2)
    return data.with_options(options)


class Clock(keras.callbacks.Callback):
    """Notes when each step has ended."""

    def on_train_begin(self, logs=None):
        """Begins anew."""
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        self.ends.append(time.perf_counter())


def trainer(strategy, workload, global_batch_size):
    """Builds and compiles in the strategy's scope; returns a function that does steps."""
    with strategy.scope():
        model = create_model(workload)
        model.compile(
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    pipelines = {}

    def train(steps):
        if steps not in pipelines:
            pipelines[steps] = create_data(workload, global_batch_size, steps)
        clock = Clock()
        model.fit(pipelines[steps], verbose=0, callbacks=[clock])
        return {"ends": clock.ends}

    return train
