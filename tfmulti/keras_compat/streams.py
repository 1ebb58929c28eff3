"""Finds out what a `tf.data.Dataset` was made of, without reading it."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2

_SHUFFLE = "a dataset with a shuffle of its own"
_RANDOM = "a dataset whose rows are chosen by random numbers without a seed"
_PARALLEL = "a dataset with deterministic=False"


def find_changing_order(dataset: tf.data.Dataset) -> str | None:
    """Returns what gives a dataset another order in each pass, or on each worker; None for nothing.

    A shuffle with a seed and `reshuffle_each_iteration=False` has the same order each time. With
    `deterministic=False` parallel calls give each row as soon as it is there.
    """
    if dataset.options().deterministic is False:
        return _PARALLEL
    return next(filter(None, map(_order_changes_by, made_of(dataset))), None)


def source_tensors(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns what a dataset was made of: arrays, names of files, the seeds of its shuffles."""
    tensors = []
    for each in made_of(dataset):
        tensors += getattr(each, "_tensors", ())
        if type(each).__name__ == "_ShuffleDataset":
            tensors.append(tf.stack([each._seed, each._seed2]))
    readable = [t for t in tensors if hasattr(t, "numpy")]
    return [t for t in readable if t.shape.rank and t.dtype not in (tf.variant, tf.resource)]


def made_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all those that it was made of."""
    yield dataset
    for each in dataset._inputs():
        yield from made_of(each)


def _order_changes_by(dataset) -> str | None:
    """Returns the same for one dataset, without those that it was made of."""
    kind = type(dataset).__name__
    if kind == "_ShuffleDataset":
        lasts = dataset._reshuffle_each_iteration is False and _is_seeded(dataset)
        return None if lasts else _SHUFFLE
    if kind == "_RandomDataset":
        lasts = not dataset._rerandomize and _is_seeded(dataset)
        return None if lasts else _RANDOM
    if getattr(dataset, "_deterministic", None) == "false":
        return _PARALLEL
    # An interleave does not keep the argument.
    if kind == "_ParallelInterleaveDataset" and any(map(_is_parallel, _graph_of(dataset).node)):
        return _PARALLEL
    graphs = [each.function.graph.as_graph_def() for each in dataset._functions()]
    functions = [nodes for graph in graphs for nodes in _functions_of(graph)]
    found = (_node_changes_by(node, nodes) for nodes in functions for node in nodes)
    return next(filter(None, found), None)


def _is_seeded(dataset) -> bool:
    return any(tf.get_static_value(seed) for seed in (dataset._seed, dataset._seed2))


def _node_changes_by(node, nodes) -> str | None:
    """Returns the same for an operation within a function, as in an interleave of shuffled files.

    Args:
        node: The operation.
        nodes: All operations of the function.
    """
    if "ShuffleDataset" in node.op:
        return _SHUFFLE
    if "RandomDataset" in node.op:
        names = {name.partition(":")[0] for name in node.input}
        seeds = [n.attr["value"].tensor for n in nodes if n.name in names and n.op == "Const"]
        is_seeded = any(tf.make_ndarray(seed) for seed in seeds)
        return None if is_seeded and not node.attr["rerandomize_each_iteration"].b else _RANDOM
    return _PARALLEL if _is_parallel(node) else None


def _is_parallel(node) -> bool:
    if node.op == "OptionsDataset":
        given = dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s)
        return given.WhichOneof("optional_deterministic") is not None and not given.deterministic
    return "Dataset" in node.op and node.attr["deterministic"].s == b"false"


def _functions_of(graph: tf.compat.v1.GraphDef) -> list:
    """Returns the operations of a function's graph, and those of each function that it calls."""
    return [graph.node, *(function.node_def for function in graph.library.function)]


def _graph_of(dataset) -> tf.compat.v1.GraphDef:
    """Returns the graph of a dataset; an empty one where TensorFlow cannot describe it."""
    try:
        return tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
    except tf.errors.OpError:
        return tf.compat.v1.GraphDef()
