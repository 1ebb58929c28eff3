"""Checks while training runs: that numbers are finite, and which rows each replica received."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat
from tfmulti.choices import ON_NONFINITE
from tfmulti.settings import check_choice
from tfmulti.strategies import guarded

_STEPS_BETWEEN_LOOKS_AT_A_GPU = 10


class NonFiniteError(RuntimeError):
    """A loss, a gradient or a weight is infinite or not a number."""


class NonFinite(keras.callbacks.Callback):
    """Skips updates whose gradients are not finite, and then stops or continues.

    It checks gradients after the reduction, so all replicas and workers decide the same at the
    same step. It also checks weights when training begins, and weights and the loss after every
    epoch: a loss can stay finite although weights are not. Put it before `Checkpoint`. A later
    `fit` without it checks nothing.

    Args:
        action: `"stop"` to end with an error, `"skip"` to continue without those updates.
        print_fn: Function of one line of text.

    Attributes:
        skipped: Updates skipped since `fit` began.

    Raises:
        ValueError: For another action.

    Example:
    >>> NonFinite("skip").skipped
    0
    """

    def __init__(self, action: str = "stop", print_fn: Callable[[str], None] = logging.warning):
        super().__init__()
        check_choice("action", action, ON_NONFINITE, "Use 'stop' to end with an error.")
        self._action, self._print_fn, self._guard = action, print_fn, None
        self.skipped = 0

    def on_train_begin(self, logs=None):
        """Installs the guard in the optimizer, before the step is traced."""
        self._epoch, self._calls, self.skipped = 0, 0, 0
        self._guard = guarded.guard(self.model)
        if self._guard is not None:
            self._guard.reset()
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._every = _STEPS_BETWEEN_LOOKS_AT_A_GPU if on_gpu else 1
        self._check_weights()

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        """Reads the guard's count."""
        self._calls += 1
        if self._calls % self._every == 0:
            self._look()

    def on_epoch_end(self, epoch, logs=None):
        """Checks the epoch's last steps, its loss, and the weights."""
        self._look()
        for name, value in (logs or {}).items():
            if name in ("loss", "val_loss") and not np.isfinite(value) and not self.skipped:
                self._stop(f"`{name}` is {value}")
        self._check_weights()

    def on_train_end(self, logs=None):
        """Takes the guard out again: another `fit` may have no such callback."""
        guarded.release(self.model)

    def _look(self):
        if self._guard is None:
            return
        count, step, name = self._guard.read()
        if count == self.skipped:
            return
        if self._action == "stop":
            self._stop(f"the gradient of {name} at step {step}")
        self._print_fn(f"{count - self.skipped} update(s) skipped, the first with {name}")
        self.skipped = count

    def _check_weights(self):
        for variable in self.model.variables:
            floating = keras.backend.is_float_dtype(variable.dtype)
            # A sharded weight is looked at where it is; elsewhere there is nothing to see.
            with keras_compat.held_values():
                is_finite = not floating or keras.ops.all(keras.ops.isfinite(variable.value))
            if not is_finite:
                self._stop(f"the weight {variable.path}")

    def _stop(self, what):
        # `on_train_end` is not called after an error.
        guarded.release(self.model)
        raise NonFiniteError(
            "Loss, gradients and weights must be finite. "
            f"Received: {what}, in epoch {self._epoch}. Look at that step's data, lower the "
            'learning rate, or skip such steps: on_nonfinite="skip".'
        )


class ShardAuditLog(keras.callbacks.Callback):
    """Reports the rows that each replica received, and lists missing and repeated rows.

    They are compared with the rows that were planned for the steps that the epoch has taken.
    Comparing is a collective, so every worker needs this callback.

    Args:
        dataset: The result of `distribute_train(..., audit=True)`.
        print_fn: Function of one line of text; None on workers that stay quiet.

    Raises:
        ValueError: For a dataset without an audit.
    """

    def __init__(self, dataset, print_fn: Callable[[str], None] | None = logging.info):
        super().__init__()
        if getattr(dataset, "audit", None) is None:
            raise ValueError(
                "`dataset` must be a result of distribute_train that records its rows. "
                f"Received: dataset={dataset!r} without an audit. "
                "Use distribute_train(..., audit=True)."
            )
        self._dataset, self._print_fn = dataset, print_fn
        self.reports = []

    def on_epoch_begin(self, epoch, logs=None):
        """Notes where the epoch begins: it may take only some steps of a pass."""
        self._began = self._dataset.position

    def on_epoch_end(self, epoch, logs=None):
        """Compares the rows of the epoch's steps over all replicas."""
        report = self._dataset.audit.report(*self._dataset.steps_since(self._began))
        self.reports.append(report)
        if self._print_fn is not None:
            self._print_fn(f"shards of {report}")
