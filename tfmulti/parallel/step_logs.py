"""Which of the values that a step logs are results of metrics, by whatever name it logs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.runtime.scoped import with_attributes


def counting_as(share: tf.Tensor) -> contextlib.AbstractContextManager:
    """Makes running means and sums count one number of a step as a share of it.

    On one device a step counts once in them. The shares of a batch's parts, by their rows, add up
    to that, and the numbers to the mean over all rows.

    Args:
        share: The share.
    """

    def update(original, metric, values, sample_weight=None):
        if sample_weight is None and keras.ops.ndim(values) == 0:
            sample_weight = share if tf.convert_to_tensor(values).dtype.is_floating else None
        return original(metric, values, sample_weight)

    return keras_compat.means_updated_by(update)


class StepLogs:
    """The logs of one kind of step.

    Args:
        model: The model.

    Attributes:
        names: The names that the step logs.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        # Each result that the step has asked for, with the metric and the result's key, or None.
        self._asked: list[tuple] = []
        self._metrics: dict[str, tuple] = {}
        self.names: set[str] = set()

    @contextlib.contextmanager
    def noting_results(self) -> Iterator[None]:
        """Notes within the context which metric a result is of: a step may give it any name."""
        with contextlib.ExitStack() as stack:
            for metric in self._model.metrics:
                result = self._noting(metric, metric.result)
                stack.enter_context(with_attributes(metric, result=result))
            yield

    def _noting(self, metric, original):
        def result():
            value = original()
            several = flatten(value) if isinstance(value, dict) else {None: value}
            self._asked += [(each, metric, key) for key, each in several.items()]
            return value

        return result

    def others(self, scope, logs: dict | None) -> dict[str, tf.Tensor]:
        """Returns what the step logs besides the results of metrics.

        Args:
            scope: The `RecordingScope` of the step, in which results are computed.
            logs: What the step has returned.
        """
        logs, known = flatten(logs or {}), set()
        for metric in self._model.metrics:
            if any(id(variable) in scope.updated for variable in metric.variables):
                result = metric.result()
                known |= set(flatten(result) if isinstance(result, dict) else {metric.name})
        self._metrics = {
            name: (metric, key)
            for name, log in logs.items()
            for value, metric, key in self._asked
            if value is log
        }
        self._asked, self.names = [], set(logs)
        known |= set(self._metrics)
        return {name: tf.convert_to_tensor(v) for name, v in logs.items() if name not in known}

    def results(self) -> dict[str, tf.Tensor]:
        """Returns the metrics' results by the names that the step logs, from their states now."""
        results = self._results_of_used()
        for name, (metric, key) in self._metrics.items():
            result = metric.result()
            results[name] = result if key is None else flatten(result)[key]
        return {name: value for name, value in results.items() if name in (self.names or results)}

    def _results_of_used(self):
        model, unused = self._model, keras_compat.unbuilt_metrics(self._model)
        if not unused:
            return flatten(model.get_metrics_result())
        # A step of one's own need not use all metrics of `compile`, which then have no result.
        used = [metric for metric in model.metrics if all(metric is not each for each in unused)]
        return flatten({metric.name: metric.result() for metric in used})


def flatten(logs: dict) -> dict:
    """Returns logs by their own names, also those within dicts, as Keras does.

    A step returns such a dict if it logs the result of all metrics of `compile` together.

    Example:
    >>> flatten({"loss": 0.5, "compile_metrics": {"mae": 0.25}})
    {'mae': 0.25, 'loss': 0.5}
    """
    flat = {}
    for name, log in sorted(logs.items()):
        flat |= flatten(log) if isinstance(log, dict) else {name: log}
    return flat
