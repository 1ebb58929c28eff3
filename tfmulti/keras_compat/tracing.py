"""Tracing: builds variables before a step is traced, and traces for any number of rows."""

from __future__ import annotations

import collections
import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.ops import control_flow_v2_func_graphs

from tfmulti import marks
from tfmulti.keras_compat.held import num_moves

# More layers of a class than this that the model does not hold are made by the step, at each trace.
_MOST_OF_A_CLASS = 30


class NotBuilt(Exception):
    """A trace has reached a layer, an optimizer or a metric that has no variables yet."""


@contextlib.contextmanager
def noting_unbuilt(optimizers, model=None, noted=None):
    """Ends a trace with `NotBuilt` at the first object that it would build.

    Layers, optimizers, losses and metrics create their variables in their first call. Creating
    variables of several replicas in a trace fails with "Unable to lift tensor".

    Args:
        optimizers: The optimizers that the step can use.
        model: The model whose losses and metrics the step can use, or None.
        noted: How many layers of each class earlier traces have ended at; a `Counter` to keep
            between the traces of a step. One that makes layers in its `call`, as
            `keras.layers.concatenate` does, would never end otherwise: each trace has new ones.

    Yields:
        A list to which a function is added that builds the object; call it in the strategy's scope,
        outside of the trace.
    """
    builders: list = []
    noted = collections.Counter() if noted is None else noted
    original = keras.layers.Layer._maybe_build
    unbuilt = [
        *(
            (optimizer, "build", _build_optimizer)
            for optimizer in optimizers
            if not optimizer.built
        ),
        *((each, name, _build_part) for each, name in _unbuilt_parts(model)),
    ]

    @functools.wraps(original)
    def maybe_build(layer, call_spec):
        is_ready = layer.built or noted[type(layer)] >= _MOST_OF_A_CLASS
        if is_ready or not tf.inside_function() or _is_symbolic(call_spec):
            return original(layer, call_spec)
        build = _call_symbolically(layer, **call_spec.user_arguments_dict)
        builders.append(functools.partial(_build_and_note, layer, build, model, noted))
        raise NotBuilt(layer.name)

    def restore(owner, name):
        owner.__dict__.pop(name, None)
        if (id(owner), name) in present:
            object.__setattr__(owner, name, present[id(owner), name])

    def note(owner, name, build, *args, **kwargs):
        restore(owner, name)
        builders.append(build(owner, getattr(owner, name), *args, **kwargs))
        raise NotBuilt(owner.name)

    # On the class, because a trace may reach layers that no attribute of the model holds.
    keras.layers.Layer._maybe_build = maybe_build
    # An optimizer with sharded state has a `build` of its own.
    present = {
        (id(owner), name): vars(owner)[name] for owner, name, _ in unbuilt if name in vars(owner)
    }
    for owner, name, build in unbuilt:
        object.__setattr__(owner, name, functools.partial(note, owner, name, build))
    try:
        yield builders
    finally:
        keras.layers.Layer._maybe_build = original
        for owner, name, _ in unbuilt:
            restore(owner, name)


def _build_and_note(layer, build, model, noted):
    build()
    if not layer.variables:
        # The next one of its class can be built in the trace.
        noted[type(layer)] = _MOST_OF_A_CLASS
    elif model is None or not any(layer is each for each in model._flatten_layers()):
        noted[type(layer)] += 1


def is_built(model: keras.Model) -> bool:
    """Whether the layers of a model, and its losses and metrics, have all their variables."""
    return has_built_layers(model) and not _unbuilt_parts(model)


def has_built_layers(layer: keras.layers.Layer) -> bool:
    """Whether a layer and those within it have all their variables, whatever `compile` adds."""
    return all(each.built for each in layer._flatten_layers())


def unbuilt_layers(model: keras.Model) -> frozenset[int]:
    """Returns the ids of the layers, and of the model itself, that are not marked as built."""
    return frozenset(id(each) for each in model._flatten_layers() if not each.built)


def unbuilt_metrics(model: keras.Model) -> list:
    """Returns the metrics that have no variables, and therefore no result, yet."""
    return [each for each, name in _unbuilt_parts(model) if name == "update_state"]


def _unbuilt_parts(model) -> list[tuple]:
    """Returns losses and metrics without variables, each with the name of what creates them."""
    if model is None:
        return []
    compiled = (getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None))
    parts = [(each, name) for each, name in zip(compiled, ("call", "update_state")) if each]
    parts = [(each, name) for each, name in parts if not each.built]
    # Some metrics, such as `FBetaScore`, create variables in their first update.
    lazy = [metric for metric in model.metrics if not getattr(metric, "_built", True)]
    return parts + [(each, "update_state") for each in lazy]


def _build_optimizer(optimizer, build, variables):
    variables = list(variables)

    def build_now():
        # As in `Optimizer.apply`, so that slots have the same paths.
        with keras.name_scope(optimizer.name):
            build(variables)

    return build_now


def _build_part(_, method, *args, **kwargs):
    return _call_symbolically(method, *args, **kwargs)


def _call_symbolically(function, *args, **kwargs):
    """Returns a function that traces a call without running it, as Keras does to build a model.

    It uses TensorFlow's placeholders, because Keras's symbolic tensors cannot be ragged.
    """
    specs = tf.nest.map_structure(without_rows, (args, kwargs))

    def call():
        parts = tf.nest.map_structure(_placeholder, specs, expand_composites=True)
        function(*parts[0], **parts[1])

    return lambda: keras_backend.compute_output_spec(call)


def _placeholder(part):
    if isinstance(part, tf.TensorSpec):
        return tf.compat.v1.placeholder(part.dtype, part.shape)
    return part


def _is_symbolic(call_spec) -> bool:
    leaves = keras.tree.flatten(call_spec.user_arguments_dict)
    return any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)


def anew_after_moves(kind: str):
    """Returns a `make` that has Keras make the function of a step again once weights have moved.

    A trace reads what they were before they went to another worker or device, and no call by which
    they move knows all models that have them.

    Args:
        kind: `"train"` or `"test"`.
    """

    def make(original):
        return lambda self, force=False: _make_anew(original, self, kind, force)

    return make


def _make_anew(original, model, kind, force):
    """Calls Keras's `make_..._function`, with `force` if weights have moved since the last call."""
    known = marks.MOVES.get(model)
    result = original(model, force or known.get(kind, 0) != num_moves())
    # Moves while it was made, as a step is verified then, came before its trace.
    if known.get(kind, 0) != num_moves():
        marks.MOVES.set(model, {**known, kind: num_moves()})
    return result


def predict_any_rows(original):
    """Makes several workers trace the function of `predict` for any number of rows at once.

    `tf.function` traces again for another number of rows, and collectives get their keys when they
    are traced. If only one worker's number of rows changed, its keys would differ from then on.
    The function is also made again once weights have moved; see `anew_after_moves`.
    """

    def make_predict_function(self, force=False):
        _make_anew(original, self, "predict", force)
        if _has_other_workers(self):
            self.predict_function = _for_any_rows(self.predict_function)
        return self.predict_function

    return make_predict_function


def step_on_any_rows(original):
    """Does as `predict_any_rows` for a step that is called with a batch, as by `train_on_batch`.

    Replicas of one process can have batches of different sizes too. A trace for these sizes would
    not add gradients of tables whose rows are read by constant indices.
    """

    def autoconvert_optionals(self, step_func):
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return original(self, step_func)
        return original(self, _for_any_rows(step_func, may_fail=not _has_other_workers(self)))

    return autoconvert_optionals


def _has_other_workers(model) -> bool:
    strategy = model.distribute_strategy
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and strategy.num_replicas_in_sync > 1


class _AnyRows:
    """A `tf.function` of one batch that is traced for any number of its rows.

    Args:
        function: The function.
        may_fail: Whether it is traced for the rows of the batch if it takes no other number.
    """

    def __init__(self, function, may_fail: bool):
        self._function, self._traced, self._may_fail = function, set(), may_fail
        self.__name__ = getattr(function, "__name__", "function")

    def __call__(self, data):
        if tf.executing_eagerly() and not tf.config.functions_run_eagerly():
            self._trace(data)
        return self._function(data)

    def _trace(self, data):
        """Adds a trace for any number of rows to the function's cache, where calls find it."""
        specs = tf.nest.map_structure(without_rows, data, expand_composites=False)
        known = (repr(specs), *(s for s in tf.nest.flatten(specs) if isinstance(s, tf.TypeSpec)))
        if known not in self._traced:
            try:
                self._function.get_concrete_function(specs)
            except Exception:
                if not self._may_fail:
                    raise
            # A failed trace is noted too: it would fail again at each batch.
            self._traced.add(known)

    def __getattr__(self, name):
        return getattr(self._function, name)


def _for_any_rows(function, may_fail=False):
    if not hasattr(function, "get_concrete_function") or isinstance(function, _AnyRows):
        return function
    return _AnyRows(function, may_fail)


def without_rows(value):
    """Returns the spec of a tensor, or of its spec, with any number of rows; others unchanged.

    Example:
    >>> without_rows(tf.ones((4, 2))).shape, without_rows(tf.constant(2.0)).shape
    (TensorShape([None, 2]), TensorShape([]))
    """
    if isinstance(value, tf.TypeSpec):
        return _relax(value)
    known = isinstance(value, (np.ndarray, tf.Tensor, tf.RaggedTensor, tf.SparseTensor))
    if known or isinstance(value, distributed_values.PerReplica):
        return _relax(tf.type_spec_from_value(value))
    return value


def _relax(spec: tf.TypeSpec) -> tf.TypeSpec:
    if isinstance(spec, distributed_values.PerReplicaSpec):
        return type(spec)(*(_relax(part) for part in spec._component_specs))
    # A scalar has no rows; of an unknown rank nothing is known.
    if not getattr(getattr(spec, "shape", None), "rank", None):
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype, spec.flat_values_spec
        )
    return type(spec)(shape, spec.dtype)


def without_search_in_functions(original):
    """Skips TensorFlow's search for the variables of a custom gradient in a `tf.function`.

    The search finds operations that create variables, which no `tf.function` contains: it receives
    its variables as inputs, and the gradient tape notes which ones a custom gradient reads. The sum
    of an all-reduce depends on the inputs of all replicas, and the search stops at those of one: it
    walks back through the whole graph of the others, for each all-reduce.

    Args:
        original: TensorFlow's own function.
    """

    def get_dependent_variables(input_ops, output_ops):
        if tf.compat.v1.get_default_graph().building_function:
            return []
        return original(input_ops, output_ops)

    return get_dependent_variables


def tensors_read_from_before(ops: list[tf.Operation], since: int) -> list[tf.Tensor]:
    """Returns floating-point tensors that some ops read, older than these, and on a tape.

    Args:
        ops: The ops.
        since: `next_op()` before they were created.
    """
    read = {id(x): x for op in ops for x in op.inputs if x.dtype.is_floating}
    # A tensor of an outer graph, or an eager one, is captured when it is first read.
    old = [x for x in read.values() if x.op._id < since or x.op.type == "Placeholder"]
    return [x for x in old if is_recorded([x])]


def tensors_read_after(ops: list[tf.Operation], end: int) -> list[tf.Tensor]:
    """Returns floating-point tensors made by some ops that later ones read, and differentiate.

    Args:
        ops: The ops.
        end: `next_op()` after they were created.
    """
    # A tensor from outside, such as a constant, is there twice where it is read first.
    ops = [op for op in ops if op.type not in ("Const", "Placeholder", "StopGradient")]
    made = [tensor for op in ops for tensor in op.outputs if tensor.dtype.is_floating]
    # Other replicas, on their devices, read what crosses replicas, as in batch normalization.
    return [x for x in made if any(y._id >= end and y.device == x.op.device for y in x.consumers())]


def is_recorded(tensors: list[tf.Tensor]) -> bool:
    """Whether a tape records one of the tensors, so that its gradient may be requested."""
    return bool(tensors) and pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop(tensors)


def is_differentiating_forward() -> bool:
    """Whether this thread is in a `tf.autodiff.ForwardAccumulator`."""
    return bool(forwardprop_util.pack_tangents([]).indices)


def is_loop(graph: tf.Graph) -> bool:
    """Whether a graph is the condition or the body of a loop."""
    kinds = control_flow_v2_func_graphs
    return isinstance(graph, (kinds.WhileBodyFuncGraph, kinds.WhileCondFuncGraph))


def is_taping() -> bool:
    """Whether a tape records what this thread computes."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
