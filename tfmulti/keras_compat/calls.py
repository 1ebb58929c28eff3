"""The context of a layer's call, to run the call once more later."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import op_def_registry

from tfmulti.keras_compat import randomness, replacement

_CALL_CONTEXT = "current_call_ctx"
_ASSIGNS = re.compile(r"Assign.*VariableOp|ResourceScatter|ResourceStridedSliceAssign")
COMMUNICATION = "tfmulti_communication"
"""The name scope of operations that communicate: they change no state but their own order."""
_BODIES = ("then_branch", "else_branch", "body", "f")


class RecordingScope(keras.StatelessScope):
    """Keeps updates of variables back, and remembers of which variables.

    Attributes:
        updated: Variables by identity, in the order of their first updates.
    """

    def __init__(self, state_mapping):
        super().__init__(state_mapping, collect_losses=True)
        self.updated = {}

    def add_update(self, update):
        """Keeps the new value of a variable back."""
        self.updated.setdefault(id(update[0]), update[0])
        super().add_update(update)


def call_context() -> Callable[[], contextlib.AbstractContextManager]:
    """Remembers in what context a layer is being called.

    It is `training` and what else outer layers hand on, and the type that weights are cast to.
    Cures a second run of the call, in a gradient function, with `training=False` and float32.

    Returns:
        A function that makes a context manager, in which the context is as it was.
    """
    calls = global_state.get_global_attribute(_CALL_CONTEXT)
    autocast = keras_backend.get_autocast_scope()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        before = global_state.get_global_attribute(_CALL_CONTEXT)
        global_state.set_global_attribute(_CALL_CONTEXT, calls)
        try:
            with keras_backend.AutocastScope(autocast.dtype if autocast else None):
                yield
        finally:
            global_state.set_global_attribute(_CALL_CONTEXT, before)

    return again


def is_symbolic(values) -> bool:
    """Whether a layer is only asked for its outputs' shapes: it is being built, or in a graph."""
    flat = keras.tree.flatten(values)
    return in_symbolic_scope() or any(isinstance(value, keras.KerasTensor) for value in flat)


def around_remat(original: Callable, recompute: Callable) -> Callable:
    """Makes `keras.remat`, and `RematScope`, compute again from the state before.

    Cures dropout that draws other numbers, and statistics that move twice (0.47 off).

    Args:
        original: Function of a call that returns one that is run again for gradients.
        recompute: The one that takes its place, a function of a layer (or None) and its call.
    """

    @functools.wraps(original)
    def remat(f):
        layer = f if isinstance(f, keras.layers.Layer) else getattr(f, "__self__", None)
        ours = recompute(layer if isinstance(layer, keras.layers.Layer) else None, f)
        stock = original(f)

        def run(*args, **kwargs):
            return (ours if replacement.in_scope() else stock)(*args, **kwargs)

        return run

    return remat


def values_of(variables) -> list:
    """Reads variables, in the types in which they are kept, wherever a call casts them."""
    with keras_backend.AutocastScope(None):
        return [tf.convert_to_tensor(variable.value) for variable in variables]


def next_op() -> int:
    """Returns the number that the next operation of the default graph gets at least.

    `Graph.version` does not count the placeholders of what a graph captures.
    """
    ops = tf.compat.v1.get_default_graph().get_operations()
    return ops[-1]._id + 1 if ops else 0


def unrepeatable_ops(since: int) -> list[str]:
    """Returns kinds of ops that do something else when they are run a second time.

    They draw random numbers from a state of their own, or assign to a variable of TensorFlow's.

    Args:
        since: `next_op()` before the ops in question were created.
    """
    graph = tf.compat.v1.get_default_graph()
    device = tf.identity(0, name="device_of_this_replica").device
    # Replicas take turns while one graph is made; each one's ops are on its own device.
    ops = [op for op in graph.get_operations() if op._id >= since and op.device == device]
    ops = [op for op in ops if COMMUNICATION not in op.name]
    kinds = {op.type for op in ops}
    for op in ops:
        kinds.update(_kinds_within(graph, op))
    return sorted(kind for kind in kinds if _is_unrepeatable(kind))


def variables_read(since: int, variables: list[keras.Variable]) -> list[keras.Variable]:
    """Returns those of some variables that the graph being made reads; none outside of a graph.

    Args:
        since: `next_op()` before the ops in question were created.
        variables: The variables.
    """
    if tf.executing_eagerly():
        return []
    graph, strategy = tf.compat.v1.get_default_graph(), tf.distribute.get_strategy()
    new = itertools.takewhile(lambda op: op._id >= since, reversed(graph.get_operations()))
    read = {id(_given_from_outside(op.inputs[0])) for op in new if op.type == "ReadVariableOp"}
    copies = [strategy.experimental_local_results(variable.value)[0] for variable in variables]
    return [variable for variable, copy in zip(variables, copies) if id(copy.handle) in read]


def _given_from_outside(tensor):
    """Returns what a tensor stands for that functions and branches were given."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        outside = {id(inner): outer for outer, inner in getattr(tensor.graph, "captures", ())}
        if id(tensor) not in outside:
            break
        tensor = outside[id(tensor)]
    return tensor


def _kinds_within(graph, op):
    """Yields the kinds of ops in the bodies of a branch, a loop or a function."""
    for name in _BODIES:
        if name in op.node_def.attr:
            function = graph._get_function(op.node_def.attr[name].func.name)
            nodes = function.cached_definition.node_def
            yield from (node.op for node in nodes if COMMUNICATION not in node.name)


def _is_unrepeatable(kind):
    definition = op_def_registry.get(kind)
    if definition is None or not definition.is_stateful:
        return False
    return randomness.is_random(kind) or bool(_ASSIGNS.match(kind))


def nodes_of(model: keras.Model) -> list[tuple[list, list]] | None:
    """Returns the calls of a Functional or Sequential model, in the order in which they run.

    Returns:
        Each call's input and output tensors (`KerasTensor`); None for any other model.
    """
    nodes = _nodes(model)
    return None if nodes is None else [(node.input_tensors, node.outputs) for node in nodes]


def layers_of_nodes(model: keras.Model) -> list[keras.Operation]:
    """Returns what is called in a Functional or Sequential model, in the order of `nodes_of`."""
    return [node.operation for node in _nodes(model)]


def arguments_of_nodes(model: keras.Model) -> list[tuple[keras.Operation, list]] | None:
    """Returns what is called in a Functional or Sequential model, with the arguments of each call.

    Returns:
        Operations and their arguments, as `nodes_of`; None for any other model.
    """
    nodes = _nodes(model)
    if nodes is None:
        return None
    calls = [(node.operation, node.arguments) for node in nodes]
    return [(each, [*given.args, *given.kwargs.values()]) for each, given in calls]


def _nodes(model):
    model = getattr(model, "_functional", None) or model
    if not hasattr(model, "_nodes_by_depth"):
        return None
    depths = sorted(model._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in model._nodes_by_depth[depth]]
    return [node for node in nodes if not node.is_input]


def part_of_calls(model: keras.Model, first: int, last: int, inputs, outputs) -> keras.Model:
    """Returns a model of some calls of a Functional or Sequential model.

    `keras.Model` fails where a layer that has made an input is called again within the part, as
    a shared layer is; its calls are then made anew.

    Args:
        model: The model.
        first: The position of the first call, in the order of `nodes_of`.
        last: The position after the last one.
        inputs: The tensors of the model that the part takes.
        outputs: Those that it returns.
    """
    nodes = _nodes(model)[first:last]
    operations = {id(node.operation) for node in nodes}
    if not any(id(tensor._keras_history.operation) in operations for tensor in inputs):
        return keras.Model(inputs, outputs)
    given = [keras.Input(batch_shape=x.shape, dtype=x.dtype, sparse=x.sparse) for x in inputs]
    made = dict(zip(map(id, inputs), given))
    for node in nodes:
        args, kwargs = node.arguments.fill_in(made)
        results = keras.tree.flatten(node.operation(*args, **kwargs))
        made.update(zip(map(id, node.outputs), results))
    return keras.Model(given, [made[id(tensor)] for tensor in outputs])


def is_recorded(tensors: list[tf.Tensor]) -> bool:
    """Whether a tape watches one of some tensors, so that a gradient of it may be asked for."""
    return bool(tensors) and pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop(tensors)
