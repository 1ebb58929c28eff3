"""Builds models whose variables are on parameter servers, before their steps are traced."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel import partitioned
from tfmulti.runtime.scoped import with_attributes
from tfmulti.step import model_contents
from tfmulti.verification import runs


def build(
    model: keras.Model, spec, peek: Callable, *, num_rows: int | None = None, test_spec=None
) -> None:
    """Creates all variables of a compiled model on the servers, as `fit` does.

    Args:
        model: A compiled model.
        spec: The spec of a batch.
        peek: Function that returns a batch of training, called where the spec does not tell enough.
        num_rows: The number of rows of a batch, if it is known without drawing one.
        test_spec: The spec of a batch for evaluation, or None.

    Raises:
        ValueError: If the model is not compiled with an optimizer, or with one that cannot update
            a table in parts.
    """
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "A model must be compiled with an optimizer before it is trained. "
            f"Received: {model.name!r}, which is not. Call model.compile(optimizer, loss) in the "
            "strategy's scope."
        )
    if keras_compat.lacks_call(model):
        # Nothing else marks it as built.
        model.built = True
    with model.distribute_strategy.scope():
        _build_for_training(model, functools.partial(_sizes, spec, num_rows, peek))
        own = keras_compat.has_custom_step(model, "test")
        if test_spec is not None and (own or not keras_compat.is_built(model)):
            # What fails is told when the step is checked, with the argument that gave the data.
            _first_error(functools.partial(_build_by_step, model, model.test_step), [test_spec])
        partitioned.prepare_optimizer(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)


def _build_for_training(model, sizes: Callable[[], Iterator]):
    """Builds what a training step uses: by Keras's call of the model, or by tracing an own step.

    An own step may use the batch in any way, and layers of which the model's `call` knows nothing.
    """
    build_by_call = functools.partial(keras_compat.build_model, model)
    if not keras_compat.has_custom_step(model, "train"):
        error = _first_error(build_by_call, sizes())
    else:
        by_step = functools.partial(_build_by_step, model, model.train_step)
        any_rows = functools.partial(tf.nest.map_structure, keras_compat.without_rows)
        pairs = ((any_rows(each), each) for each in sizes())
        error = _first_error(by_step, itertools.chain.from_iterable(pairs))
        layers = keras_compat.all_layers(model)
        if not keras_compat.lacks_call(model) and (error or all(each.built for each in layers)):
            # For the metrics of `compile`, which the step need not use. A model that can be called
            # is built; its step is traced again, and may fail then.
            error = _first_error(build_by_call, sizes()) and error
    if error is not None:
        raise error


def _build_by_step(model, step, spec):
    def run(batch):
        with contextlib.ExitStack() as stack:
            # They are built for all weights, and update nothing in workers' steps either.
            for optimizer in model_contents.optimizers_of(model):
                stack.enter_context(with_attributes(optimizer, apply=lambda *_, **__: None))
            step(batch)

    is_built = functools.partial(keras_compat.is_built, model)
    runs.trace_built(model, run, [spec], keras_compat.same_eager_numbers, is_built)


def _sizes(spec, num_rows, peek) -> Iterator:
    """Yields specs with the size of every axis: by the data's, and by a batch if that fails.

    A model may take one size only, which data whose size is unknown have in every batch.
    """
    leaves = tf.nest.flatten(spec)
    if num_rows is not None and all(leaf.shape[1:].is_fully_defined() for leaf in leaves):
        yield tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([num_rows, *leaf.shape[1:]], leaf.dtype), spec
        )
    yield tf.nest.map_structure(tf.type_spec_from_value, peek())


def _first_error(build: Callable, candidates: Iterable) -> Exception | None:
    """Calls a function with one candidate after the other until there is no error.

    Returns:
        None, or the error with the first candidate if all fail.
    """
    first = None
    for candidate in candidates:
        try:
            build(candidate)
            return None
        except Exception as error:
            first = first or error
    return first
