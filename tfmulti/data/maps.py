"""The functions that `EpochDataset.map` applies to the batch of each replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmulti.sharding import ShardPlan, replica_slice
from tfmulti.step.rows import count_rows, is_unpacked, parts_of


def apply(maps: Sequence[Callable], batch):
    """Returns what the functions, one after the other, make of a batch."""
    for function in maps:
        batch = function(*batch) if is_unpacked(batch) else function(batch)
    return batch


def keep_rows(maps: Sequence[Callable], spec, plan: ShardPlan) -> bool:
    """Whether functions are known to return as many rows as they are given.

    Then the plan knows the rows of a step. They are traced for each number of rows that a replica
    gets: of one number alone, `x[:16]` could keep all.

    Args:
        maps: The functions.
        spec: Spec of a batch that the first one is given, with any number of rows.
        plan: The plan of the data.
    """
    try:
        return all(_rows_after(maps, spec, number) == {number} for number in _replica_rows(plan))
    except Exception:
        # Not every function can be traced for a known number of rows; the rows are then counted.
        return False


def _replica_rows(plan) -> set[int]:
    """Returns the numbers of rows that replica batches have."""
    whole = [plan.global_batch_size]
    if plan.remainder != "pad":
        whole = {plan.count(0, step) for step in (0, plan.steps_per_pass - 1)}
    # The first replicas have a row more than the last ones.
    ends = (0, plan.num_replicas - 1)
    parts = [replica_slice(size, plan.num_replicas, n) for size in whole for n in ends]
    return {stop - start for start, stop in parts}


def _rows_after(maps, spec, number) -> set[int | None]:
    given = tf.nest.map_structure(lambda each: _with_rows(each, number), spec)
    traced = tf.function(lambda batch: apply(maps, batch)).get_concrete_function(given)
    made = tf.nest.flatten(traced.structured_outputs, expand_composites=False)
    return {tuple(part.shape)[0] for part in made if part is not None}


def _with_rows(spec, number):
    shape = [number, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def refuse_other_rows(batch, weights):
    """Raises for a batch that has not one row for each of the weights that mark its padding.

    Args:
        batch: What the functions have returned.
        weights: The weights of the rows that they were given.

    Returns:
        The batch.

    Raises:
        ValueError: If the number of rows is known; else TensorFlow raises an InvalidArgumentError
            when the batch is drawn.
    """
    rule = 'With `remainder="pad"` a function given to `map` must keep the rows of a batch.'
    advice = 'Leave the rows as they are, or use `remainder="uneven"`.'
    for part in parts_of(batch) or ():
        given, made = weights.shape[0], part.shape[0]
        if None not in (given, made) and given != made:
            raise ValueError(f"{rule} Received: {made} rows for {given}. {advice}")
        given, made = count_rows(weights), count_rows(part)
        words = [f"{rule} Received:", made, "rows for", given, advice]
        tf.debugging.Assert(made == given, words)
    return batch
