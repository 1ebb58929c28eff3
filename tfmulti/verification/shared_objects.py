"""Finds tables, queues and iterators that a step changes, and that all replicas would change."""

from __future__ import annotations

from tfmulti.verification.decisions import place_of

# What these change is no variable: no replica has one of its own, and nothing restores it.
_CHANGING = ("LookupTableInsert", "LookupTableRemove", "LookupTableImport", "Barrier")
_CHANGING += ("QueueEnqueue", "QueueDequeue", "StackPush", "StackPop", "Stage", "Unstage")
_DRAWING = ("IteratorGetNext",)


def find_shared_objects(graph, num_local_replicas: int) -> list[str]:
    """Returns where a step changes such an object: the operation, file and line.

    Each of several workers has its own iterator, so that they all draw the same.

    Args:
        graph: The graph of the step on the local replicas.
        num_local_replicas: How many replicas this worker has.
    """
    kinds = _CHANGING + (_DRAWING if num_local_replicas > 1 else ())
    found = {}
    for operation in graph.get_operations():
        if operation.type.startswith(kinds) and (place := place_of(operation)):
            found[f"{operation.type} at {place}"] = None
    return list(found)
