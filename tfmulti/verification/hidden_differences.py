"""Warnings of differences that the comparison of a few rows need not show."""

from __future__ import annotations

from tfmulti.verification import causes
from tfmulti.verification.case import Case
from tfmulti.verification.explanation import MOST_NAMED

SHUFFLES = (
    "A step shuffles rows at random: each replica shuffles the rows of its own replica batch, so "
    "rows never go to another replica. To mix the rows of the global batch, take them from "
    "tfmulti.gather_batch(rows)."
)


def describe_unlike(case: Case) -> str:
    """Returns the warning for batches whose parts replicas could get unequal shares of.

    Args:
        case: The verified step.
    """
    number = case.num_replicas
    counts = " + ".join(str(count) for count in dict.fromkeys(case.rows.counts))
    share = "the same share" if case.shares_alike(case.rows.counts) else "a row"
    return (
        f"`{case.method}` gives one device's result on {number} replicas only if each replica "
        f"gets {share} of every part of each batch. Received: a first batch of {counts} rows, for "
        "which that holds; the sizes of later batches are not known. "
        f"{causes.UNEQUAL.advice}"
    )


def describe_unknown_sizes(case: Case) -> str:
    """Returns the warning for a step that cannot take every number of rows, with unknown batches.

    Args:
        case: The verified step.
    """
    number = case.num_replicas
    return (
        f"`{case.method}` works only with some numbers of rows, and the sizes of later batches "
        f"are not known. Received: a first batch of {max(case.rows.counts)} rows, for which the "
        f"result on {number} replicas is that of one device. Make all batches of this size: "
        "dataset.batch(..., drop_remainder=True)."
    )


def describe_decisions(case: Case, decisions: list[str]) -> str:
    """Returns the warning for a step that decides by one replica's own rows.

    Args:
        case: The verified step.
        decisions: The operations with file and line; not empty.
    """
    return (
        f"`{case.method}` decides by a number that each replica computes from its own "
        f"rows: {', '.join(decisions[:MOST_NAMED])}. Replicas can decide differently from one "
        "another and from one device, also where a few rows show no difference. Compute the "
        f"number from {causes.ALL_ROWS}."
    )


def describe_ratios(case: Case, places: list[str]) -> str:
    """Returns the warning for a step that divides by a number of one replica's own rows.

    Args:
        case: The verified step.
        places: The operations with file and line; not empty.
    """
    return (
        f"`{case.method}` divides by a number, or takes the root or logarithm of one, that "
        f"each replica computes from its own rows: {', '.join(places[:MOST_NAMED])}. The rows that "
        "were tried show no difference, but if the number differs between replicas, as the number "
        "of rows with some property does, the result is not that of one device. Compute the "
        f"number from {causes.ALL_ROWS}."
    )


def describe_own_noise(case: Case, places: list[str]) -> str:
    """Returns the warning for a step that multiplies one replica's random numbers by reduced ones.

    Args:
        case: The verified step.
        places: The operations with file and line; not empty.
    """
    number = case.num_replicas
    return (
        f"`{case.method}` combines random numbers that each replica draws for itself with "
        "a value that was reduced over the replicas, and that was made from these numbers: "
        f"{', '.join(places[:MOST_NAMED])}. A replica's own numbers are only in a part of that "
        f"value: where one device gets the mean of a product, {number} replicas get a fraction of "
        f"it. {causes.SAME_DRAWS}."
    )


def describe_containers(case: Case, names: list[str]) -> str:
    """Returns the warning for containers that a step changes which runs eagerly.

    Args:
        case: The verified step.
        names: Their names, as paths from the model; not empty.
    """
    return (
        f"`{case.method}` changes {', '.join(names[:MOST_NAMED])} of "
        f"{type(case.model).__name__}, with run_eagerly=True: {case.num_replicas} "
        "replicas each do so in every step, with numbers from their own rows. If the step reads it "
        "again, training differs from one device: keep such numbers in a variable, computed from "
        "tfmulti.gather_batch(rows). To record what a step computes, return it as a log and "
        "collect the logs in a callback's `on_train_batch_end`."
    )
