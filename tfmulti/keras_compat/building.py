"""Finds what a step would build while it is traced, so that it can be built before."""

from __future__ import annotations

import contextlib
import functools

import keras
import tensorflow as tf


class NotBuilt(Exception):
    """A step has come to a layer or an optimizer that has no variables yet."""


@contextlib.contextmanager
def noting_unbuilt(optimizers):
    """Ends a trace at the first layer or optimizer that it would build, with `NotBuilt`.

    Cures "Unable to lift tensor" where variables of several replicas are made within a trace
    that nobody has run yet.

    Args:
        optimizers: The optimizers that the step can use.

    Yields:
        A list that will hold a function that builds what was come to; to be called in the
        strategy's scope, outside of the trace.
    """
    found: list = []
    original = keras.layers.Layer._maybe_build
    unbuilt = [optimizer for optimizer in optimizers if not optimizer.built]

    @functools.wraps(original)
    def maybe_build(layer, call_spec):
        if layer.built or not tf.inside_function() or _is_symbolic(call_spec):
            return original(layer, call_spec)
        arguments = keras.tree.map_structure(_to_symbolic, call_spec.user_arguments_dict)
        found.append(lambda: layer(**arguments))
        raise NotBuilt(layer.name)

    def build(optimizer, variables):
        variables = list(variables)
        del optimizer.__dict__["build"]

        def build_now():
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)

        found.append(build_now)
        raise NotBuilt(optimizer.name)

    keras.layers.Layer._maybe_build = maybe_build
    for optimizer in unbuilt:
        object.__setattr__(optimizer, "build", functools.partial(build, optimizer))
    try:
        yield found
    finally:
        keras.layers.Layer._maybe_build = original
        for optimizer in unbuilt:
            optimizer.__dict__.pop("build", None)


def _is_symbolic(call_spec) -> bool:
    leaves = keras.tree.flatten(call_spec.user_arguments_dict)
    return any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)


def _to_symbolic(leaf):
    if isinstance(leaf, tf.Tensor):
        return keras.KerasTensor(
            [None, *leaf.shape[1:]] if leaf.shape.rank else (), leaf.dtype.name
        )
    return leaf
