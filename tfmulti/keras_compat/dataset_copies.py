"""A look into a dataset that leaves no trace."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.ops import gen_experimental_dataset_ops


def first_of_copy(dataset):
    """Returns the first batch of a copy of a dataset; None where it cannot be copied.

    Cures another order of rows than on one device: to draw from the dataset itself would have
    `shuffle` begin the first epoch with the second order. What Python has a part in, as a
    generator, cannot be copied.

    Args:
        dataset: A `tf.data.Dataset`, or something else, of which there is no copy.
    """
    if not isinstance(dataset, tf.data.Dataset) or hasattr(dataset, "distribute_to"):
        return None
    try:
        graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
        for node in [each for each in graph.node if each.op == "ShuffleDatasetV3"]:
            # A copied handle would be the same generator of orders.
            seeds = graph.node.add(name=f"{node.name}_seeds", op="DummySeedGenerator")
            node.input[4] = seeds.name
        variant = gen_experimental_dataset_ops.dataset_from_graph(graph.SerializeToString())
        return next(iter(dataset_ops.from_variant(variant, dataset.element_spec)), None)
    except (tf.errors.OpError, ValueError, TypeError):
        return None
