"""Builds a configuration's model and pipeline, and trains blocks of steps under a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfmulti.bench import setups, workloads
from tfmulti.bench.config import BenchConfig
from tfmulti.callbacks import Devices, Throughput
from tfmulti.data import distribute_train
from tfmulti.step.optimizer import DistributedOptimizer, distribute_optimizers
from tfmulti.strategies import create_strategy


def create(kind: str) -> Callable[..., dict[str, list[float]]]:
    """Creates the strategy of a transport.

    Args:
        kind: `"ring"` or `"mpi"`.

    Returns:
        A function `reduce(floats, times)`: the seconds of each sum of so many float32 values.
    """
    strategy = create_strategy("multi_worker", communication=kind)

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
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            reduce_once(values)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    return reduce


_SEED = 0
# Of a source that is a stream: each block fills it anew, and is to measure the stream.
_BUFFERED_BATCHES = 2


def use_threads(count: int) -> None:
    """Gives each operation `count` threads."""
    tf.config.threading.set_intra_op_parallelism_threads(count)


class Ends(keras.callbacks.Callback):
    """Notes when each call of the training function has ended, by the clock and by the processor.

    Attributes:
        times: The time at each end.
        cpu_times: The processor's seconds, of all threads of this process.
    """

    def __init__(self):
        super().__init__()
        self.times: list[float] = []
        self.cpu_times: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())


class Trained:
    """A model in one configuration, ready to train.

    Args:
        config: The bench.
        task: What to build: its `kind`, `workload`, `replicas` and `batch_size`.

    Attributes:
        facts: What the driver should know: the bytes of the gradients.
    """

    def __init__(self, config: BenchConfig, task: dict):
        self._kind, self._batch_size = task["kind"], task["batch_size"]
        self._strategy = _create_strategy(self._kind, task["replicas"], config.verify)
        replicas = self._strategy.num_replicas_in_sync if self._strategy else 1
        self._global_batch_size = self._batch_size * replicas
        keras.utils.set_random_seed(_SEED)
        self._workload = workloads.create_workload(task["workload"], config, replicas)
        self._models: dict[int, keras.Model] = {}
        self._data: dict[tuple[int, bool, bool], tf.data.Dataset] = {}
        weights = self._model(1).trainable_variables
        size = sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in weights)
        self.facts = {"gradient_bytes": size, "gradients": len(weights)}

    def train(
        self,
        steps: int,
        steps_per_execution: int = 1,
        input_only: bool = False,
        autotune: bool = False,
        monitored: bool = False,
    ) -> dict[str, list[float]]:
        """Trains a block of steps by one call of `fit`.

        Args:
            steps: The steps, a multiple of `steps_per_execution`.
            steps_per_execution: The steps of one call.
            input_only: Whether to draw the batches alone, and train nothing.
            autotune: Whether a pipeline by hand has tf.data's autotune, as by default. Its thread
                keeps `fit` waiting after the last step, so it is for measuring that alone.
            monitored: Whether to train with `Throughput` and `Devices`.

        Returns:
            The times at the end of each call, the processor's seconds at each, the seconds of
            verification, and those from the beginning to the end of the first call without it.
        """
        # Of their own: the steps measure how long they wait for monitored data.
        data = self._dataset(steps, autotune, monitored)
        if input_only:
            return {"ends": self._draw(data)}
        ends, monitors, began = Ends(), [], time.perf_counter()
        if monitored:
            monitors = [Throughput(data, print_fn=_forget), Devices(print_fn=_forget)]
        self._model(steps_per_execution).fit(
            data, epochs=1, shuffle=False, verbose=0, callbacks=[*monitors, ends]
        )
        verified = getattr(self._strategy, "seconds_verified", 0.0)
        first = ends.times[0] - began - verified
        times = {"ends": ends.times, "cpu_ends": ends.cpu_times}
        return {**times, "verified": [verified], "first": [first]}

    def _dataset(self, steps, autotune, monitored):
        key = (steps, autotune, monitored)
        if key not in self._data:
            self._data[key] = self._create_dataset(steps, autotune)
        return self._data[key]

    def _create_dataset(self, steps, autotune):
        if self._kind in (setups.PLAIN, setups.ONE_REPLICA):
            return by_hand(self._workload.train, self._batch_size, steps, autotune)
        return distribute_train(
            self._workload.train,
            self._strategy,
            self._global_batch_size,
            seed=_SEED,
            steps_per_epoch=steps,
            shuffle_buffer=_BUFFERED_BATCHES * self._global_batch_size,
        )

    def _draw(self, data):
        """Draws all batches as training would, in a function of the graph."""
        if self._strategy is not None:
            data = self._strategy.experimental_distribute_dataset(data)
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
            if self._strategy is None:
                model = self._create_model(steps_per_execution)
            else:
                with self._strategy.scope():
                    model = self._create_model(steps_per_execution)
            self._models[steps_per_execution] = model
        return self._models[steps_per_execution]

    def _create_model(self, steps_per_execution):
        first = next(iter(self._models.values()), None)
        if first is not None and not self._workload.is_own:
            # The same weights under another training function: no second copy in memory.
            model = keras.Model(first.inputs, first.outputs)
        else:
            model = self._workload.create()
        if model.compiled:
            model.steps_per_execution = steps_per_execution
            if self._strategy is not None:
                distribute_optimizers(model)
            return model
        optimizer = keras.optimizers.get(self._workload.optimizer)
        model.compile(
            optimizer=optimizer if self._strategy is None else self._distribute(optimizer),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
        return model

    def _distribute(self, optimizer):
        if self._kind == setups.MPI_BFLOAT16:
            return DistributedOptimizer(optimizer, compression="bfloat16")
        return DistributedOptimizer(optimizer)


def _forget(line):
    """Tells nobody."""


def _create_strategy(kind, replicas, verify):
    if kind == setups.PLAIN:
        return None
    if kind == setups.ONE_REPLICA:
        return create_strategy("mirrored", devices=["CPU:0"])
    if kind == setups.MIRRORED:
        return create_strategy("mirrored", logical_cpus=replicas, verify=verify)
    if kind in setups.MULTI_WORKER:
        communication = kind.partition("_")[0]
        return create_strategy("multi_worker", communication=communication, verify=verify)
    return create_strategy("one_device", devices=["CPU:0"])


def by_hand(split, batch_size: int, steps: int, autotune: bool) -> tf.data.Dataset:
    """Returns a pipeline as one writes it for one device: shuffle, batch, prefetch."""
    if isinstance(split, tf.data.Dataset):
        data = split.shuffle(_BUFFERED_BATCHES * batch_size, seed=_SEED)
    else:
        examples = len(tf.nest.flatten(split)[0])
        data = tf.data.Dataset.from_tensor_slices(split).shuffle(examples, seed=_SEED)
    data = data.repeat().batch(batch_size, drop_remainder=True).take(steps).prefetch(2)
    if autotune:
        return data
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)
