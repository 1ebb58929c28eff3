"""What one replica received of a step: its share of the global batch.

`strategy.run` surrounds each of Keras's steps with this. A share without a row would end the
process in a convolution on CPU (oneDNN), so it gets one filler row, whose traces are removed:
from gradients and losses by `DistributedOptimizer`, from metrics and layer state here, from
synchronized batch statistics in `keras_compat`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import keras
import tensorflow as tf

from tfmulti import keras_compat

_NEGATIVE_ZERO = -(2**31)
_local = threading.local()


@dataclasses.dataclass
class Share:
    """One replica's part of a step, while the step is traced.

    Attributes:
        num_rows: Rows that the model sees, int32 scalar.
        num_real: Rows that count, int32 scalar; the others are filler.
        may_be_empty: Whether `num_real` can be 0.
        is_padded: Whether real rows and filler rows can share a batch.
        model: The Keras model of this step, or None.
        averages: Whether the replicas' means are averaged by their rows, as
            `DistributedOptimizer` does; else Keras divides each by the number of replicas.
        weighed: The ids of the optimizers whose loss has been weighed in this step.
        penalty: The penalties of the model before its update, where they were needed.
    """

    num_rows: tf.Tensor
    num_real: tf.Tensor
    may_be_empty: bool = False
    is_padded: bool = False
    model: keras.Model | None = None
    averages: bool = False
    weighed: set[int] = dataclasses.field(default_factory=set)
    penalty: tf.Tensor | None = None
    _num_global: tf.Tensor | None = None

    def count_globally(self) -> tf.Tensor:
        """Returns the rows of all replicas that count, float32 scalar; reduces once a step."""
        # Not a cached_property: its lock, before Python 3.12, keeps one replica's thread waiting
        # for another that waits for it in the reduction.
        if self._num_global is None:
            context = tf.distribute.get_replica_context()
            num_real = tf.cast(self.num_real, tf.float32)
            if context.num_replicas_in_sync > 1:
                num_real = context.all_reduce(tf.distribute.ReduceOp.SUM, num_real)
            self._num_global = num_real
        return self._num_global

    @property
    def weight(self) -> tf.Tensor:
        """What this replica's mean counts in the mean over all replicas, float32 scalar."""
        rows = self.num_rows if self.is_padded else self.num_real
        return tf.math.divide_no_nan(tf.cast(rows, tf.float32), self.count_globally())


def current_share() -> Share | None:
    """Returns the share of the step that this thread traces, or None outside of one."""
    return getattr(_local, "share", None)


@contextlib.contextmanager
def holding(share: Share):
    """Makes `share` the current one."""
    previous = current_share()
    _local.share = share
    try:
        yield share
    finally:
        _local.share = previous


def guard(fn, kind: str, model: keras.Model | None, *, fill: bool, padded: bool, averages: bool):
    """Wraps one of Keras's steps so that shares without a row do no harm.

    Args:
        fn: The step, a function of one batch.
        kind: `"train"`, `"test"` or `"predict"`.
        model: The model, or None.
        fill: Whether to give an empty share a filler row.
        padded: Whether the batch's sample weights can mark filler rows.
        averages: Whether the model's optimizers are distributed.

    Returns:
        A function of one batch.
    """

    def step(data):
        share = _measure(data, model, fill, padded)
        if share is None:
            return fn(data)
        share.averages = averages
        if averages and kind == "train":
            # Here and now, not within a branch of the step's own.
            share.count_globally()
        if share.may_be_empty and not share.is_padded:
            data = _fill(data)
        state = _local_state(model) if share.may_be_empty and kind != "predict" else []
        before = [variable.read_value() for variable in state]
        with holding(share):
            outputs = fn(data)
        if kind == "predict":
            return tf.nest.map_structure(lambda rows: _cut(rows, share), outputs)
        if share.is_padded:
            _correct_loss_log(share)
        if state:
            _restore(state, before, share)
        return outputs

    return step


def _measure(data, model, fill, padded) -> Share | None:
    tensors = tf.nest.flatten(data, expand_composites=False)
    tensors = [t for t in tensors if t is not None]
    if not all(isinstance(t, tf.Tensor) and t.shape.rank for t in tensors) or not tensors:
        return None
    static = tensors[0].shape[0]
    num_rows = tf.shape(tensors[0])[0] if static is None else tf.constant(static)
    weights = _padding_weights(data) if padded else None
    if weights is not None:
        filler = tf.bitcast(weights, tf.int32) == _NEGATIVE_ZERO
        num_real = num_rows - tf.reduce_sum(tf.cast(filler, tf.int32))
        return Share(num_rows, num_real, may_be_empty=True, is_padded=True, model=model)
    if fill and not static:
        return Share(tf.maximum(num_rows, 1), num_rows, may_be_empty=True, model=model)
    return Share(num_rows, num_rows, model=model)


def _padding_weights(data):
    weights = data[2] if isinstance(data, tuple) and len(data) == 3 else None
    if isinstance(weights, tf.Tensor) and weights.dtype == tf.float32 and weights.shape.rank == 1:
        return weights
    return None


def _fill(data):
    tensors = tf.nest.flatten(data)

    def filler_row(tensor):
        shape = tf.concat([[1], tf.shape(tensor)[1:]], axis=0)
        row = tf.fill(shape, "") if tensor.dtype == tf.string else tf.zeros(shape, tensor.dtype)
        return tf.ensure_shape(row, [None, *tensor.shape[1:]])

    filled = tf.cond(
        tf.shape(tensors[0])[0] > 0,
        lambda: [tf.identity(tensor) for tensor in tensors],
        lambda: [filler_row(tensor) for tensor in tensors],
    )
    for tensor, original in zip(filled, tensors):
        tensor.set_shape([None, *original.shape[1:]])
    return tf.nest.pack_sequence_as(data, filled)


def _local_state(model) -> list:
    """Metric states, and layer states that each replica keeps for itself."""
    if model is None:
        return []
    shared = keras_compat.synchronized_variables(model)
    own = [v for v in model.non_trainable_variables if v.aggregation == "none"]
    own = [v for v in own if v.path not in shared and keras.backend.is_float_dtype(v.dtype)]
    return [v.value for v in [*model.metrics_variables, *own]]


def _restore(state, before, share):
    def put_back():
        for variable, value in zip(state, before):
            variable.assign(value)
        return tf.constant(True)

    tf.cond(share.num_real > 0, lambda: tf.constant(False), put_back)


def _cut(rows, share):
    if not isinstance(rows, tf.Tensor) or not rows.shape.rank or not share.may_be_empty:
        return rows
    return rows[: share.num_real]


def regularization(model) -> tf.Tensor:
    """Returns the sum of the penalties that `model` adds to its loss, a float32 scalar."""
    penalties = [tf.cast(loss, tf.float32) for loss in model.losses] if model else []
    return tf.add_n(penalties) if penalties else tf.constant(0.0)


def _correct_loss_log(share):
    """Takes filler rows out of the running mean that Keras shows as `loss`."""
    trackers = [m for m in share.model.metrics if m.name == "loss"] if share.model else []
    filler = tf.cast(share.num_rows - share.num_real, tf.float32)
    penalty = regularization(share.model) if share.penalty is None else share.penalty
    for tracker in trackers:
        tracker.count.assign_sub(tf.cast(filler, tracker.count.dtype))
        tracker.total.assign_sub(penalty * filler)
