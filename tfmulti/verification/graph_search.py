"""Finds in the graph of a step what a comparison of results need not show.

- Decisions: a step may skip an update where its loss is large, or train a discriminator only while
  its accuracy is low. One device decides by the mean of the batch, and each replica by the mean of
  its own rows. They decide alike for most rows.
- Ratios: a mean of the rows that have a property is a sum divided by their number. The mean of
  the replicas' ratios is not the ratio of the batch, but no difference shows while no row has it.
- A replica's own random numbers, multiplied by what all replicas' numbers made. Hutchinson's
  estimate of the diagonal of the Hessian draws random signs z of a weight's shape, and multiplies
  them by the gradient of sum(gradient * z). Each replica draws its own z, and the gradient is
  reduced over the replicas: a replica's z is in a fraction of it alone, and the estimate is that
  fraction of one device's. Replicas still agree, and one device's draws are none of theirs.
- Random numbers for rows, from a seed that is the same on each replica.
- Tables, queues and iterators that a step changes, and that all replicas would change.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step.row_axis import OF_SHAPES, inputs_of
from tfmulti.verification.dependencies import (
    calls_python,
    dependencies,
    is_reduction,
    place_of,
    source,
)
from tfmulti.verification.selected_rows import means_of_selected

# Operations with a kink or a jump.
_DECIDING = {
    *("Abs", "Greater", "GreaterEqual", "IsFinite", "IsInf", "IsNan", "Less", "LessEqual"),
    *("Equal", "NotEqual"),
    *("Maximum", "Minimum", "Relu", "Relu6", "Sign", "Ceil", "ClipByValue", "Elu", "Floor"),
    *("FloorDiv", "FloorMod", "LeakyRelu", "Rint", "Round", "Selu"),
}
# Those that choose or order the numbers of a vector, and the number of the input.
_CHOOSING_OF = {"ArgMax": 0, "ArgMin": 0, "TopKV2": 0, "Max": 0, "Min": 0}
_CHOOSING_OF |= {"LowerBound": 1, "UpperBound": 1}
# Those that compare a number of the batch with every row.
_COMPARING = {"Greater", "GreaterEqual", "Less", "LessEqual", "Maximum", "Minimum"}
# Those that are not linear in an input, and the number of the input.
_NOT_LINEAR = {"Div": 1, "DivNoNan": 1, "RealDiv": 1, "Xdivy": 1, "Reciprocal": 0}
_NOT_LINEAR |= {"Log": 0, "Log1p": 0, "Pow": 0, "Rsqrt": 0, "Sqrt": 0}
# In gradients of the others, with the same inputs.
_DECIDING_GRADIENT = {"Greater", "GreaterEqual", "LeakyReluGrad", "Less", "LessEqual", "Sign"}
# They add what they read, or put it side by side: an expectation of a sum is that of its terms.
_ADDING = {
    *("Add", "AddN", "AddV2", "BiasAdd", "Sub"),
    *("Concat", "ConcatV2", "IdentityN", "Pack"),
}
_CHOOSING = ("Select", "SelectV2")
_UPDATING = ("Assign", "Resource")
_DRAWING_ALIKE = ("StatelessRandom", "StatelessTruncatedNormal", "StatelessParameterizedTruncated")
# In the names of operations that a tape has made.
_GRADIENT = "gradient_tape/"
_NOTHING: frozenset = frozenset()
# What these change is no variable: no replica has one of its own, and nothing restores it.
_CHANGING = ("LookupTableInsert", "LookupTableRemove", "LookupTableImport", "Barrier")
_CHANGING += ("QueueEnqueue", "QueueDequeue", "StackPush", "StackPop", "Stage", "Unstage")
_DRAWING = ("IteratorGetNext",)


def find_decisions(
    graph, rows_of_replicas: list[list[tf.Tensor]], *, of_any_size: bool
) -> list[str]:
    """Returns where a step decides by one replica's own rows: the operation, file and line.

    A decision is taken by a number of the batch, such as its mean loss: alone, among a few others
    (one for each class), or for each row that is compared with it; by whether any row of the batch
    has a property; by the place of a row among the others; or by a Python function that is given
    such a number. Only what reaches an update of a variable counts. What Keras and tfmulti decide
    themselves is left out.

    Args:
        graph: The graph of the step on the local replicas.
        rows_of_replicas: For each local replica, the tensors of its rows.
        of_any_size: Whether the graph was traced for any number of rows; else it does not tell
            vectors of the batch from rows.
    """
    operations = graph.get_operations()
    depends = dependencies(graph, rows_of_replicas)
    updating = reaching_updates(operations)
    found = {}
    for each in operations:
        if len(depends[each]) != 1 or not _decides(each, depends, of_any_size):
            continue
        readers = {reader for tensor in each.inputs for reader in tensor.consumers()}
        gradients = {reader for reader in readers if reader.type in _DECIDING_GRADIENT}
        if not updating.isdisjoint({each, *gradients}) and (place := place_of(each)):
            found[f"{each.type} at {place}"] = None
    return list(found)


def find_ratios(graph, rows_of_replicas: list[list[tf.Tensor]]) -> list[str]:
    """Returns where a step divides by a number of one replica's own rows, or the like.

    Such numbers have no axis of rows, as a count of some rows or a mean loss, and are no numbers of
    the batch. A mean over selected rows divides by their number. Only what reaches an update or an
    output counts; gradients are left out, and what Keras and tfmulti do themselves.

    Args:
        graph: The graph of the step on the local replicas, traced for any number of rows.
        rows_of_replicas: For each local replica, the tensors of its rows.
    """
    operations = graph.get_operations()
    depends = dependencies(graph, rows_of_replicas)
    reaching = reaching_updates(operations, graph.outputs)
    rows = [tensor for tensors in rows_of_replicas for tensor in tensors]
    means = [x for x in means_of_selected(operations, rows) if len(depends[x]) == 1]
    ratios = [
        each
        for each in operations
        if each.type in _NOT_LINEAR
        and each in reaching
        and _GRADIENT not in each.name
        and _is_of_own_rows(each.inputs[_NOT_LINEAR[each.type]], depends)
    ]
    return _named(ratios + [each for each in means if reaching & {each, *_gradients_of(each)}])


def _gradients_of(mean) -> list[tf.Operation]:
    """Returns operations of a mean's gradient, which needs the shape of what it is the mean of."""
    readers = mean.inputs[0].consumers()
    return [x for x in readers if x.type == "Shape" and _GRADIENT in x.name]


def _is_of_own_rows(tensor, depends) -> bool:
    """Whether a value was made from one replica's rows, and has no axis of rows."""
    return tensor.shape.is_fully_defined() and len(depends[source(tensor)]) == 1


def _decides(operation, depends, of_any_size) -> bool:
    """Whether an operation is a decision, if it depends on the rows of one replica alone."""
    inputs, kind = list(operation.inputs), operation.type
    if kind in ("Any", "All"):
        return operation.outputs[0].shape.rank == 0
    if kind == "TopKV2" and inputs[0].shape.rank == 1 and inputs[0].shape[0] is None:
        return True
    if calls_python(operation):
        own = [each for each in inputs if _is_of_own_rows(each, depends)]
        return any(_is_of_batch(each.shape, of_any_size) for each in own)
    if kind in _CHOOSING_OF:
        return _is_of_own_rows(inputs[_CHOOSING_OF[kind]], depends)
    if kind == "Cast":
        one = inputs[0]
        return (
            one.shape.rank == 0 and one.dtype.is_floating > operation.outputs[0].dtype.is_floating
        )
    if kind == "Cumsum":
        axis = tf.get_static_value(inputs[1])
        return axis == 0 and bool(inputs[0].shape.rank) and inputs[0].shape[0] is None
    if kind not in _DECIDING or not all(each.dtype.is_floating for each in inputs):
        return False
    if all(_is_of_batch(each.shape, of_any_size) for each in inputs):
        return True
    if kind not in _COMPARING:
        return False
    one, other = inputs
    return any(
        len(depends[source(a)]) == len(depends[source(b)]) == 1
        and _has_no_rows_of(a.shape, b.shape)
        for a, b in ((one, other), (other, one))
    )


def _is_of_batch(shape, of_any_size) -> bool:
    """Whether a tensor that depends on rows has no axis of rows: one for each class, or alone."""
    return shape.is_fully_defined() if of_any_size else shape.rank == 0


def _has_no_rows_of(shape, others) -> bool:
    """Whether a tensor has no axis for the rows that another one has, which it is compared with."""
    if shape.rank is None or not others.rank or others[0] == 1:
        return False
    return shape.rank < others.rank or (shape.rank == others.rank and shape[0] == 1)


def reaching_updates(operations, outputs=()) -> set:
    """Returns the operations whose outputs reach an update of a variable.

    Args:
        operations: The operations of a graph.
        outputs: Tensors to reach that count like updates.
    """
    reaching = {tensor.op for tensor in outputs}
    for each in reversed(operations):
        if each in reaching or _updates(each):
            reaching.add(each)
            reaching.update(tensor.op for tensor in each.inputs)
    return reaching


def _updates(operation) -> bool:
    has_variable = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    is_branch = operation.type in ("If", "Case", "While", "StatefulPartitionedCall")
    return has_variable and (is_branch or operation.type.startswith(("Assign", "Resource")))


def find_own_noise(graph, rows_of_replicas, noise_of_replicas) -> list[str]:
    """Returns where one replica's random numbers meet reduced ones: the operation, file and line.

    One of the two values was made from numbers that one replica drew, and from no rows; the other
    one from the numbers that several replicas drew there. Their product must reach an update of a
    variable or an output. Random numbers of rows are left out, and those that enter a loss
    alone: they meet nothing that was reduced. So is what Keras and tfmulti do themselves.

    Args:
        graph: The graph of the step on the local replicas.
        rows_of_replicas: For each local replica, the tensors of its rows.
        noise_of_replicas: For each local replica, numbers and tensors of its draws without rows.
    """
    operations = graph.get_operations()
    noise = {
        tensor.op: frozenset([(number, replica)])
        for replica, draws in enumerate(noise_of_replicas)
        for number, tensor in draws
        if tensor.graph is graph
    }
    if not noise:
        return []
    everyone = range(max(len(rows_of_replicas), 2))
    draws = _follow(operations, noise, everyone)
    rows = {tensor.op: frozenset([0]) for tensors in rows_of_replicas for tensor in tensors}
    of_rows = _follow(operations, {**rows, **dict.fromkeys(noise, _NOTHING)})
    reaching = reaching_updates(operations, graph.outputs)
    return _named(x for x in operations if x in reaching and _meets(x, draws, of_rows))


def _follow(operations, sources: dict, everyone=()) -> dict:
    """Returns what of the sources each operation depends on; a reduction spreads it."""
    depends: dict = {}
    # Operations come after those that they read.
    for each in operations:
        if each in sources:
            depends[each] = sources[each]
            continue
        known = {depends.get(tensor.op, _NOTHING) for tensor in inputs_of(each)}
        known = _NOTHING.union(*known) if each.type not in OF_SHAPES else _NOTHING
        if known and everyone and is_reduction(each):
            known = frozenset(itertools.product({number for number, _ in known}, everyone))
        depends[each] = known
    return depends


def _meets(operation, draws, of_rows) -> bool:
    if operation.type in _ADDING or operation.type.startswith(_UPDATING) or is_reduction(operation):
        return False
    inputs = [tensor.op for tensor in operation.inputs if tensor.dtype != tf.resource]
    own = [_own(draws.get(each), of_rows.get(each)) for each in inputs]
    shared = [_shared(draws.get(each)) for each in inputs]
    pairs = itertools.permutations(range(len(inputs)), 2)
    if operation.type in _CHOOSING:
        # What is chosen by is the first input; of the others, each is there or not.
        pairs = ((a, b) for a, b in pairs if 0 in (a, b))
    return any(own[a] & shared[b] for a, b in pairs)


def _own(draws, rows) -> set:
    """Returns the numbers of the draws that a value has from one replica, if it has no rows."""
    if not draws or rows:
        return set()
    return {number for number, _ in draws} - _shared(draws)


def _shared(draws) -> set:
    """Returns the numbers of the draws that a value has from several replicas."""
    numbers = [number for number, _ in draws or ()]
    return {number for number in numbers if numbers.count(number) > 1}


def find_shared_objects(graph, num_local_replicas: int) -> list[str]:
    """Returns where a step changes such an object: the operation, file and line.

    It can be changed in a branch, a loop or a function, too. Each of several workers has its own
    iterator, so that they all draw the same.

    Args:
        graph: The graph of the step on the local replicas.
        num_local_replicas: How many replicas this worker has.
    """
    kinds = _CHANGING + (_DRAWING if num_local_replicas > 1 else ())
    operations = keras_compat.operations_within(graph)
    return _named(x for x in operations if x.type.startswith(kinds))


def find_writes(function) -> list[str]:
    """Returns where a step changes variables, tables or queues, by operations in its graph.

    Args:
        function: The traced step.

    Returns:
        The operations with file and line; in functions that the step calls, without these.
    """
    kinds = keras_compat.operations_of(function)
    kinds = {x for x in kinds if keras_compat.assigns(x) or x.startswith(_CHANGING)}
    return _named(x for x in function.graph.get_operations() if x.type in kinds) or sorted(kinds)


def find_repeated_noise(graph) -> list[str]:
    """Returns where a step draws numbers for rows from a seed: the operation, file and line.

    Such numbers begin anew on each replica: its first row gets those of the batch's first row.

    Args:
        graph: The graph of the step, traced for any number of rows.
    """
    draws = [x for x in graph.get_operations() if x.type.startswith(_DRAWING_ALIKE)]
    shapes = [draw.outputs[0].shape for draw in draws]
    return _named(
        draw
        for draw, shape in zip(draws, shapes)
        if shape.rank is None or (shape.rank and shape[0] is None)
    )


def _named(operations) -> list[str]:
    """Returns operations of the user's code, each with file and line, once."""
    placed = ((each, place_of(each)) for each in operations)
    return list(dict.fromkeys(f"{each.type} at {place}" for each, place in placed if place))
