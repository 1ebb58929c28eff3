"""Describes the data of a call for verification, and reads a few rows for it."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.step import rows
from tfmulti.verification.case import Feed

_EVEN = ("drop", "repeat_first")
# Rows of ragged or sparse data with which `predict` is verified.
_MAX_ROWS = 64
_POLICIES = tf.data.experimental.AutoShardPolicy


def feed_of_predict(data) -> Feed:
    """Describes the data of `predict`.

    Args:
        data: The data, as the user gives them.
    """
    by_tensorflow = are_arrays(data) or isinstance(data, tf.data.Dataset)
    batches = keras_compat.batch_sizes_of_dataset(data)
    return Feed(
        functools.partial(_rows_of_arrays, data),
        batches=batches,
        may_be_unequal=not are_arrays(data) and _may_be_unequal(data, batches),
        in_chunks=is_in_chunks(data),
        by_python=not by_tensorflow or keras_compat.calls_python(data),
    )


def are_arrays(data) -> bool:
    """Whether data are arrays and tensors, of which rows can be taken without reading batches."""
    kinds = (np.ndarray, tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    parts = tf.nest.flatten(data, expand_composites=False)
    return all(isinstance(part, kinds) for part in parts)


def _rows_of_arrays(data):
    parts = tf.nest.flatten(data, expand_composites=False)
    if all(isinstance(part, (np.ndarray, tf.Tensor)) for part in parts):
        some = keras_compat.rows_from_all_over(data)
    else:
        some = rows.some_rows(data, 0, _MAX_ROWS)
    # What a step of `predict` is given: no tuple, unless the model has several inputs.
    return keras.utils.pack_x_y_sample_weight(some)


def samples_of(iterator):
    """Returns the batches that are kept of those that Keras's iterator reads, or None."""
    if iterator is None:
        return None
    return marks.SAMPLE.get(keras_compat.distributed_dataset_of(iterator))


def feed_of(peek, iterator) -> Feed:
    """Describes the data of `fit`, `evaluate` or a call with one batch.

    Args:
        peek: Function that returns a batch, as the replicas receive it.
        iterator: Keras's iterator over the batches; None for one batch.
    """
    if iterator is None:
        return Feed(peek, alone=True)
    own, static, shapes = keras_compat.feed_of(iterator)
    plan = getattr(own, "plan", None)
    known = {"shapes": shapes, "by_python": keras_compat.reads_by_python(iterator)}
    if plan is None:
        batches = keras_compat.batch_sizes_of(iterator)
        in_chunks = is_in_chunks(own)
        known["may_be_unequal"] = _may_be_unequal(own, batches)
        return Feed(peek, static=static, batches=batches, in_chunks=in_chunks, **known)
    padded = plan.remainder == "pad"
    if not own.keeps_rows:
        return Feed(peek, static=static, padded=padded, **known)
    # With padding, a replica batch may have no real row at all.
    batches = None if padded else [(plan.count(0, step),) for step in (0, plan.steps_per_pass - 1)]
    even = plan.remainder in _EVEN
    return Feed(peek, static=even, counted=True, padded=padded, batches=batches, **known)


def _may_be_unequal(data, batches) -> bool:
    """Whether parts may have different numbers of rows: of a zip, or of what Python code makes."""
    if batches is not None:
        return any(len(set(sizes)) > 1 for sizes in batches)
    # Of a dataset that is distributed already no batch can be read ahead.
    is_distributed = isinstance(data, tf.distribute.DistributedDataset)
    return not is_distributed and (
        not isinstance(data, tf.data.Dataset) or keras_compat.is_zipped(data)
    )


def is_in_chunks(dataset) -> bool:
    """Whether TensorFlow, and not `SplitBatches`, splits batches into replica batches."""
    specs = tf.nest.flatten(getattr(dataset, "element_spec", None))
    return not any(isinstance(s, (tf.RaggedTensorSpec, tf.SparseTensorSpec)) for s in specs)


def with_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset with None where Keras has put an empty `tf.experimental.Optional` for it.

    Keras does so with the None of a generator, and gives a step None again.
    """
    spec = dataset.element_spec
    if not any(isinstance(each, tf.OptionalSpec) for each in tf.nest.flatten(spec)):
        return dataset

    def put_back(*parts):
        keep = lambda part: None if isinstance(part, tf.experimental.Optional) else part
        return tf.nest.map_structure(keep, rows.of_arguments(parts, spec), expand_composites=False)

    return dataset.map(put_back)


def is_none(spec) -> bool:
    """Whether a part of a dataset's `element_spec` stands for None."""
    return isinstance(spec, type(tf.type_spec_from_value(None)))


def is_shared_by_rows(dataset: tf.data.Dataset) -> bool:
    """Whether each worker takes its rows of every batch; a user may have chosen another policy."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy in (_POLICIES.AUTO, _POLICIES.DATA)


def shared_by_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes each worker take its rows of every batch, unless the user has chosen another policy.

    TensorFlow's own choice is to give each worker files of its own, and so to make other batches
    than one device, as soon as a dataset reads files.
    """
    if not is_shared_by_rows(dataset):
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _POLICIES.DATA
    return dataset.with_options(options)


def refuse_unlike_order(data) -> None:
    """Raises ValueError for a dataset whose rows come in another order on each worker.

    Args:
        data: Data of `fit`, `evaluate` or `predict` on several workers.
    """
    if not is_plain_dataset(data) or not is_shared_by_rows(data):
        return
    found = keras_compat.find_changing_order(data, in_each_pass=False)
    if found is not None:
        raise ValueError(
            "A `tf.data.Dataset` must have the same order on every worker: each takes its rows of "
            f"every batch, and others would come twice or never. Received: {found}. Give .shuffle("
            "), list_files and sample_from_datasets a seed, or call keras.utils.set_random_seed "
            "with one number on every worker before the dataset is made; leave out "
            "deterministic=False. Or use tfmulti.distribute_train, which shuffles by itself."
        )


def is_plain_dataset(data) -> bool:
    """Whether data are a `tf.data.Dataset` that `distribute_train` has not made."""
    return isinstance(data, tf.data.Dataset) and not hasattr(data, "distribute_to")


def refuse_behind_others(data) -> None:
    """Raises ValueError for a result of `distribute_train` behind another call of tf.data.

    Such a call reads the plain batches, of which nothing counts how many were trained on: each
    pass would begin with the same epoch, and padding rows would be trained on.

    Args:
        data: Data of `fit`, `evaluate` or `predict`.
    """
    if not is_plain_dataset(data):
        return
    for each in keras_compat.made_of(data):
        plan = each.plan if hasattr(each, "distribute_to") else None
        # Without a seed and padding it is a plain dataset of batches in any case.
        if plan is not None and (plan.seed is not None or plan.remainder == "pad"):
            raise ValueError(
                "What `distribute_train` returns must be trained on as it is, or behind its own "
                "`map`: behind another call of tf.data all epochs have one order, and padding "
                f"stays. Received: a result of distribute_train within a {type(data).__name__}. "
                "Give take, cache, options and the like to the data before distribute_train. "
                "Instead of repeat() and steps for `fit`, give it `steps_per_epoch`."
            )
