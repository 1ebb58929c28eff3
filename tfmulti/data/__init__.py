"""tf.data pipelines that give each replica its batch: `distribute_train`, `distribute_eval`."""

from __future__ import annotations

import warnings

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.data.audit import ShardAudit as ShardAudit
from tfmulti.data.epochs import EpochDataset
from tfmulti.data.sources import ArraySource, create_source
from tfmulti.settings import check_type, check_whole_number
from tfmulti.sharding import ShardPlan


def distribute_train(
    data,
    strategy: tf.distribute.Strategy,
    global_batch_size: int,
    *,
    seed: int = 0,
    remainder: str = "uneven",
    steps_per_epoch: int | None = None,
    shuffle_buffer: int = 10_000,
    audit: bool = False,
) -> EpochDataset:
    """Makes the training data for `model.fit` under `strategy`.

    Step t of epoch e has the same examples on one device and on any cluster. Each epoch is
    reshuffled over the whole split; only `seed` and the epoch determine the order.

    Args:
        data: A tuple of arrays `(x, y)` or `(x, y, sample_weight)`, each of shape
            `(num_examples, ...)`, where `x` and `y` may be dicts, tuples or lists of arrays; or a
            `tf.data.Dataset` of single examples; or the name of a tensorflow-datasets split
            such as `"mnist/train"`. Of arrays every worker reads only its own rows. A
            `tf.data.Dataset` is read completely by every worker, which keeps its own rows.
        strategy: The result of `create_strategy`.
        global_batch_size: Examples per step over all replicas.
        seed: Seed of the order.
        remainder: What to do with the last, short batch: `"uneven"` keeps it short; `"pad"` fills
            all replica batches to the same size with rows of weight 0, which are cut off before
            the step; `"drop"` drops it; `"repeat_first"` fills short replica batches with the
            first examples.
        steps_per_epoch: Steps per epoch; by default one pass over the data.
        shuffle_buffer: For a `tf.data.Dataset`: the size of the shuffle buffer; 0 keeps its order.
            Arrays are always shuffled as a whole.
        audit: Whether to record which rows each replica received; see `ShardAudit`. Only arrays
            have numbers of rows to record.

    Returns:
        A `tf.data.Dataset` for `model.fit`. Its `position` is (epoch, step), and
        `set_position` sets it. `map` applies a function to the batch of each replica, and so must
        act row by row. Iterated directly, it yields global batches, and leaves `position` as it is.

    Raises:
        ValueError: For data or numbers that cannot be laid out.

    Example:
    >>> import numpy as np
    >>> from tfmulti import create_strategy
    >>> x, y = np.zeros((43, 8), "float32"), np.zeros(43, "int64")
    >>> strategy = create_strategy("one_device")
    >>> train = distribute_train((x, y), strategy, global_batch_size=16, seed=0)
    >>> int(train.cardinality()), train.position
    (3, (0, 0))
    """
    _check_strategy(strategy)
    check_whole_number("seed", seed, "Use the same on every worker, such as 0.", at_least=0)
    advice = "Use 0 to keep the order of a tf.data.Dataset."
    check_whole_number("shuffle_buffer", shuffle_buffer, advice, at_least=0)
    source = create_source(data, shuffle_buffer)
    if audit and not isinstance(source, ArraySource):
        raise ValueError(
            "`audit` (--audit_shards) needs rows with numbers: arrays, or a split of "
            "tensorflow-datasets that fits in memory. "
            f"Received: a tf.data.Dataset of {source.num_examples:,} examples. "
            "Leave `audit` out, or pass arrays."
        )
    plan = ShardPlan(
        source.num_examples,
        global_batch_size,
        strategy.num_replicas_in_sync,
        seed=seed,
        remainder=remainder,
        steps=steps_per_epoch,
    )
    # Keras warns of `shuffle=True`, its own default, for every tf.data.Dataset given to `fit`.
    message = "`shuffle=True` was passed, but will be ignored since the data `x` was provided as a"
    warnings.filterwarnings("ignore", message + " tf.data.Dataset", UserWarning)
    return EpochDataset(source, plan, strategy, audit=audit)


def distribute_eval(
    data, strategy: tf.distribute.Strategy, global_batch_size: int, *, remainder: str = "uneven"
) -> EpochDataset:
    """Makes the data for `evaluate`, `predict` and `validation_data`, in the order of the data.

    Args:
        data: As for `distribute_train`.
        strategy: The result of `create_strategy`.
        global_batch_size: Examples per step over all replicas.
        remainder: As for `distribute_train`; `"drop"` and `"repeat_first"` change results.

    Returns:
        A `tf.data.Dataset`. `predict` gives one row for each example, in order.

    Raises:
        ValueError: For data or numbers that cannot be laid out.
    """
    _check_strategy(strategy)
    source = create_source(data, shuffle_buffer=0)
    plan = ShardPlan(
        source.num_examples,
        global_batch_size,
        strategy.num_replicas_in_sync,
        seed=None,
        remainder=remainder,
    )
    return EpochDataset(source, plan, strategy)


def _check_strategy(strategy):
    advice = "Use the result of create_strategy."
    check_type("strategy", strategy, tf.distribute.Strategy, "a tf.distribute.Strategy", advice)
    known = keras_compat.is_ours(strategy) or keras_compat.has_servers(strategy)
    if not known and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "`strategy` must be one of tfmulti's: under those of TensorFlow, Keras 3 trains on "
            f"several replicas with other results. Received: {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas. {advice}"
        )
