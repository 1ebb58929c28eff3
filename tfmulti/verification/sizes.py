"""How many rows the parts of a few batches have: few, but related as in the data.

A batch can have parts with different numbers of rows, as unlabelled rows beside fewer labelled
ones. A step that averages both has one device's result only if each replica gets the same share of
both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Larger batches are cut to fewer rows.
_MOST = 4


def shares(count: int, number: int, in_chunks: bool) -> list[int]:
    """Returns the rows of each replica.

    Args:
        count: The number of rows.
        number: The number of replicas.
        in_chunks: Whether each replica takes as many as the first one, as long as there are any.

    Example:
    >>> shares(4, 3, in_chunks=True), shares(4, 3, in_chunks=False)
    ([2, 2, 0], [2, 1, 1])
    """
    if not in_chunks:
        return [count // number + (index < count % number) for index in range(number)]
    chunk = -(-count // number)
    return [max(0, min(chunk, count - index * chunk)) for index in range(number)]


def are_alike(counts: Sequence[int], number: int, in_chunks: bool) -> bool:
    """Whether each replica gets the same share of all parts.

    >>> are_alike([12, 4], 2, True), are_alike([12, 4], 3, True), are_alike([4, 4], 3, True)
    (True, False, True)
    """
    have = [shares(count, number, in_chunks) for count in counts]
    return all(
        mine * counts[0] == first * count
        for each, count in zip(have, counts)
        for mine, first in zip(each, have[0])
    )


def leaves_none_empty(counts: Sequence[int], number: int, in_chunks: bool) -> bool:
    """Whether each replica gets a row of each part.

    >>> leaves_none_empty([8], 3, True), leaves_none_empty([4], 3, True)
    (True, False)
    """
    return all(shares(count, number, in_chunks)[-1] for count in counts)


def few(counts: Sequence[int], number: int) -> list[int]:
    """Returns small numbers of rows with the remainders of `counts`, and in their proportion.

    Args:
        counts: The number of rows of each part.
        number: The number of replicas.

    Example:
    >>> few([12, 4], 3), few([1200, 400], 3), few([128, 127], 2)
    ([12, 4], [12, 4], [4, 3])
    """
    common, most = math.gcd(*counts), _MOST * number
    times = common
    while times > number and max(counts) // common * times > most:
        times -= number
    scaled = [count // common * times for count in counts]
    if max(scaled) <= most:
        return scaled
    # The proportion is lost; what remains is which part has more.
    large = sorted({count for count in counts if count >= number})
    rank = {count: 1 + large.index(count) for count in large}
    return [number * rank[c] + c % number if c >= number else c for c in counts]


def few_unlike(counts: Sequence[int], number: int, in_chunks: bool) -> list[int]:
    """Returns small numbers of rows in the proportion of `counts`, which replicas share unlike.

    >>> few_unlike([12, 4], 2, True)
    [3, 1]
    """
    start = few(counts, number)
    common = math.gcd(*start)
    for times in (*range(common - 1, 0, -1), *range(common + 1, common + number)):
        scaled = [count // common * times for count in start]
        if not are_alike(scaled, number, in_chunks):
            return scaled
    return [max(1, count - 1) for count in start]
