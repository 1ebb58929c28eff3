"""Losses and metrics of Keras that see the rows of the whole global batch on every replica."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfmulti import keras_compat, step
from tfmulti.step import losses
from tfmulti.step.gathering import gather_batch


@keras.saving.register_keras_serializable(package="tfmulti")
class WholeBatchLoss(keras.losses.Loss):
    """A loss that is computed from the rows of the whole global batch, on every replica.

    For losses that replicas cannot put together from their shares: contrastive losses that give
    one number for each row, and functions that are called in a `train_step`. With it they have
    one device's value and gradient. A `keras.losses.Loss`, and a function given to `compile`,
    that is one number for a batch (Dice, Tversky, Circle, the root of a mean, a sum over some
    tokens divided by their number) gets all rows without it, and this says so. A mean or a sum
    over rows needs none of it, and sends less: see `gather_batch`, which brings labels,
    predictions and weights here.

    On one device it is the loss itself.

    Args:
        loss: A Keras loss, a function of labels and predictions, or the name of one.
        name: Name of the loss; by default that of `loss`.

    Raises:
        ValueError: For something else, and for a loss with `reduction=None`.

    A process that loads a model which was saved with it names the class first:
    `from tfmulti import WholeBatchLoss`.

    Example:
    >>> loss = WholeBatchLoss(keras.losses.Dice())
    >>> float(loss([[0.0], [1.0]], [[0.0], [1.0]]))
    0.0
    """

    def __init__(self, loss, name: str | None = None):
        loss = _loss_of(loss)
        super().__init__(name=name or loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self.loss = loss

    def call(self, y_true, y_pred):
        """Returns the losses of the rows it is given, before their reduction."""
        return self.loss.call(y_true, y_pred)

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Returns the loss of the whole batch, the same number on all replicas.

        Args:
            y_true: Labels of this replica, of shape `(rows, ...)`.
            y_pred: Predictions for them.
            sample_weight: Weights, or None.

        Returns:
            A scalar tensor.
        """
        whole = _gather(y_true, y_pred, sample_weight)
        with losses.of_whole_batch():
            return self.loss(*whole)

    def get_config(self):
        """Returns what `from_config` makes the same loss of."""
        return {"loss": keras.saving.serialize_keras_object(self.loss), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """Makes a loss of what `get_config` returned."""
        return cls(keras.saving.deserialize_keras_object(config["loss"]), config["name"])


@keras.saving.register_keras_serializable(package="tfmulti")
class WholeBatchMetric(keras.metrics.Metric):
    """A metric that is updated with the rows of the whole global batch, on every replica.

    For metric functions that compare rows and return one number for each. Classes of one's own
    (a maximum, the best so far, a moving average, a count of batches), and functions that return
    one number for a batch, are updated so without it, where they are among the model's metrics.
    Keras adds a metric's state up over replicas. Here every replica has the state that one
    device would have, so any initial value will do. Metrics of Keras are right without it.

    On one device it is the metric itself. Create it in the strategy's scope.

    Args:
        metric: A Keras metric, a function of labels and predictions, or the name of one. Its state
            belongs to this metric from then on.
        name: Name of the metric; by default that of `metric`.

    Raises:
        ValueError: For something else.

    A process that loads a model which was saved with it names the class first:
    `from tfmulti import WholeBatchMetric`.

    Example:
    >>> def largest_error(y_true, y_pred):
    ...     return keras.ops.max(keras.ops.abs(y_true - y_pred))
    >>> metric = WholeBatchMetric(largest_error)
    >>> metric.update_state(tf.constant([1.0, 2.0]), tf.constant([1.0, 5.0]))
    >>> float(metric.result())
    3.0
    """

    def __init__(self, metric, name: str | None = None):
        metric = _metric_of(metric)
        super().__init__(name=name or metric.name, dtype=metric.dtype)
        self.metric = metric
        keras_compat.keep_on_each_replica(metric.variables)

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Updates the metric with the rows of all replicas.

        Args:
            y_true: Labels of this replica, of shape `(rows, ...)`.
            y_pred: Predictions for them.
            sample_weight: Weights, or None.
        """
        y_true, y_pred, sample_weight = _gather(y_true, y_pred, sample_weight)
        weights = {} if sample_weight is None else {"sample_weight": sample_weight}
        with losses.of_whole_batch():
            self.metric.update_state(y_true, y_pred, **weights)
        # Some metrics make theirs when they first see rows.
        keras_compat.keep_on_each_replica(self.metric.variables)

    def result(self):
        """Returns the metric's value, the same on all replicas."""
        # A replica's variable is no tensor, and a metric can return one.
        return keras.tree.map_structure(_value_of, self.metric.result())

    def reset_state(self):
        """Resets the metric, on all replicas."""
        self.metric.reset_state()

    def get_config(self):
        """Returns what `from_config` makes the same metric of."""
        return {"metric": keras.saving.serialize_keras_object(self.metric), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """Makes a metric of what `get_config` returned."""
        return cls(keras.saving.deserialize_keras_object(config["metric"]), config["name"])


# Keras's own losses that are no mean over rows.
_OF_THE_BATCH = ("Dice", "Tversky", "Circle", "dice", "tversky", "circle")


def call_loss(call, loss, y_true, y_pred, sample_weight=None):
    """Computes a loss, from the rows of all replicas where it needs them.

    Keras's losses are means over rows, but for Dice, Tversky and Circle. One of the user's own
    that gives one number for a batch can be anything.

    Args:
        call: `keras.losses.Loss.__call__`.
        loss: The loss.
        y_true: Labels of this replica's rows.
        y_pred: Predictions for them.
        sample_weight: Weights, or None.
    """
    if not _on_shares() or not _needs_batch(loss, y_true, y_pred):
        return call(loss, y_true, y_pred, sample_weight)
    y_true, y_pred, sample_weight = _gather(y_true, y_pred, sample_weight)
    with losses.of_whole_batch():
        return call(loss, y_true, y_pred, sample_weight)


def prepare_losses(model: keras.Model) -> None:
    """Has losses that override `Loss.__call__` computed as others of the user's own are.

    Args:
        model: A model that is built.
    """
    for loss in [*keras_compat.compiled_losses(model), *keras_compat.own_losses(model)]:
        if not keras_compat.is_stock(type(loss)) and not isinstance(loss, WholeBatchLoss):
            keras_compat.around_call_of(type(loss), call_loss)


def update_metric_function(update, metric, function, y_true, y_pred, sample_weight=None):
    """Updates a metric that is a function of the user's own, which can give one number.

    Args:
        update: `keras.metrics.MeanMetricWrapper.update_state`.
        metric: The metric.
        function: The function.
        y_true: Labels of this replica's rows.
        y_pred: Predictions for them.
        sample_weight: Weights, or None.
    """
    if not _on_shares() or keras_compat.is_stock(function.func):
        return update(metric, y_true, y_pred, sample_weight)
    if keras.ops.ndim(function(y_true, y_pred)) != 0:
        return update(metric, y_true, y_pred, sample_weight)
    y_true, y_pred, _ = _gather(y_true, y_pred, None)
    with losses.of_whole_batch():
        value = function(y_true, y_pred)
    return keras.metrics.Mean.update_state(metric, value, sample_weight)


def prepare_metrics(model: keras.Model) -> None:
    """Has metrics of the user's own see the rows of all replicas, whatever they make of them.

    What Keras adds up over replicas is right for sums over rows alone.

    Args:
        model: A model that is built, before its metrics are reset.
    """
    for metric in keras_compat.all_metrics(model):
        if keras_compat.is_stock(type(metric)) or isinstance(metric, WholeBatchMetric):
            continue
        keras_compat.keep_on_each_replica(metric.variables)
        keras_compat.update_metric_by(metric, functools.partial(_update_own, metric))


def _update_own(metric, update, *args, **kwargs):
    if not _on_shares():
        return update(*args, **kwargs)
    args, kwargs = _of_all_replicas((args, kwargs))
    with losses.of_whole_batch():
        result = update(*args, **kwargs)
    # Some metrics make theirs when they first see rows.
    keras_compat.keep_on_each_replica(metric.variables)
    return result


def _of_all_replicas(structure):
    """Gathers rows, and takes numbers for means over them."""
    replica_batch, context = step.current_replica_batch(), tf.distribute.get_replica_context()

    def of_all(part):
        if not isinstance(part, tf.Tensor):
            return part
        if part.shape.rank != 0:
            return gather_batch(part)
        if not part.dtype.is_floating:
            return part
        weighed = part * tf.cast(replica_batch.weight, part.dtype)
        return context.all_reduce("SUM", tf.where(replica_batch.num_real > 0, weighed, 0))

    return tf.nest.map_structure(of_all, structure)


def _on_shares() -> bool:
    context = tf.distribute.get_replica_context()
    many = context is not None and context.num_replicas_in_sync > 1
    return many and step.current_replica_batch() is not None


def _needs_batch(loss, y_true, y_pred) -> bool:
    function = getattr(loss, "fn", None)
    kind = type(loss) if function is None else function
    if keras_compat.is_stock(kind):
        return getattr(kind, "__name__", "") in _OF_THE_BATCH
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        # What it does with the numbers of rows is its own.
        return True
    rows = keras.tree.map_structure(
        lambda part: keras.ops.convert_to_tensor(part, dtype=loss.dtype), (y_true, y_pred)
    )
    return keras.ops.ndim(loss.call(*rows)) == 0


def _loss_of(loss) -> keras.losses.Loss:
    found = _get(keras.losses, loss)
    if not callable(found):
        raise ValueError(
            "`loss` must be a Keras loss, a function of labels and predictions, or the name of "
            f"one. Received: loss={loss!r}. Use for example keras.losses.Dice()."
        )
    if not isinstance(found, keras.losses.Loss):
        return keras_compat.loss_of(found)
    if found.reduction in (None, "none"):
        raise ValueError(
            "`loss` must reduce the whole batch to one number. "
            f"Received: {type(found).__name__} with reduction={found.reduction!r}. "
            'Use reduction="sum_over_batch_size".'
        )
    return found


def _metric_of(metric) -> keras.metrics.Metric:
    found = _get(keras.metrics, metric)
    if isinstance(found, keras.metrics.Metric):
        return found
    if not callable(found):
        raise ValueError(
            "`metric` must be a Keras metric, a function of labels and predictions, or the name "
            f"of one. Received: metric={metric!r}. Use for example keras.metrics.AUC()."
        )
    name = getattr(found, "__name__", type(found).__name__)
    return keras.metrics.MeanMetricWrapper(found, name=name)


def _value_of(result):
    held = isinstance(result, (keras.Variable, tf.Variable, tf.distribute.DistributedValues))
    return tf.convert_to_tensor(result) if held else result


def _get(where, identifier):
    try:
        return where.get(identifier)
    except (ValueError, TypeError):
        return None


def _gather(y_true, y_pred, sample_weight) -> tuple:
    """Gathers what losses and metrics are given, and the masks that come with predictions."""
    masks = [keras_compat.mask_of(part) for part in tf.nest.flatten(y_pred)]
    whole = gather_batch((y_true, y_pred, sample_weight, masks))
    for part, mask in zip(tf.nest.flatten(whole[1]), whole[3]):
        keras_compat.set_mask(part, mask)
    return whole[:3]
