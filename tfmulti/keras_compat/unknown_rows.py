"""Functions that Keras gives batches of known size, traced for any number of rows."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values as distributed_values


def predict_any_rows(original):
    """Has workers trace what they give batches to for any number of rows, from the first on.

    `tf.function` is traced anew where it meets another number of rows, collectives get their keys
    while they are traced, and a worker whose rows alone have changed has other keys from then on.
    """

    def make_predict_function(self, force=False):
        original(self, force)
        if _has_other_workers(self):
            self.predict_function = _for_any_rows(self.predict_function)

    return make_predict_function


def step_on_any_rows(original):
    """As `predict_any_rows`, for the step that `train_on_batch` and `test_on_batch` call."""

    def autoconvert_optionals(self, step_func):
        return original(self, _for_any_rows(step_func) if _has_other_workers(self) else step_func)

    return autoconvert_optionals


def _has_other_workers(model) -> bool:
    strategy = model.distribute_strategy
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and strategy.num_replicas_in_sync > 1


class _AnyRows:
    """A `tf.function` of one batch that is traced for any number of its rows."""

    def __init__(self, function):
        self._function, self._traced = function, set()
        self.__name__ = getattr(function, "__name__", "function")

    def __call__(self, data):
        if tf.executing_eagerly() and not tf.config.functions_run_eagerly():
            self._trace(data)
        return self._function(data)

    def _trace(self, data):
        """Puts a trace for any rows into the function's cache, where calls find it."""
        specs = tf.nest.map_structure(_without_rows, data, expand_composites=False)
        known = (repr(specs), *(s for s in tf.nest.flatten(specs) if isinstance(s, tf.TypeSpec)))
        if known not in self._traced:
            self._function.get_concrete_function(specs)
            self._traced.add(known)

    def __getattr__(self, name):
        return getattr(self._function, name)


def _for_any_rows(function):
    is_traced = hasattr(function, "get_concrete_function")
    return _AnyRows(function) if is_traced and not isinstance(function, _AnyRows) else function


def _without_rows(value):
    known = isinstance(value, (np.ndarray, tf.Tensor, tf.RaggedTensor, tf.SparseTensor))
    if known or isinstance(value, distributed_values.PerReplica):
        return _relax(tf.type_spec_from_value(value))
    return value


def _relax(spec: tf.TypeSpec) -> tf.TypeSpec:
    if isinstance(spec, distributed_values.PerReplicaSpec):
        return type(spec)(*(_relax(part) for part in spec._component_specs))
    if not getattr(spec, "shape", None):
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype, spec.flat_values_spec
        )
    return type(spec)(shape, spec.dtype)
