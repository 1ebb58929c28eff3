"""Values of the first replica for all replicas, in steps that each computes from all rows.

All replicas then compute the same, except for random numbers that TensorFlow draws without a seed
and for kernels of GPUs that add in any order. Every replica takes the first one's gradients, state
and logs, so that all hold the same weights.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.runtime.scoped import Scoped
from tfmulti.step.sums import add_by_dtype, from_sent, to_send, values_of_gradient, with_values


class _Step:
    """A step of one replica, while it is traced.

    Attributes:
        number: The job-wide number of the replica, which the step does not see.
        graph: The graph of the step; other graphs are those of its branches and loops.
        gradients: The gradients of the first replica that were sent in it.
    """

    def __init__(self):
        self.number = tf.distribute.get_replica_context().replica_id_in_sync_group
        self.graph = tf.compat.v1.get_default_graph()
        self.gradients: list = []


_step = Scoped(None)


def in_replicated_step() -> bool:
    """Whether this thread traces a step that every replica computes from the whole batch."""
    return _step.value is not None


def replica_number() -> tf.Tensor:
    """Returns the job-wide number of the replica, also within a step that hides it."""
    step, context = _step.value, tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group if step is None else step.number, tf.int32)


def as_first_replica_step(step):
    """Wraps a step so that it has the whole batch, and the number of the first replica."""

    def whole(data):
        with _step.set_to(_Step()), keras_compat.as_first_replica():
            return step(data)

    return whole


def gradients_of_first_replica(grads) -> list:
    """Returns the first replica's gradients on all replicas, for an optimizer.

    In a branch or a loop, where replicas cannot communicate, it returns the gradients unchanged; so
    it does if it has returned them before, for an optimizer around this one.

    Args:
        grads: Tensors, `tf.IndexedSlices` and None.
    """
    step, grads = _step.value, list(grads)
    is_sent = all(g is None or any(g is sent for sent in step.gradients) for g in grads)
    in_branch = not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not step.graph
    if is_sent or in_branch:
        return grads
    grads = of_first_replica(grads)
    step.gradients.extend(grads)
    return grads


def of_first_replica(values) -> list:
    """Returns the first replica's values on all replicas.

    It is a collective.

    Args:
        values: Tensors, `tf.IndexedSlices` and None. All replicas have the same rows of a table,
            so of `tf.IndexedSlices` only the values are sent.
    """
    is_first = replica_number() == 0
    present = [tf.convert_to_tensor(values_of_gradient(v)) for v in values if v is not None]
    sent = [to_send(value) for value in present]
    # Multiplied by 0, the NaN of another replica would stay.
    sent = [tf.where(is_first, value, tf.zeros_like(value)) for value in sent]
    step = _step.value
    with keras_compat.reducing_over_replicas(None if step is None else step.number):
        added = add_by_dtype(sent)
    added = iter(from_sent(total, value.dtype) for total, value in zip(added, present))
    return [None if value is None else with_values(value, next(added)) for value in values]
