"""Finds steps that multiply a replica's own random numbers by what all replicas' numbers made.

Hutchinson's estimate of the diagonal of the Hessian draws random signs z of a weight's shape, and
multiplies them by the gradient of sum(gradient * z). Each replica draws its own z, and the
gradient is reduced over the replicas: a replica's z is in a fraction of it alone, and the estimate
is that fraction of one device's. Replicas still agree, so a comparison of them shows nothing, and
one device's draws are none of theirs; the graph shows it.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from tfmulti.step.row_axis import OF_SHAPES
from tfmulti.verification.decisions import is_reduction, place_of, reaching_updates

# They add what they read, or put it side by side: an expectation of a sum is that of its terms.
_ADDING = {
    *("Add", "AddN", "AddV2", "BiasAdd", "Sub"),
    *("Concat", "ConcatV2", "IdentityN", "Pack"),
}
_CHOOSING = ("Select", "SelectV2")
_UPDATING = ("Assign", "Resource")
_NOTHING: frozenset = frozenset()


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
    found = {}
    for each in operations:
        if each in reaching and _meets(each, draws, of_rows) and (place := place_of(each)):
            found[f"{each.type} at {place}"] = None
    return list(found)


def _follow(operations, sources: dict, everyone=()) -> dict:
    """Returns what of the sources each operation depends on; a reduction spreads it."""
    depends: dict = {}
    # Operations come after those that they read.
    for each in operations:
        if each in sources:
            depends[each] = sources[each]
            continue
        known = {depends.get(tensor.op, _NOTHING) for tensor in each.inputs}
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
