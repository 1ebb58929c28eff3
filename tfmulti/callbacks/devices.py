"""CPU, memory and GPU use of every worker in each epoch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import tensorflow as tf
from absl import logging

from tfmulti import hardware, topology
from tfmulti.callbacks.tracking import HistoryFile
from tfmulti.strategies.coordination import EpochTexts


class Devices(keras.callbacks.Callback):
    """Samples CPU, memory and GPUs in a thread, and reports their means after every epoch.

    Pass it on every worker, before callbacks that write logs. psutil reads CPU and memory
    (`pip install 'tfmulti[monitor]'`), NVML the GPUs. Values that cannot be read are skipped, with
    one message. The means include validation and the compilation in the first epoch.

    It adds these values of this worker, if known, to the epoch's logs: `cpu_percent` and
    `memory_percent`, of the whole host; `process_cores` and `process_memory_gb`, of this process;
    `gpu_percent`, the mean over its GPUs; `gpu_memory_percent`, of the fullest GPU; and
    `gpu_watts`, the sum over its GPUs. The files in `folder` have every GPU.

    Workers publish their means for the chief after every epoch, through TensorFlow's coordination
    service and not with the steps. The chief reports a GPU (or without GPUs a worker's CPU) that
    is used over 20% less than another. It also reports a worker without this callback, and does
    not wait for it.

    Tested without GPUs, with a substitute for NVML, and on one H200; not with several GPUs.

    Args:
        folder: Where each worker writes `devices_<task>.csv` and TensorBoard scalars, in a folder
            `devices_<task>`, for each of its GPUs; None for neither.
        print_fn: Function of one line of text.
        interval_s: Seconds from one reading to the next.
        readers: Objects with `read()`, which returns numbers by name, and `close()`; by default
            those of this host's devices.

    Attributes:
        readings: The means of the last epoch for every device of this worker.
        imbalance: The reported imbalance of the last epoch, or None.

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
                "`interval_s` must be above 0. "
                f"Received: interval_s={interval_s}. Use for example 1.0."
            )
        self._folder = None if folder is None else Path(folder)
        self._print_fn, self._interval_s, self._given = print_fn, interval_s, readers
        self._sampler: hardware.Sampler | None = None
        self._has_reported_missing = False
        self.readings: dict[str, float] = {}
        self.imbalance: str | None = None

    def on_train_begin(self, logs=None):
        """Starts sampling."""
        self._stop()
        self._exchange = EpochTexts(self.model.distribute_strategy)
        self._chief = topology.is_chief(self.model.distribute_strategy)
        self._table = self._writer = self._ended_epoch = self.imbalance = None
        readers = self._find_readers() if self._given is None else self._given
        self._sampler = hardware.Sampler(readers, self._interval_s)
        self._sampler.start()

    def on_epoch_begin(self, epoch, logs=None):
        """Reports the previous epoch, and discards the samples between the epochs."""
        self._report_epoch()
        self._sampler.take()
        if self._folder is not None and self._table is None:
            self._open_files(epoch)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the means to the logs, and writes the files."""
        self.readings, self._ended_epoch = self._sampler.take(), epoch
        self._exchange.publish(epoch, json.dumps(self.readings))
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
        """Reports the last epoch, and ends the thread."""
        self._report_epoch()
        self._stop()
        if self._writer is not None:
            self._writer.close()

    def _stop(self):
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _find_readers(self):
        readers, missing, no_gpu = hardware.find_readers()
        lines = [missing] if missing else []
        if no_gpu is not None and tf.config.list_physical_devices("GPU"):
            lines.append(f"no GPU is read: {no_gpu}")
        if not self._has_reported_missing:
            for line in lines:
                self._print_fn(line)
        self._has_reported_missing = True
        return readers

    def _open_files(self, epoch):
        name = f"devices_{self._exchange.worker.replace(' ', '_')}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._table = HistoryFile(self._folder / f"{name}.csv")
        self._table.on_epoch_begin(epoch)
        with tf.init_scope(), tf.device("CPU:0"):
            self._writer = tf.summary.create_file_writer(str(self._folder / name))

    def _report_epoch(self):
        """Reports an epoch; called when all workers have ended it and no bar is drawn."""
        if self._ended_epoch is None:
            return
        epoch, self._ended_epoch = self._ended_epoch, None
        if self.readings:
            name = self._exchange.worker
            self._print_fn(f"{name}, epoch {epoch + 1}: {hardware.describe(self.readings)}")
        for failure in self._sampler.failures:
            self._print_fn(f"{self._exchange.worker}: no longer read: {failure}")
        self._sampler.failures.clear()
        if self._chief:
            self._compare(epoch)

    def _compare(self, epoch):
        texts, missing = self._exchange.read(epoch)
        if missing:
            names = ", ".join(sorted(missing))
            self._print_fn(f"no readings from {names}: pass `Devices` to `fit` on every worker")
        before, readings = self.imbalance, {self._exchange.worker: self.readings}
        for worker, text in texts.items():
            # Another version may publish something else.
            with contextlib.suppress(ValueError):
                readings[worker] = json.loads(text)
        self.imbalance = hardware.describe_imbalance(readings)
        # Once, not after every epoch for as long as it lasts.
        if self.imbalance is not None and before is None:
            self._print_fn(self.imbalance)
