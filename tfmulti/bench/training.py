"""The workloads; trains blocks of their steps in a configuration, or reduces, under a clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.data import distribute_train
from tfmulti.data.datasets import load_dataset
from tfmulti.step.optimizer import DistributedOptimizer, distribute_optimizers
from tfmulti.strategies import create_strategy
from tfmulti.train.models import create_model

SEED = 0
BUFFERED_BATCHES = 2
"""Of a source that is a stream: each block fills it anew, and is to measure the stream."""

_CLASSES = 10
_STEPS_OF_DATA = 40


def create_workload(task: Mapping[str, Any]) -> tuple[Any, Callable[[], keras.Model]]:
    """Returns a task's data for all of its replicas, and a function that creates its model.

    The data are the user's own, or random numbers from a fixed seed.
    """
    if task["workload"] == "own":
        train, _ = load_dataset(task["dataset"])
        return train, lambda: create_model(task["model"], train)
    shape, create = {
        "compute": ((28, 28, 1), create_compute),
        "communication": ((2048,), create_communication),
    }[task["workload"]]
    examples = task["batch_size"] * task["replicas"] * _STEPS_OF_DATA
    random = np.random.default_rng(SEED)
    labels = random.integers(0, _CLASSES, examples)
    return (random.random((examples, *shape), dtype="float32"), labels), create


def create_compute() -> keras.Model:
    """Creates the two-convolution network of the field's tutorials; 0.1 MB of gradients."""
    layers = keras.layers
    model = [keras.Input((28, 28, 1))]
    for filters in (16, 32):
        model += [layers.Conv2D(filters, 5, padding="same"), layers.BatchNormalization()]
        model += [layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*model, layers.Flatten(), layers.Dense(_CLASSES)], name="compute")


def create_communication() -> keras.Model:
    """Creates four dense layers of 2048 units and one of 10; 67 MB of gradients."""
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(4)]
    layers = [keras.Input((2048,)), *hidden, keras.layers.Dense(_CLASSES)]
    return keras.Sequential(layers, name="communication")


def create_all_reduce(task: Mapping[str, Any]) -> Callable[[int, int], dict]:
    """Creates the strategy of a transport, to measure the all-reduce alone.

    Returns:
        A function `reduce(floats, times)`: the seconds of each sum of so many float32 values.
    """
    strategy = create_strategy(**task["strategy"])

    def add(values):
        # Created on the replica's device, since the reduction needs one; nothing is copied.
        return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(values))

    # Traced for each size: a collective keeps its first shape.
    @tf.function
    def reduce_once(values):
        return strategy.run(add, args=(values,))

    def reduce(floats: int, times: int) -> dict[str, list[float]]:
        with tf.device("CPU:0"):
            values = tf.ones([floats], tf.float32)
        ends = [time.perf_counter()]
        for _ in range(times):
            reduce_once(values)
            ends.append(time.perf_counter())
        return {"seconds": np.diff(ends).tolist()}

    return reduce


def note_ends(ends: list[float], clock=time.perf_counter) -> keras.callbacks.Callback:
    """Returns a callback that notes when each call of the training function has ended."""
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs=None: ends.append(clock())
    )


class Trained:
    """A model in one configuration, ready to train.

    Args:
        task: What to build, as `create_setup` describes it.

    Attributes:
        facts: What the driver should know: the bytes of the gradients.
        strategy: The strategy, or None.
        data: The data, as `load_dataset` gives a split.
    """

    def __init__(self, task: Mapping[str, Any]):
        self._task, self._is_own = task, task["workload"] == "own"
        self.strategy = _create_strategy(task)
        keras.utils.set_random_seed(SEED)
        self.data, self._create = create_workload(task)
        self._models: dict[int, keras.Model] = {}
        self._data: dict[tuple, tf.data.Dataset] = {}
        weights = self._model(1).trainable_variables
        size = sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in weights)
        self.facts = {"gradient_bytes": size}

    def __call__(
        self, steps: int, steps_per_execution: int = 1, input_only: bool = False, **more
    ) -> dict[str, Any]:
        """Trains a block of steps by one call of `fit`.

        Args:
            steps: The steps, a multiple of `steps_per_execution`.
            steps_per_execution: The steps of one call.
            input_only: Whether to draw the batches alone, and train nothing.
            **more: For `create_dataset` and `create_callbacks`.

        Returns:
            The times at the end of each call, the seconds of verification, and those from the
            beginning to the end of the first call without it.
        """
        key = (steps, *more.items())
        if key not in self._data:
            self._data[key] = self.create_dataset(self._task["batch_size"], steps, **more)
        data = self._data[key]
        if input_only:
            return {"ends": self._draw(data)}
        ends, began = [], time.perf_counter()
        self._model(steps_per_execution).fit(
            data,
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[*self.create_callbacks(data, **more), note_ends(ends)],
        )
        verified = getattr(self.strategy, "seconds_verified", 0.0)
        return {"ends": ends, "verified": verified, "first": ends[0] - began - verified}

    def create_dataset(self, batch_size: int, steps: int, **more) -> tf.data.Dataset:
        """Creates the pipeline of a block; `batch_size` is of one replica."""
        global_batch_size = batch_size * self.strategy.num_replicas_in_sync
        return distribute_train(
            self.data,
            self.strategy,
            global_batch_size,
            seed=SEED,
            steps_per_epoch=steps,
            shuffle_buffer=BUFFERED_BATCHES * global_batch_size,
        )

    def create_callbacks(self, data, **more) -> Sequence[keras.callbacks.Callback]:
        """Creates the callbacks of a block, beside the clock."""
        return ()

    def _draw(self, data):
        """Draws all batches as training would, in a function of the graph."""
        if self.strategy is not None:
            data = self.strategy.experimental_distribute_dataset(data)
        iterator, ends = iter(data), []

        @tf.function
        def draw(iterator):
            return next(iterator)

        try:
            while True:
                draw(iterator)
                ends.append(time.perf_counter())
        except (tf.errors.OutOfRangeError, StopIteration):
            return ends

    def _model(self, steps_per_execution):
        if steps_per_execution not in self._models:
            with self.strategy.scope() if self.strategy else contextlib.nullcontext():
                model = self._create_model(steps_per_execution)
            self._models[steps_per_execution] = model
        return self._models[steps_per_execution]

    def _create_model(self, steps_per_execution):
        first = next(iter(self._models.values()), None)
        if first is not None and not self._is_own:
            # The same weights under another training function: no second copy in memory.
            model = keras.Model(first.inputs, first.outputs)
        else:
            model = self._create()
        if model.compiled:
            model.steps_per_execution = steps_per_execution
            if self.strategy is not None:
                distribute_optimizers(model, compression=self._task["compression"])
            return model
        optimizer = keras.optimizers.get("adam" if self._is_own else "sgd")
        if self.strategy is not None:
            optimizer = DistributedOptimizer(optimizer, compression=self._task["compression"])
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
        return model


def _create_strategy(task):
    arguments = task["strategy"]
    if not arguments:
        return None
    if arguments["name"] == "mirrored" and "devices" not in arguments:
        arguments = {**arguments, "logical_cpus": task["replicas"]}
    return create_strategy(**arguments, verify=task["verify"])
