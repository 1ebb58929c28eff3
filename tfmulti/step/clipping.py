"""Clips gradients by the norms of variables that are in parts, on several workers or servers."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfmulti import keras_compat


def clip_sharded(optimizer: keras.optimizers.Optimizer, shards) -> None:
    """Makes an optimizer clip by norms over workers, each of which has some of the gradients.

    Args:
        optimizer: The optimizer.
        shards: Its `sharded_state.Shards`.
    """

    def by_norm(original, gradients, variables):
        if not any(hasattr(variable, "split") for variable in variables):
            # Each gradient is whole, on its owner or on all workers.
            return original(gradients)
        squares = shards.reduce_scalars(_sum_of_squares, gradients, variables)
        norms, limit = tf.unstack(tf.sqrt(squares)), optimizer.clipnorm
        return [_scale(each, limit, norm) for each, norm in zip(gradients, norms)]

    def by_global_norm(_, gradients, variables):
        squares = shards.reduce_scalars(_sum_of_squares, gradients, variables)
        norm, limit = tf.sqrt(tf.reduce_sum(squares)), optimizer.global_clipnorm
        # `norm - norm` makes the results NaN if the norm is not finite.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [each * tf.cast(scale, each.dtype) for each in gradients]

    keras_compat.clip_by(optimizer, clipnorm=by_norm, global_clipnorm=by_global_norm)


def clip_together(
    optimizer: keras.optimizers.Optimizer, groups: Sequence[Sequence[keras.Variable]]
) -> None:
    """Makes an optimizer clip the variables of a group by the norm of all of them.

    Args:
        optimizer: The optimizer.
        groups: The parts of each variable that is cut.
    """
    group_of = {id(part): number for number, parts in enumerate(groups) for part in parts}

    def by_norm(original, gradients, variables):
        places = [group_of.get(id(variable)) for variable in variables]
        squares = dict.fromkeys(group_of.values(), 0.0)
        for place, gradient in zip(places, gradients):
            if place is not None:
                squares[place] += _sum_of_squares(gradient)
        norms = {place: tf.sqrt(each) for place, each in squares.items()}
        return [
            original([each])[0] if place is None else _scale(each, optimizer.clipnorm, norms[place])
            for place, each in zip(places, gradients)
        ]

    keras_compat.clip_by(optimizer, clipnorm=by_norm)


def _scale(gradient, limit, norm):
    # `tf.cast` of a Python number is exact to float32 only.
    scale = limit / keras.ops.maximum(norm, limit)
    return keras.ops.multiply(gradient, tf.cast(scale, gradient.dtype))


def _sum_of_squares(gradient):
    return keras.ops.sum(keras.ops.square(gradient))
