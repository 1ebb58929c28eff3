"""Finds out what a `tf.data.Dataset` was made of, and who makes its batches, without reading it."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from tensorflow.core.framework import dataset_options_pb2

from tfmulti.keras_compat.reference import operations_of

_SHUFFLE = "a dataset with a shuffle of its own"
_UNSEEDED = "a dataset with a shuffle without a seed"
_RANDOM = "a dataset whose rows are chosen by random numbers without a seed"
_PARALLEL = "a dataset with deterministic=False"
# Parts of the names of numbers that make a dataset faster, and may depend on the host.
_OF_SPEED = ("parallel", "buffer", "prefetch")


def find_changing_order(dataset: tf.data.Dataset, in_each_pass: bool = True) -> str | None:
    """Returns what gives a dataset another order in each pass, or on each worker; None for nothing.

    A shuffle with a seed and `reshuffle_each_iteration=False` has the same order each time. With
    `deterministic=False` parallel calls give each row as soon as it is there.

    Args:
        dataset: The dataset.
        in_each_pass: Whether each pass must have the same order. Otherwise it is enough that all
            workers have the same one in each pass, as with any shuffle that has a seed.
    """
    if dataset.options().deterministic is False:
        return _PARALLEL
    found = (_order_changes_by(each, in_each_pass) for each in made_of(dataset))
    return next(filter(None, found), None)


def source_tensors(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns what a dataset was made of: arrays, names of files, seeds, counts, shards."""
    tensors = []
    for each in made_of(dataset):
        tensors += getattr(each, "_tensors", ())
        numbers = [int(value) for name, value in vars(each).items() if _matters(each, name, value)]
        for nodes in _functions_in(each):
            numbers += [seed for node in nodes for seed in _seeds_of(node, nodes)]
        if numbers:
            tensors.append(tf.constant(numbers, tf.int64))
    readable = [t for t in tensors if hasattr(t, "numpy")]
    return [t for t in readable if t.shape.rank and t.dtype not in (tf.variant, tf.resource)]


def _matters(dataset, name, value) -> bool:
    """Whether an attribute of a dataset is a number that decides which rows come, and when."""
    if not hasattr(value, "numpy") or not value.dtype.is_integer or value.shape.rank:
        return False
    shuffles = type(dataset).__name__ == "_ShuffleDataset"
    return shuffles or not any(part in name for part in _OF_SPEED)


def made_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all those that it was made of."""
    yield dataset
    # Those that read files keep what they read in attributes.
    kept = (value for value in vars(dataset).values() if isinstance(value, tf.data.Dataset))
    for each in dataset._inputs() or kept:
        yield from made_of(each)


def is_zipped(dataset: tf.data.Dataset) -> bool:
    """Whether a `tf.data.Dataset.zip` is behind a dataset."""
    return any(type(each).__name__ == "_ZipDataset" for each in made_of(dataset))


def _order_changes_by(dataset, in_each_pass) -> str | None:
    """Returns the same for one dataset, without those that it was made of."""
    kind = type(dataset).__name__
    if kind == "_ShuffleDataset":
        lasts = not (in_each_pass and dataset._reshuffle_each_iteration is not False)
        return None if lasts and _is_seeded(dataset) else _shuffle(in_each_pass)
    if kind == "_RandomDataset":
        lasts = not (in_each_pass and dataset._rerandomize)
        return None if lasts and _is_seeded(dataset) else _RANDOM
    if getattr(dataset, "_deterministic", None) == "false":
        return _PARALLEL
    # An interleave does not keep the argument.
    if kind == "_ParallelInterleaveDataset" and any(map(_is_parallel, _graph_of(dataset).node)):
        return _PARALLEL
    functions = _functions_in(dataset)
    found = (_node_changes_by(node, nodes, in_each_pass) for nodes in functions for node in nodes)
    return next(filter(None, found), None)


def _shuffle(in_each_pass) -> str:
    return _SHUFFLE if in_each_pass else _UNSEEDED


def _is_seeded(dataset) -> bool:
    return any(tf.get_static_value(seed) for seed in (dataset._seed, dataset._seed2))


def _node_changes_by(node, nodes, in_each_pass) -> str | None:
    """Returns the same for an operation within a function, as in an interleave of shuffled files.

    Args:
        node: The operation.
        nodes: All operations of the function.
        in_each_pass: As in `find_changing_order`.
    """
    if "ShuffleDataset" in node.op:
        is_alike = not in_each_pass and any(_seeds_of(node, nodes))
        return None if is_alike else _shuffle(in_each_pass)
    if "RandomDataset" in node.op:
        lasts = not (in_each_pass and node.attr["rerandomize_each_iteration"].b)
        return None if lasts and any(_seeds_of(node, nodes)) else _RANDOM
    return _PARALLEL if _is_parallel(node) else None


def _seeds_of(node, nodes) -> list[int]:
    """Returns the numbers of which an operation's seeds are made; zeros without a seed."""
    if "ShuffleDataset" in node.op:
        return _constants_in(node.input[2:4], nodes)
    return _constants_in(node.input[:2], nodes) if "RandomDataset" in node.op else []


def _constants_in(inputs, nodes) -> list[int]:
    names, found = {each.partition(":")[0] for each in inputs}, []
    for node in nodes:
        if node.name in names and node.op == "Const":
            found.append(int(tf.make_ndarray(node.attr["value"].tensor)))
        elif node.name in names:
            found += _constants_in(node.input, nodes)
    return found


def _is_parallel(node) -> bool:
    if node.op == "OptionsDataset":
        given = dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s)
        return given.WhichOneof("optional_deterministic") is not None and not given.deterministic
    return "Dataset" in node.op and node.attr["deterministic"].s == b"false"


def _functions_in(dataset) -> list:
    """Returns the operations of each function that a dataset calls."""
    graphs = [each.function.graph.as_graph_def() for each in dataset._functions()]
    return [nodes for graph in graphs for nodes in _functions_of(graph)]


def _functions_of(graph: tf.compat.v1.GraphDef) -> list:
    """Returns the operations of a function's graph, and those of each function that it calls."""
    return [graph.node, *(function.node_def for function in graph.library.function)]


def _graph_of(dataset) -> tf.compat.v1.GraphDef:
    """Returns the graph of a dataset; an empty one where TensorFlow cannot describe it."""
    try:
        return tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
    except tf.errors.OpError:
        return tf.compat.v1.GraphDef()


def is_from_python(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has the batches of a Python generator or a `PyDataset`, as they are."""
    # What Keras itself adds to a generator and to a `PyDataset`.
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    # `from_generator` is a flat map of a function that it defines within itself.
    function = getattr(getattr(dataset, "_map_func", None), "_func", None)
    return getattr(function, "__qualname__", "").startswith("_from_generator.")


def reads_by_python(epoch_iterator) -> bool:
    """Whether reading a batch calls Python code, of which another call may draw other numbers."""
    adapter = epoch_iterator.data_adapter
    dataset = getattr(adapter, "_dataset", None)
    if isinstance(dataset, tf.data.Dataset | tf.distribute.DistributedDataset):
        return calls_python(dataset)
    # Anything but arrays, and a generator, of which Keras has drawn the first batches: a
    # `PyDataset`, a loader of PyTorch, a dataset of Grain, an adapter of the user's own.
    return not (hasattr(adapter, "_inputs") or hasattr(adapter, "_first_batches"))


def calls_python(dataset) -> bool:
    """Whether reading a batch of a dataset calls Python code; False for anything else."""
    if hasattr(dataset, "distribute_to"):
        dataset = dataset.stream
    return isinstance(dataset, tf.data.Dataset) and _calls_python(dataset)


def _calls_python(dataset) -> bool:
    for function in dataset._functions():
        if any("PyFunc" in kind for kind in operations_of(function.function)):
            return True
    return any(map(_calls_python, dataset._inputs()))
