"""What processors, memory and GPUs did in each epoch, on every worker."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf
from absl import logging

from tfmulti import hardware
from tfmulti.callbacks.history import HistoryFile
from tfmulti.strategies import collectives
from tfmulti.strategies.coordination import KeyValueExchange


class Devices(keras.callbacks.Callback):
    """Reads processor, memory and GPUs in a thread, and tells their means after every epoch.

    Give it to every worker, before callbacks that write logs. psutil reads the processor and the
    memory, NVML the GPUs (`pip install 'tfmulti[monitor]'`); what cannot be read is left out, and
    told once. Validation, and the compiling of the first epoch, are within the means.

    The epoch's logs get, where it is known, of this worker: `cpu_percent`, of all cores of the
    host, and `memory_percent`, of its memory, whoever uses them; `process_cores`, the cores that
    this process kept busy, and `process_memory_gb`; `gpu_percent`, the mean of its GPUs,
    `gpu_memory_percent`, of the fullest, and `gpu_watts`, of all. Every GPU is in `folder`.

    Workers leave their means for the chief after every epoch, over TensorFlow's coordination
    service and not with the steps. The chief tells where a GPU (or where there is none a worker's
    processor) does over 20% less than another. A worker without this callback is told, and not
    waited for.

    Tried without GPUs, and over a library in place of NVML's; not tried on a real GPU.

    Args:
        folder: Where each worker writes `devices_<task>.csv`, and TensorBoard's scalars in a
            folder `devices_<task>`, of each of its GPUs; None for neither.
        print_fn: Function of one line of text.
        interval_s: Seconds from one reading to the next.
        readers: Objects with `read()`, which returns numbers by name, and `close()`; by default
            those of this host's devices.

    Attributes:
        readings: The means of the last epoch, of every device of this worker.
        imbalance: What was told of the last epoch, or None.

    Raises:
        ValueError: For an interval that is not above 0.

    Example:
    >>> Devices(interval_s=5.0).readings
    {}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        print_fn: Callable[[str], None] = logging.info,
        *,
        interval_s: float = 1.0,
        readers: Sequence | None = None,
    ):
        super().__init__()
        if interval_s <= 0:
            raise ValueError(
                "`interval_s` must be more than 0. "
                f"Received: interval_s={interval_s}. Use for example 1.0."
            )
        self._folder = None if folder is None else Path(folder)
        self._print_fn, self._interval_s, self._given = print_fn, interval_s, readers
        self._sampler: hardware.Sampler | None = None
        self._told_of_missing = False
        self.readings: dict[str, float] = {}
        self.imbalance: str | None = None

    def on_train_begin(self, logs=None):
        """Begins to read."""
        self._stop()
        self._notes = KeyValueExchange(self.model.distribute_strategy)
        self._chief = collectives.is_chief(self.model.distribute_strategy)
        self._table = self._writer = self._ended_epoch = self.imbalance = None
        readers = self._find_readers() if self._given is None else self._given
        self._sampler = hardware.Sampler(readers, self._interval_s)
        self._sampler.start()

    def on_epoch_begin(self, epoch, logs=None):
        """Tells of the epoch before, and leaves out what was between the epochs."""
        self._tell_of_epoch()
        self._sampler.take()
        if self._folder is not None and self._table is None:
            self._open_files(epoch)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the means to the logs, and writes the files."""
        self.readings, self._ended_epoch = self._sampler.take(), epoch
        self._notes.leave(epoch, json.dumps(self.readings))
        if logs is not None:
            logs.update(hardware.summarize(self.readings))
        if self._table is not None:
            rounded = {name: round(value, 3) for name, value in self.readings.items()}
            self._table.on_epoch_end(epoch, rounded)
            with self._writer.as_default():
                for name, value in self.readings.items():
                    tf.summary.scalar(f"devices/{name}", value, step=epoch)
            self._writer.flush()

    def on_train_end(self, logs=None):
        """Tells of the last epoch, and ends the thread."""
        self._tell_of_epoch()
        self._stop()
        if self._writer is not None:
            self._writer.close()

    def _stop(self):
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _find_readers(self):
        readers, missing, no_gpu = hardware.find_readers()
        told = [missing] if missing else []
        if no_gpu is not None and tf.config.list_physical_devices("GPU"):
            told.append(f"no GPU is read: {no_gpu}")
        if not self._told_of_missing:
            for line in told:
                self._print_fn(line)
        self._told_of_missing = True
        return readers

    def _open_files(self, epoch):
        name = f"devices_{self._notes.worker.replace(' ', '_')}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._table = HistoryFile(self._folder / f"{name}.csv")
        self._table.on_epoch_begin(epoch)
        with tf.init_scope(), tf.device("CPU:0"):
            self._writer = tf.summary.create_file_writer(str(self._folder / name))

    def _tell_of_epoch(self):
        """Called when all workers have ended the epoch, and no progress bar is under way."""
        if self._ended_epoch is None:
            return
        epoch, self._ended_epoch = self._ended_epoch, None
        if self.readings:
            name = self._notes.worker
            self._print_fn(f"{name}, epoch {epoch + 1}: {hardware.describe(self.readings)}")
        for failure in self._sampler.failures:
            self._print_fn(f"{self._notes.worker}: no longer read: {failure}")
        self._sampler.failures.clear()
        if self._chief:
            self._compare(epoch)

    def _compare(self, epoch):
        texts, missing = self._notes.read(epoch)
        if missing:
            names = ", ".join(sorted(missing))
            self._print_fn(f"no readings of {names}: give `Devices` to every worker")
        before, known = self.imbalance, {self._notes.worker: self.readings}
        self.imbalance = hardware.describe_imbalance(known | _parse(texts))
        # Once, not after every epoch for as long as it lasts.
        if self.imbalance is not None and before is None:
            self._print_fn(self.imbalance)


def _parse(texts: Mapping[str, str]) -> dict[str, dict[str, float]]:
    readings = {}
    for worker, text in texts.items():
        # Another version may leave something else.
        with contextlib.suppress(ValueError):
            readings[worker] = json.loads(text)
    return readings
