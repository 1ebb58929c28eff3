"""Layer calls: their context, what they read, draw and assign, and the parts of a model's graph."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.framework import op_def_registry, ops

from tfmulti.keras_compat import randomness

# Keras's name for it among its global attributes.
_CALL_CONTEXT = "current_call_ctx"
_ASSIGNS = re.compile(r"Assign.*VariableOp|ResourceScatter|ResourceStridedSliceAssign")
_ADVANCES = re.compile(r"Rng(ReadAnd)?Skip")
COMMUNICATION = "tfmulti_communication"
"""The name scope of operations that communicate: the only state that they change is their order."""
_WITHOUT_GRADIENT = (tf.bool, tf.string)
# Attributes of ops that name the functions of branches, loops and calls.
_BODIES = ("then_branch", "else_branch", "branches", "body", "f")


def call_context() -> Callable[[], contextlib.AbstractContextManager]:
    """Records the context of the current layer call, so that the call can run again.

    The context is `training` and other arguments that outer layers hand on, and the dtype to which
    weights are cast. Without it, a second run in a gradient function would have `training=False`
    and float32.

    Returns:
        A function that returns a context manager, which restores the context.
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
    """Whether a layer call only computes shapes, to build the layer or a Functional model."""
    flat = keras.tree.flatten(values)
    return in_symbolic_scope() or any(isinstance(value, keras.KerasTensor) for value in flat)


def values_of(variables) -> list:
    """Reads variables in their own dtypes, even within a call that casts them."""
    with keras_backend.AutocastScope(None):
        return [tf.convert_to_tensor(variable.value) for variable in variables]


def next_op() -> int:
    """Returns a lower bound of the number of the default graph's next operation.

    `Graph.version` does not count the placeholders of captured tensors.
    """
    ops = tf.compat.v1.get_default_graph().get_operations()
    return ops[-1]._id + 1 if ops else 0


def unrepeatable_ops(ops: list[tf.Operation]) -> list[str]:
    """Returns the types of ops whose second run would differ from the first.

    They draw random numbers from TensorFlow's own state or a `tf.random.Generator`, or assign to a
    `tf.Variable`.

    Args:
        ops: The ops in question.
    """
    kinds = {kind for op in ops for kind in _kinds_of(op)}
    return sorted(kind for kind in kinds if is_unrepeatable(kind))


def own_ops(since: int) -> list[tf.Operation]:
    """Returns this replica's new ops of the default graph, without those that communicate.

    Args:
        since: `next_op()` before the ops in question were created.
    """
    # A new op is placed on the device of the replica that is being traced.
    device = tf.identity(0, name="device_of_this_replica").device
    ops = tf.compat.v1.get_default_graph().get_operations()
    # The replicas build one graph in turns; the ops of each are on its own device.
    ops = [op for op in ops if op._id >= since and op.device == device]
    return [op for op in ops if COMMUNICATION not in op.name]


def assigns(kind: str) -> bool:
    """Whether operations of a type assign to a variable."""
    return bool(_ASSIGNS.match(kind))


def advances(kind: str) -> bool:
    """Whether operations of a type advance the state of a `tf.random.Generator`."""
    return bool(_ADVANCES.match(kind))


@contextlib.contextmanager
def noting_read(variables: list[keras.Variable]) -> Iterator[list[keras.Variable]]:
    """Yields a list to which it adds, in the end, what the context and its branches read.

    Args:
        variables: Candidates, of those that TensorFlow takes for trainable.
    """
    read: list[keras.Variable] = []
    with tf.GradientTape() as tape:
        yield read
    local = tf.distribute.get_strategy().experimental_local_results
    handles = {id(copy.handle) for each in tape.watched_variables() for copy in local(each)}
    read += _with_handles(variables, handles)


def variables_assigned(variables: list[keras.Variable], apart=()) -> list[keras.Variable]:
    """Returns the variables that the graph being built assigns; all of them outside of a graph.

    Args:
        variables: Candidates.
        apart: Operations to leave out, as in `operations_within`.
    """
    if tf.executing_eagerly():
        return list(variables)
    made = operations_within(tf.compat.v1.get_default_graph(), apart)
    changed = {id(given_from_outside(op.inputs[0])) for op in made if assigns(op.type)}
    return _with_handles(variables, changed)


def operations_within(graph: tf.Graph, apart=()) -> Iterator[tf.Operation]:
    """Yields the operations of a graph, and of the branches, loops and functions in it.

    Args:
        graph: The graph.
        apart: Operations to leave out: their graph, and `next_op()` before and after they were
            created.
    """
    for op in graph.get_operations():
        if any(graph is own and first <= op._id < end for own, first, end in apart):
            continue
        yield op
        yield from operations_inside(op, apart)


def operations_inside(op: tf.Operation, apart=()) -> Iterator[tf.Operation]:
    """Yields the operations of the branches, the loop or the function that an operation runs."""
    for name in _bodies_of(op):
        # None for a function that was read from a file.
        graph = getattr(op.graph._get_function(name), "graph", None)
        if graph is not None:
            yield from operations_within(graph, apart)


def _with_handles(variables, handles):
    """Returns the variables whose handle, or that of this worker's copy, has one of the ids."""
    strategy = tf.distribute.get_strategy()
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    copies = [strategy.experimental_local_results(value)[0] for value in values]
    return [variable for variable, copy in zip(variables, copies) if id(copy.handle) in handles]


def given_from_outside(tensor) -> tf.Tensor:
    """Follows a tensor that functions and branches have captured to the original tensor."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        outside = {id(inner): outer for outer, inner in getattr(tensor.graph, "captures", ())}
        if id(tensor) not in outside:
            break
        tensor = outside[id(tensor)]
    return tensor


def _kinds_of(op):
    """Yields the types of an operation and of those in its branches, its loop or its function."""
    yield op.type
    names = _bodies_of(op)
    for name in names:
        # The graph also has the inner functions, of which those from a file have no graph.
        for node in op.graph._get_function(name).cached_definition.node_def:
            if COMMUNICATION not in node.name:
                yield node.op
                names += [inner for inner in _bodies_in(node) if inner not in names]


def _bodies_of(op):
    # To make a definition takes long where it contains the values of a constant.
    return _bodies_in(op.node_def) if _attributes_of_bodies(op.type) else []


def _bodies_in(node):
    given = [node.attr[attribute] for attribute in _attributes_of_bodies(node.op)]
    return [body.name for each in given for body in each.list.func or [each.func]]


@functools.cache
def _attributes_of_bodies(kind):
    # To ask every operation for its attributes takes long.
    definition = op_def_registry.get(kind)
    attributes = definition.attr if definition is not None else ()
    found = [each.name for each in attributes if each.type in ("func", "list(func)")]
    return [name for name in _BODIES if name in found]


def is_unrepeatable(kind: str) -> bool:
    """Whether a second run of ops of a type would differ from the first; see `unrepeatable_ops`."""
    definition = op_def_registry.get(kind)
    if definition is None or not definition.is_stateful:
        return False
    return randomness.is_random(kind) or assigns(kind) or advances(kind)


def sources_of(output: tf.Tensor, tensors) -> frozenset[int]:
    """Returns the numbers of the tensors with respect to which a tensor has a gradient.

    It follows the graph without making any gradient, which would take as long as a second trace. A
    branch or a loop counts as if each of its outputs depended on each of its inputs.

    Args:
        output: A tensor of the graph that is traced.
        tensors: Tensors of the same graph.
    """
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    found, seen, waiting = set(), set(), [output]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or tensor.dtype.is_integer or tensor.dtype in _WITHOUT_GRADIENT:
            continue
        seen.add(tensor.name)
        if tensor.name in numbers:
            found.add(numbers[tensor.name])
        elif _has_gradient(tensor.op):
            waiting.extend(tensor.op.inputs)
    return frozenset(found)


def _has_gradient(op):
    try:
        # None for an operation that stops gradients.
        return ops.get_gradient_function(op) is not None
    except LookupError:
        return True


def nodes_of(model: keras.Model) -> list[tuple[list, list]] | None:
    """Returns the layer calls of a Functional or Sequential model, in the order in which they run.

    Returns:
        Each call's input and output tensors (`KerasTensor`); None for any other model.
    """
    nodes = _nodes(model)
    return None if nodes is None else [(node.input_tensors, node.outputs) for node in nodes]


def layers_of_nodes(model: keras.Model) -> list[keras.Operation]:
    """Returns the layers and operations that a model's `nodes_of` call, in the same order.

    A model without `nodes_of` has none.
    """
    return [node.operation for node in _nodes(model) or []]


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
    # A Sequential model holds its calls in a Functional one.
    model = getattr(model, "_functional", None) or model
    if not hasattr(model, "_nodes_by_depth"):
        return None
    # Keras counts depths from the outputs.
    depths = sorted(model._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in model._nodes_by_depth[depth]]
    return [node for node in nodes if not node.is_input]


def part_of_calls(model: keras.Model, first: int, last: int, inputs, outputs) -> keras.Model:
    """Returns a model of some consecutive layer calls of a Functional or Sequential model.

    `keras.Model` fails if a shared layer has computed an input of the part and is called again
    within it. In that case this function repeats all calls with new symbolic inputs.

    Args:
        model: The model.
        first: The position of the first call, in the order of `nodes_of`.
        last: The position after the last call.
        inputs: The symbolic tensors of the model that the part takes.
        outputs: The symbolic tensors that it returns.
    """
    nodes = _nodes(model)[first:last]
    operations = {id(node.operation) for node in nodes}
    histories = [(tensor, tensor._keras_history) for tensor in inputs]
    if not any(id(history.operation) in operations for _, history in histories):
        part = keras.Model(inputs, outputs)
        # Beside other inputs, Keras gives an `Input` of the whole model a new node, with which the
        # whole model could no longer be saved.
        for tensor, history in histories:
            tensor._keras_history = history
        return part
    given = [keras.Input(batch_shape=x.shape, dtype=x.dtype, sparse=x.sparse) for x in inputs]
    made = dict(zip(map(id, inputs), given))
    for node in nodes:
        args, kwargs = node.arguments.fill_in(made)
        results = keras.tree.flatten(node.operation(*args, **kwargs))
        made.update(zip(map(id, node.outputs), results))
    return keras.Model(given, [made[id(tensor)] for tensor in outputs])


def standardized_inputs(model: keras.Model, inputs) -> list:
    """Returns the tensors for the inputs of a Functional or Sequential model, in their order.

    Keras takes those of a dict by the names of the inputs, and fits dtypes and ranks.

    Args:
        model: The model.
        inputs: What its call is given.
    """
    return (getattr(model, "_functional", None) or model)._standardize_inputs(inputs)
