"""Keras losses and metrics that every replica computes from the rows of the whole global batch."""

from __future__ import annotations

import functools
import inspect

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import local_steps, losses, needs_batch
from tfmulti.step.gathering import gather_batch, local_rows, row_positions
from tfmulti.step.rows import current_replica_batch, distributed_batch


@keras.saving.register_keras_serializable(package="tfmulti")
class WholeBatchLoss(keras.losses.Loss):
    """A loss that every replica computes from the rows of the whole global batch.

    Use it for functions that are called in a `train_step`, and for losses that compare rows while
    steps run eagerly. They then have the same value and gradient as on one device. A
    `keras.losses.Loss`, or a function passed to `compile`, that returns one number for a batch
    (Dice, Tversky, Circle, the root of a mean, a sum over some tokens divided by their number) or
    a number for each row that needs other rows, such as a contrastive loss, gets all rows without
    this class; you may still use it to make that explicit. A mean or a sum over rows does not need
    it, and sends less without it. Labels, predictions and weights are gathered with
    `gather_batch`.

    On one device it equals the given loss.

    Args:
        loss: A Keras loss, a function of labels and predictions, or the name of one.
        name: Name of the loss; by default that of `loss`.

    Raises:
        ValueError: For any other argument, and for a loss with `reduction=None`.

    To load a model that was saved with it, import the class first:
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
        """Returns the losses of the given rows, before the reduction."""
        return self.loss.call(y_true, y_pred)

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Returns the loss of the whole batch, which is the same number on all replicas.

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
        """Returns the configuration for `from_config`."""
        return {"loss": keras.saving.serialize_keras_object(self.loss), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """Creates a loss from the result of `get_config`."""
        return cls(keras.saving.deserialize_keras_object(config["loss"]), config["name"])


@keras.saving.register_keras_serializable(package="tfmulti")
class WholeBatchMetric(keras.metrics.Metric):
    """A metric that every replica updates with the rows of the whole global batch.

    Use it for metrics that compare rows while steps run eagerly, and that a `train_step` updates by
    itself. Custom metric classes (a maximum, the best so far, a moving average, a count of
    batches), and functions that return one number for a batch, or one for each row that needs other
    rows (a rank), get all rows without it if they are among the model's metrics. Keras adds a
    metric's state over replicas. This class keeps the state of one device on every replica instead,
    so the initial value may be any number. Keras's own metrics do not need it.

    On one device it equals the given metric. Create it in the strategy's scope.

    Args:
        metric: A Keras metric, a function of labels and predictions, or the name of one. This
            metric takes over its state.
        name: Name of the metric; by default that of `metric`.

    Raises:
        ValueError: For any other argument.

    To load a model that was saved with it, import the class first:
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

    @local_steps.over_all_workers()
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
        # Some metrics create their variables at the first update.
        keras_compat.keep_on_each_replica(self.metric.variables)

    def result(self):
        """Returns the metric's value, which is the same on all replicas."""
        # A metric can return a variable, which is not a tensor in a replica.
        return keras.tree.map_structure(_value_of, self.metric.result())

    def reset_state(self):
        """Resets the metric, on all replicas."""
        self.metric.reset_state()

    def get_config(self):
        """Returns the configuration for `from_config`."""
        return {"metric": keras.saving.serialize_keras_object(self.metric), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """Creates a metric from the result of `get_config`."""
        return cls(keras.saving.deserialize_keras_object(config["metric"]), config["name"])


def call_own_loss(call, loss, *args, **kwargs):
    """Computes a loss by its own `__call__`; one of other arguments gets the rows of all replicas.

    Args:
        call: The `__call__`.
        loss: The loss.
        *args: What it takes.
        **kwargs: What it takes by name.
    """
    if "sample_weight" in inspect.signature(call).parameters:
        return call_loss(call, loss, *args, **kwargs)
    if distributed_batch() is None and not losses.is_loop():
        return call(loss, *args, **kwargs)
    args, kwargs = _of_all_replicas((args, kwargs))
    with losses.of_whole_batch():
        return call(loss, *args, **kwargs)


def call_loss(call, loss, y_true, y_pred, sample_weight=None):
    """Computes a loss, from the rows of all replicas if it needs them.

    Keras's losses are means over rows, except Dice, Tversky, Circle and the two hinges. A custom
    loss that returns one number for a batch can be any function of all rows, so it gets them. One
    that returns a number for each row gets them if its graph combines rows.

    Args:
        call: `keras.losses.Loss.__call__`.
        loss: The loss.
        y_true: Labels of this replica's rows.
        y_pred: Predictions for them.
        sample_weight: Weights, or None.
    """
    own = functools.partial(call, loss)
    if distributed_batch() is None and not losses.is_loop():
        return _with_enough_rows(own, y_true, y_pred, sample_weight)
    if not needs_batch.is_needed_by_loss(loss, y_true, y_pred):
        return own(y_true, y_pred, sample_weight)
    whole = _gather(y_true, y_pred, sample_weight)
    with losses.of_whole_batch():
        result = own(*whole)
    if needs_batch.is_hinge(loss) and loss.reduction in (None, "none"):
        # What computes with them has numbers for this replica's rows.
        return _own_values(result, y_pred)
    return result


def _own_values(values, y_pred):
    """Takes the values of this replica's rows, also in a loop of the user's own."""
    if distributed_batch() is not None:
        return local_rows(values)
    count = tf.shape(y_pred)[0]
    [start], _ = row_positions([count])
    return values[start : start + count]


# As many rows as any loss or metric may need to be traced.
_MANY_ROWS = 4096


def _with_enough_rows(own, *parts):
    """Calls a function; if it cannot be built with Keras's few rows, with these repeated.

    The five largest of four errors do not exist.
    """
    try:
        return own(*parts)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        in_replica = tf.distribute.get_replica_context() is not None
        if tf.executing_eagerly() or in_replica:
            raise
        num_rows = getattr(keras.tree.flatten(parts)[0], "shape", ())[:1]
        if not num_rows or not num_rows[0]:
            raise
        repeats = -(-_MANY_ROWS // num_rows[0])

        def many(part):
            return None if part is None else keras.ops.repeat(part, repeats, axis=0)

        try:
            return own(*keras.tree.map_structure(many, parts))
        except (ValueError, tf.errors.InvalidArgumentError):
            # More rows do not help: the first error is the real one.
            raise error from None


def prepare_losses(model: keras.Model) -> None:
    """Applies `call_own_loss` to custom losses that override `Loss.__call__`.

    Args:
        model: A model that is built.
    """
    for loss in [*keras_compat.compiled_losses(model), *keras_compat.own_losses(model)]:
        if not keras_compat.is_stock(type(loss)) and not isinstance(loss, WholeBatchLoss):
            # Python looks up `__call__` in the class, so it cannot be replaced in one loss.
            keras_compat.around_call_of(type(loss), call_own_loss)


@local_steps.over_all_workers()
def update_metric_function(update, metric, function, y_true, y_pred, sample_weight=None):
    """Updates a metric that is a function of rows.

    One that returns one number for a batch gets all rows: a custom one, Keras's Dice, a loss. So
    does one that returns a number for each row and needs other rows for it; each replica then
    counts the numbers of its own rows.

    Args:
        update: `keras.metrics.MeanMetricWrapper.update_state`.
        metric: The metric.
        function: The function.
        y_true: Labels of this replica's rows.
        y_pred: Predictions for them.
        sample_weight: Weights, or None.
    """
    if distributed_batch() is None:
        own = functools.partial(update, metric)
        return _with_enough_rows(own, y_true, y_pred, sample_weight)
    if not needs_batch.is_needed_by_metric(function, y_true, y_pred):
        return update(metric, y_true, y_pred, sample_weight)
    all_true, all_pred, _ = _gather(y_true, y_pred, None)
    with losses.of_whole_batch():
        values = function(all_true, all_pred)
    if keras.ops.ndim(values):
        values = local_rows(values)
        # Keras's own update applies the mask, and it is skipped here.
        mask = keras_compat.mask_of(y_pred)
        sample_weight = keras_compat.masked_weights(sample_weight, mask, metric.dtype)
    return keras.metrics.Mean.update_state(metric, values, sample_weight)


def prepare_metrics(model: keras.Model) -> None:
    """Makes custom metrics see the rows of all replicas.

    Keras adds a metric's state over replicas, which is only correct for sums over rows.

    Args:
        model: A model that is built, before its metrics are reset.
    """
    for metric in keras_compat.all_metrics(model):
        if keras_compat.is_stock(type(metric)) or isinstance(metric, WholeBatchMetric):
            continue
        keras_compat.keep_on_each_replica(metric.variables)
        keras_compat.update_metric_by(metric, functools.partial(_update_own, metric))


@local_steps.over_all_workers()
def _update_own(metric, update, *args, **kwargs):
    if distributed_batch() is None:
        return update(*args, **kwargs)
    args, kwargs = _of_all_replicas((args, kwargs))
    with losses.of_whole_batch():
        result = update(*args, **kwargs)
    # Some metrics create their variables at the first update.
    keras_compat.keep_on_each_replica(metric.variables)
    return result


def _of_all_replicas(structure):
    """Gathers rows and their masks, and averages scalars, which are assumed to be means."""
    replica_batch, context = current_replica_batch(), tf.distribute.get_replica_context()

    def of_all(part):
        if not isinstance(part, tf.Tensor):
            return part
        if part.shape.rank != 0:
            return _with_masks(part)
        if not part.dtype.is_floating or replica_batch is None:
            return part
        return context.all_reduce("SUM", replica_batch.weighted(part))

    return tf.nest.map_structure(of_all, structure)


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
    """Gathers the inputs of a loss or a metric, and the masks of the predictions.

    One number for all rows, as a label or a weight can be, stays as it is.
    """
    labels, weights = (None if _is_number(part) else part for part in (y_true, sample_weight))
    labels, y_pred, weights = _with_masks((labels, y_pred, weights))
    return (
        y_true if labels is None else labels,
        y_pred,
        sample_weight if weights is None else weights,
    )


def _is_number(part) -> bool:
    shape = () if isinstance(part, float | int) else getattr(part, "shape", None)
    return tf.TensorShape(shape).rank == 0


def _with_masks(structure):
    """Gathers rows; where layers have attached masks to them, these too."""
    # A mask is an attribute of the tensor, which the gathered one does not have.
    masks = [keras_compat.mask_of(part) for part in tf.nest.flatten(structure)]
    whole, masks = gather_batch((structure, masks))
    for part, mask in zip(tf.nest.flatten(whole), masks):
        keras_compat.set_mask(part, mask)
    return whole
