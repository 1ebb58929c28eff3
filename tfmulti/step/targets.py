"""What a tape of a step differentiates: how replicas weight it, and what they have alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import tensorflow as tf

from tfmulti.step import gathered_rows, weighting
from tfmulti.step.rows import current_replica_batch


def initial_gradients(targets, given, replica_batch) -> list[tf.Tensor]:
    """Returns the initial gradients of targets for the backward pass on this replica.

    Args:
        targets: The tensors that a tape differentiates.
        given: The gradients of targets that are the same on every replica, which the caller of a
            tape passes as `output_gradients`; None if it passes none.
        replica_batch: This replica's batch.
    """
    roots = []
    times = [None] * len(targets) if given is None else tf.nest.flatten(given)
    for target, factor in zip(targets, times, strict=True):
        is_same = given is not None or gathered_rows.has_gathered_rows(target)
        root = weighting.initial_gradient(target, replica_batch, is_same)
        roots.append(root if factor is None else root * tf.cast(factor, root.dtype))
    return roots


def note_reduced(grads: Iterable) -> None:
    """Notes gradients that a tape has reduced in the step that is traced."""
    known = current_replica_batch().reduced
    known.update({id(each): weakref.ref(each) for each in grads if isinstance(each, tf.Tensor)})


def are_reduced(target) -> bool:
    """Whether a nested structure consists of gradients that a tape has reduced in this step.

    Every replica has the same ones, and so the products of their derivatives with given vectors,
    such as those of the Hessian, can be weighted and added.
    """
    replica_batch = current_replica_batch()
    known = {} if replica_batch is None else replica_batch.reduced
    return all(id(x) in known and known[id(x)]() is x for x in tf.nest.flatten(target))
