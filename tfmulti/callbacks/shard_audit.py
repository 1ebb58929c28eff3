"""Reports after every epoch which rows each replica received."""

from __future__ import annotations

from collections.abc import Callable

import keras
from absl import logging


class ShardAuditLog(keras.callbacks.Callback):
    """Reports the rows that each replica received, and lists missing and repeated rows.

    Comparing is a collective, so every worker needs this callback.

    Args:
        dataset: The result of `distribute_train(..., audit=True)`.
        print_fn: Function of one line of text; None on workers that stay quiet.
    """

    def __init__(self, dataset, print_fn: Callable[[str], None] | None = logging.info):
        super().__init__()
        self._dataset, self._print_fn = dataset, print_fn
        self.reports = []

    def on_epoch_end(self, epoch, logs=None):
        """Compares the epoch's rows over all replicas."""
        report = self._dataset.audit.report(self._dataset.position[0])
        self.reports.append(report)
        if self._print_fn is not None:
            self._print_fn(f"shards of {report}")
