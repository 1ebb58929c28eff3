"""The step to verify, with the rows that it is run on: few, but related as in the data.

A batch can have parts with different numbers of rows, as unlabelled rows beside fewer labelled
ones. A step that averages both has one device's result only if each replica gets the same share of
both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import replicated
from tfmulti.step.rows import count_rows, parts_of
from tfmulti.verification import custom_parts
from tfmulti.verification.rows import Rows

TRAIN, TEST, PREDICT = "train", "test", "predict"
# Larger batches are cut to fewer rows.
_MOST = 4


@dataclasses.dataclass(kw_only=True)
class Batches:
    """What is known of the batches of a step.

    Attributes:
        static: Whether all batches have the same number of rows.
        counted: Whether the data pipeline provides the number of rows of a step.
        padded: Whether it pads replica batches with rows of weight 0.
        batches: The different numbers of rows that batches have, each for all parts or one by one;
            None if unknown.
        in_chunks: Whether each replica takes as many rows as the first one, while there are any.
    """

    static: bool = False
    counted: bool = False
    padded: bool = False
    batches: list[tuple[int, ...]] | None = None
    in_chunks: bool = False


@dataclasses.dataclass
class Feed(Batches):
    """The data of a step.

    Attributes:
        peek: Function that returns a batch, of all local replicas.
        alone: Whether the batch is given by itself.
        shapes: The shapes of the parts of a batch, as the step is traced for; empty if unknown.
        by_python: Whether reading a batch calls Python code: then no other batch than those that
            steps take may be read.
        validates: Whether the call will evaluate other data, too.
        may_be_unequal: Whether parts of a batch may have different numbers of rows, as far as that
            is known unread.
    """

    peek: Callable
    alone: bool = False
    shapes: Sequence[tf.TensorShape] = ()
    by_python: bool = False
    validates: bool = False
    may_be_unequal: bool = False

    def has_unequal_parts(self, strategy: tf.distribute.Strategy) -> bool:
        """Whether parts of a batch have different numbers of rows; reads one where they may have.

        Args:
            strategy: The strategy, of which this process's replicas have the batch.
        """
        if self.batches is not None or not (self.alone or self.may_be_unequal):
            return self.may_be_unequal
        parts = [part for part in tf.nest.flatten(self.peek()) if part is not None]
        local = [strategy.experimental_local_results(part) for part in parts]
        if any(parts_of(values) is None for values in local):
            return False
        # A static shape costs a loop of `train_on_batch` nothing.
        count = lambda part: part.shape[0] if part.shape[0] is not None else int(count_rows(part))
        return len({sum(map(count, values)) for values in local}) > 1

    @property
    def key(self) -> str:
        """What tells such data from others, before they are read."""
        return str([(shape.rank, shape[1:]) for shape in self.shapes])


@dataclasses.dataclass
class Case(Batches):
    """A step to verify, with its model and rows.

    Attributes:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        rows: Rows of the first batch.
        is_traced_static: Whether it is traced for one number of rows, as some steps need.
        takes_whole_batch: Whether those are all rows of a batch, as layers that make groups need.
        whole_sizes: Their number, of each part; those of the first batch if None.
        trial: The comparison that found no difference, `verification.trial.Trial`; None before.
        is_read_meanwhile: Whether Python code may be reading later batches in another thread.
        seconds: How long it took to verify it.
        num_later: How many steps later a spot check compares it; 0 before the first step.
    """

    model: keras.Model
    kind: str
    rows: Rows
    is_traced_static: bool = False
    takes_whole_batch: bool = False
    whole_sizes: list[int] | None = None
    trial: object | None = None
    num_later: int = 0
    is_read_meanwhile: bool = False
    seconds: float = 0.0

    @classmethod
    def of(cls, model: keras.Model, kind: str, rows: Rows, feed: Feed) -> Case:
        """Returns the case of some rows of a feed."""
        known = {each.name: getattr(feed, each.name) for each in dataclasses.fields(Batches)}
        rows.note_shapes(feed.shapes)
        case = cls(model, kind, rows, **known)
        case.is_read_meanwhile = feed.by_python
        if feed.alone and rows.are_unequal:
            case.batches = [tuple(rows.counts)]
        return case

    @property
    def strategy(self):
        """The model's strategy."""
        return self.model.distribute_strategy

    @property
    def num_replicas(self) -> int:
        """The number of the strategy's replicas."""
        return self.strategy.num_replicas_in_sync

    @property
    def method(self) -> str:
        """The name of the step's method."""
        return f"{self.kind}_step"

    @property
    def eager(self) -> bool:
        """Whether the step runs eagerly."""
        return keras_compat.runs_eagerly(self.model)

    @property
    def is_replicated(self) -> bool:
        """Whether every replica computes this step from all rows."""
        return replicated.is_replicated(self.model, self.kind)

    def takes(self, rows: Rows) -> bool:
        """Whether the traced step can run on these rows, which then replace those of the case."""
        rows.open_axes = self.rows.open_axes
        if (self.takes_whole_batch or self.rows.are_unequal) and rows.counts != self.rows.counts:
            return False
        return rows.form() == self.rows.form() and rows.fit(self.rows)

    @property
    def num_micro_batches(self) -> int:
        """In how many parts each replica computes its rows; 1 but for stages on its devices."""
        return custom_parts.num_micro_batches(self.model)

    @property
    def may_leave_empty(self) -> bool:
        """Whether a replica may get no row of a batch."""
        if self.batches is None or self.num_micro_batches > 1:
            return True
        return not all(self.leaves_none_empty(counts) for counts in self.batches)

    def leaves_none_empty(self, counts: Sequence[int]) -> bool:
        """Whether each replica gets a row of every part with these numbers of rows."""
        number = self.num_replicas
        return all(shares(count, number, self.in_chunks)[-1] for count in counts)

    def shares_alike(self, counts: Sequence[int]) -> bool:
        """Whether each replica gets the same share of all parts with these numbers of rows."""
        return are_alike(counts, self.num_replicas, self.in_chunks)

    def sizes(self) -> list[list[int]]:
        """Returns the numbers of rows of the parts, for each of the steps to run, in order."""
        number = self.num_replicas * self.num_micro_batches
        counts = self.rows.counts
        if self.takes_whole_batch:
            return [self.whole_sizes or self._first_sizes()] * 2
        if self.rows.are_unequal:
            others = [list(b) for b in self.batches or [] if len(b) == len(counts)]
            unlike = [each for each in others if not self.shares_alike(each)]
            # Those come first that leave a replica without rows of a part.
            unlike.sort(key=self.leaves_none_empty)
            return [few_rows(each, number) for each in (counts, *(unlike or [counts])[:1])]
        last = number - 1 if self.may_leave_empty else number
        steps = (
            [2 * number, 2 * number]
            if self.static or self.is_traced_static
            else [2 * number + 1, last]
        )
        return [[size] * len(counts) for size in steps]

    def examples(self) -> list[list]:
        """Returns the rows of each of the steps to run."""
        if self.takes_whole_batch:
            return [self.rows.first(self.whole_sizes or self._first_sizes(), self.rows.whole)] * 2
        return [self.rows.first(size) for size in self.sizes()]

    def _first_sizes(self):
        return [int(count_rows(part)) for part in self.rows.whole]

    def batch_sizes(self) -> list[list[int]]:
        """Returns the numbers of rows that batches have, as far as rows of a batch are kept."""
        number = len(self._first_sizes())
        known = self.batches if self.batches and self.rows.whole else []
        sizes = [[*each] * (number if len(each) == 1 else 1) for each in known]
        return [each for each in sizes if len(each) == number]

    def unlike_sizes(self) -> list[int]:
        """Returns numbers of rows that later batches may have and replicas share unlike, or [].

        If those of the first batch are so already, a replica gets no row of the smallest part.
        """
        counts, number = self.rows.counts, self.num_replicas
        if (
            self.static
            or self.is_traced_static
            or self.batches is not None
            or not self.rows.are_unequal
        ):
            return []
        if self.shares_alike(counts):
            return few_rows_unlike(counts, number, self.in_chunks)
        few = few_rows(counts, number)
        return [number - 1 if size == min(few) else max(size, number) for size in few]

    def most_rows(self) -> list[int]:
        """Returns the largest number of rows of each part in the steps to run."""
        return [max(each) for each in zip(*self.sizes(), self.unlike_sizes() or self.sizes()[0])]


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


def few_rows(counts: Sequence[int], number: int) -> list[int]:
    """Returns small numbers of rows with the remainders of `counts`, and in their proportion.

    Args:
        counts: The number of rows of each part.
        number: The number of replicas.

    Example:
    >>> few_rows([12, 4], 3), few_rows([1200, 400], 3), few_rows([128, 127], 2)
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


def few_rows_unlike(counts: Sequence[int], number: int, in_chunks: bool) -> list[int]:
    """Returns few rows in the proportion of `counts`, not divided equally among replicas.

    >>> few_rows_unlike([12, 4], 2, True)
    [3, 1]
    """
    start = few_rows(counts, number)
    common = math.gcd(*start)
    for times in (*range(common - 1, 0, -1), *range(common + 1, common + number)):
        scaled = [count // common * times for count in start]
        if not are_alike(scaled, number, in_chunks):
            return scaled
    return [max(1, count - 1) for count in start]
