"""Makes the logs of a step ignore dummy rows, and equal on all replicas and workers."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.runtime.scoped import Scoped
from tfmulti.step.rows import current_replica_batch
from tfmulti.step.sums import add_by_dtype

# Methods of Keras that a user's class can override.
_STEPS = ("train_step", "test_step", "compute_metrics", "get_metrics_result")
_ROUNDING = 1e-6
# The results of metrics that the current step has computed, by the id of the tensor.
_results_of_step = Scoped(None)


def output_losses(replica_batch) -> list:
    """Returns the loss trackers of the individual outputs of a model."""
    if replica_batch.model is None:
        return []
    return keras_compat.output_loss_trackers(replica_batch.model)


def count_once(tracker, before, replica_batch) -> None:
    """Makes a step count once in an output's running mean loss, with the mean over all rows.

    Keras gives every replica's update the same weight, whatever its number of rows.
    """
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    part = (tracker.total - before) * tf.cast(replica_batch.weight, before.dtype) * num_replicas
    tracker.total.assign(before + replica_batch.zero_if_empty(part))


def weight_mean(update, metric, values, sample_weight=None):
    """Makes a running mean or sum count a step once over all replicas if it is given one number.

    A `train_step` calls `tracker.update_state(loss)`, and a metric function can return the mean
    over a batch. On one device each step has weight 1. The weights of all replicas add up to that;
    otherwise each would have weight 1, whatever its number of rows.

    Args:
        update: The original `Mean.update_state` or `Sum.update_state`.
        metric: The metric.
        values: A number, or several, which it counts unchanged.
        sample_weight: Their weights, if the user gives them.
    """
    if sample_weight is None and keras.ops.ndim(values) == 0:
        values, sample_weight = _weighted(metric, values) or (values, None)
    return update(metric, values, sample_weight)


def _weighted(metric, value):
    """Returns a mean over this replica's rows, and this replica's weight; None outside a step."""
    replica_batch = current_replica_batch()
    if replica_batch is None or any(metric is tracker for tracker in output_losses(replica_batch)):
        return None
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        return None
    return replica_batch.zero_if_empty(value), replica_batch.weight


def compare_with_metrics(logs, replica_batch) -> dict[tuple, tf.Tensor | None]:
    """Finds which of a step's logs are results of the model's metrics.

    A step can return `{"loss": loss}` although the model has a metric of that name that the step
    never updates. Call this right after the step, before anything else changes the metrics' states.

    Args:
        logs: The logs that the step returned.
        replica_batch: The replica's rows of it.

    Returns:
        For each log that has a metric's name and shape, by its path: a float32 scalar, 0.0 if it
        is that metric's result on this replica, else 1.0; or None in Keras's own steps, where it
        always is that metric's result.
    """
    if not isinstance(logs, dict) or replica_batch.model is None or not logs:
        return {}
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1:
        return {}
    logs = _flatten(logs)
    results, differing = _results(replica_batch.model, logs), {}
    for path, result in results.items():
        value = _to_tensor(logs[path])
        if value is None or value.dtype != result.dtype or value.shape != result.shape:
            continue
        # Logs of a dummy row tell nothing.
        counts = _differ(value, result) & (replica_batch.num_real > 0)
        differing[path] = (
            None if _has_keras_methods(replica_batch.model) else tf.cast(counts, tf.float32)
        )
    return differing


def _has_keras_methods(model) -> bool:
    own = [n for n in _STEPS if getattr(type(model), n) is not getattr(keras.Model, n)]
    return not own and not any(name in vars(model) for name in _STEPS)


def _differ(value, other) -> tf.Tensor:
    """Whether two tensors differ by more than rounding."""
    if not value.dtype.is_floating:
        return tf.reduce_any(value != other)
    apart = tf.abs(value - other) > tf.cast(_ROUNDING, value.dtype) * tf.abs(other)
    return tf.reduce_any(apart | (tf.math.is_nan(value) != tf.math.is_nan(other)))


def as_numbers(logs):
    """Returns logs in which `True` and `False` are 1.0 and 0.0, which replicas can average."""
    return tf.nest.map_structure(
        lambda log: (
            tf.cast(log, tf.float32) if isinstance(log, tf.Tensor) and log.dtype.is_bool else log
        ),
        logs,
        expand_composites=False,
    )


def make_global(logs, replica_batch, differing, requests=None, beside=()):
    """Makes a step's logs global, and adds other tensors in the same reduction.

    Logs of metrics are computed from the metrics' states added over all replicas, as Keras does
    at the end of an epoch; so a callback that reads a batch's logs decides the same on every
    worker. Other logs are averaged over replicas, weighted by rows.

    Args:
        logs: The logs that the step returned.
        replica_batch: The replica's rows of it.
        differing: The result of `compare_with_metrics`.
        requests: The workers' `CoordinationRequests`, sent with the same reduction; or None.
        beside: Tensors to add over all replicas with the same reduction.

    Returns:
        The logs, and the sums of `beside`.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return logs, list(beside)
    variables = keras_compat.metric_variables(replica_batch.model) if differing else []
    # Whole-batch metrics already have the state of all rows on every replica.
    variables = [v for v in variables if v.aggregation == "sum"]
    states = [variable.value.read_value() for variable in variables]
    paths = _flatten(logs) if isinstance(logs, dict) else {}
    flags = {path: flag for path, flag in differing.items() if flag is not None}
    own = {path: log for path, log in paths.items() if path in flags or path not in differing}
    parts = _parts_of_means(own, replica_batch)
    numbers = [_concat([replica_batch.num_real, *flags.values(), *parts.values()])] if own else []
    requested = [] if requests is None else [requests.part_of_step()]
    added = add_by_dtype([*states, *numbers, *beside, *requested])
    if requests is not None:
        requests.note(added.pop())
    states, added = added[: len(states)], added[len(states) :]
    numbers, sums = added[: len(numbers)], added[len(numbers) :]
    if not paths:
        return logs, sums
    # The variables keep this replica's own states, which Keras adds when it reads them.
    with keras.StatelessScope(state_mapping=list(zip(variables, states))):
        results = _results(replica_batch.model, {path: paths[path] for path in differing})
    if own:
        rows, found, means = tf.split(numbers[0], [1, len(flags), -1])
        flags = dict(zip(flags, tf.unstack(found)))
        own = _split(tf.math.divide_no_nan(means, rows), own, parts)
    return _choose(logs, results, flags, own), sums


def _flatten(logs) -> dict[tuple, object]:
    """Returns logs by their path: `(name,)`, or `(name, key)` if a metric returns several."""
    flat = {}
    for name, log in logs.items():
        inner = {(name, key): value for key, value in log.items()} if isinstance(log, dict) else {}
        flat |= inner or {(name,): log}
    return flat


def note_result(result, metric):
    """Returns a metric's result, and records it because a step can log it under another name.

    Args:
        result: The original `result` method.
        metric: The metric.
    """
    value = result(metric)
    if current_replica_batch() is not None and _results_of_step.value is not None:
        _results_of_step.value[id(value)] = (value, metric)
    return value


def forget_results() -> None:
    """Forgets what `note_result` recorded in this thread; called when a step begins."""
    _results_of_step.value = {}


def _metric_of(log):
    """Returns the metric whose result a log is, or None."""
    value, metric = (_results_of_step.value or {}).get(id(log), (None, None))
    return metric if value is log else None


def _results(model, paths) -> dict[tuple, tf.Tensor]:
    """Returns the current results of the metrics that are logged at the given paths."""
    found, names = {}, {metric.name for metric in model.metrics}
    others = any(path[0] not in names for path in paths)
    # A metric that the step has not used yet has no variables, and so no result.
    if others and not keras_compat.unbuilt_metrics(model):
        found = _flatten(model.get_metrics_result())
    for metric in model.metrics:
        if any(path[0] == metric.name and path not in found for path in paths):
            found |= _flatten({metric.name: metric.result()})
    for path, log in paths.items():
        metric = _metric_of(log)
        # A step may log its own metric by the name of another, such as Keras's "loss".
        is_own = any(metric is each for each in model.metrics)
        if metric is not None and (is_own or path not in found):
            found[path] = metric.result()
    found = {path: _to_tensor(found[path]) for path in paths if path in found}
    return {path: value for path, value in found.items() if value is not None}


def _to_tensor(value) -> tf.Tensor | None:
    """Returns a number, or a variable that a metric returned, as a tensor; else None."""
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return None


def _dtype() -> tf.DType:
    """That of metrics' states mostly, with which they are added in one reduction."""
    return tf.float64 if keras.config.floatx() == "float64" else tf.float32


def _parts_of_means(logs, replica_batch) -> dict[tuple, tf.Tensor]:
    """Returns this replica's flat contribution to the sum over all rows, for each float log."""
    rows = tf.cast(replica_batch.num_real, _dtype())
    parts = {}
    for path, log in logs.items():
        value = _to_tensor(log)
        if value is None or not value.dtype.is_floating or not value.shape.is_fully_defined():
            continue
        if value.shape.rank and tf.executing_eagerly():
            # It may have a number for each row, and replicas have different numbers of rows.
            continue
        flat = tf.reshape(tf.cast(value, _dtype()), [-1])
        parts[path] = replica_batch.zero_if_empty(flat * rows)
    return parts


def _concat(parts) -> tf.Tensor:
    return tf.concat([tf.reshape(tf.cast(part, _dtype()), [-1]) for part in parts], axis=0)


def _split(means, logs, parts) -> dict[tuple, tf.Tensor]:
    """Splits the concatenated means into one tensor for each log."""
    sizes = [part.shape[0] for part in parts.values()]
    found = {}
    for path, mean in zip(parts, tf.split(means, sizes) if sizes else []):
        log = _to_tensor(logs[path])
        found[path] = tf.cast(tf.reshape(mean, log.shape), log.dtype)
    return found


def _choose(logs, results, flags, means) -> dict:
    """Returns the metric's result for logs that are one on all replicas, for others the mean."""

    def choose(path, log):
        if path in flags and path in means and path in results:
            return tf.where(flags[path] > 0, means[path], results[path])
        value = results.get(path, means.get(path, _to_tensor(log)))
        return log if value is None else value

    return {
        name: {key: choose((name, key), value) for key, value in log.items()}
        if isinstance(log, dict)
        else choose((name,), log)
        for name, log in logs.items()
    }
