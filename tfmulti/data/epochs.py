"""A dataset that tracks its epoch, gives each replica its batch, and measures waiting times."""

from __future__ import annotations

import contextlib
import functools
import threading

import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.data import maps as maps_lib
from tfmulti.data.audit import ShardAudit
from tfmulti.sharding import PADDING_WEIGHT, ShardPlan
from tfmulti.step import iterators
from tfmulti.step.rows import Counted, Padded, as_user_sees
from tfmulti.step.samples import Samples


class WaitTimer:
    """Adds up, within the step, the seconds that a step waits for its batch.

    It takes three small CPU operations per step. With several steps per call of the training
    function it measures nothing: TensorFlow then draws a batch while the previous step computes,
    and the two times cannot be separated.
    """

    def __init__(self):
        self._seconds = None

    def prepare(self) -> None:
        """Creates the variable, which cannot be created within a step."""
        if self._seconds is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._seconds = tf.Variable(0.0, False, dtype=tf.float64, name="tfmulti_wait")

    def measure(self, draw):
        """Draws from the pipeline by calling `draw`, and adds the time it took."""
        with tf.device("CPU:0"):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            drawn = draw()
        tensors = [t for t in tf.nest.flatten(drawn, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies(tensors), tf.device("CPU:0"):
            self._seconds.assign_add(tf.timestamp() - began)
        return drawn

    @property
    def seconds(self) -> float | None:
        """Seconds since the first step; None before it."""
        return None if self._seconds is None else float(self._seconds.numpy())


class Position:
    """The position of training: the epoch, and the step in it.

    Keras creates more iterators than it trains epochs, so the position counts the steps taken. It
    is read when the first step of a pass is drawn, not when an iterator is created.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._epoch = 0
        self._first_step = 0
        self._taken = None
        self.counts_all = False
        self.waiting: WaitTimer | None = None

    @property
    def taken(self) -> tf.Variable:
        """Steps taken since the current pass began, an int64 scalar."""
        if self._taken is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._taken = tf.Variable(0, False, dtype=tf.int64, name="tfmulti_taken")
        return self._taken

    def get(self) -> tuple[int, int]:
        """Returns (epoch, step), the step being the next to take."""
        return self._epoch, self._first_step + int(self.taken.numpy())

    def steps_since(self, earlier: tuple[int, int]) -> tuple[int, range]:
        """Returns the epoch, and its steps that were taken since an earlier position."""
        (epoch, step), first = self.get(), self._first_step
        if earlier[0] == epoch and first < earlier[1] <= step:
            first = earlier[1]
        return epoch, range(first, step)

    def next_step(self) -> int:
        """Returns the step at which the next pass begins."""
        return 0 if int(self.taken.numpy()) else self._first_step

    def set(self, epoch: int, step: int) -> None:
        """Makes the next pass begin at a step of an epoch."""
        with self._lock:
            self._epoch, self._first_step = epoch, step
            self.taken.assign(0)

    def begin(self) -> tuple[np.int64, np.int64]:
        """Begins a pass: the next epoch, or the same one if no step of it was taken."""
        with self._lock:
            if int(self.taken.numpy()):
                self._epoch, self._first_step = self._epoch + 1, 0
                self.taken.assign(0)
            return np.int64(self._epoch), np.int64(self._first_step)


class EpochDataset(tf.data.Dataset):
    """The dataset that `distribute_train` and `distribute_eval` return.

    Under its strategy each replica draws its own rows. Iterated directly, it gives the global
    batches, as one device would see them; `position` stays as it is, so that training does not
    skip what one worker has looked at.

    Attributes:
        plan: The `ShardPlan` of this dataset.
        strategy: The strategy for whose replicas it was made.
        audit: A `ShardAudit`, or None.
        keeps_rows: Whether the functions given to `map` are known to keep the rows of a batch. Then
            the plan has the number of rows of each step; else the replicas add up theirs.
    """

    def __init__(self, source, plan: ShardPlan, strategy, *, audit=False, parent=None, maps=()):
        self._source, self._maps = source, tuple(maps)
        self.plan, self.strategy = plan, strategy
        self.keeps_rows = not maps or maps_lib.keep_rows(maps, source.element_spec, plan)
        self.audit = parent.audit if parent else (ShardAudit(plan, strategy) if audit else None)
        self._position = parent._position if parent else Position()
        # Of iterations outside of training: the epochs that a program goes through by itself.
        self._looked_at = parent._looked_at if parent else Position()
        self._global = self._global_batches(self._looked_at)
        super().__init__(keras_compat.variant_tensor(self._global))

    @property
    def arrays(self):
        """The arrays that it was made of; None for a stream."""
        return getattr(self._source, "arrays", None)

    @property
    def stream(self):
        """The dataset that it was made of; None for arrays."""
        return getattr(self._source, "dataset", None)

    def _inputs(self):
        return [self._global]

    @property
    def element_spec(self):
        """Spec of a global batch."""
        return self._global.element_spec[0]

    def cardinality(self) -> tf.Tensor:
        """Returns the steps per epoch, an int64 scalar."""
        return tf.constant(self.plan.steps_per_epoch, tf.int64)

    @property
    def position(self) -> tuple[int, int]:
        """The position of training: (epoch, step), the step being the next to take."""
        return self._position.get()

    def steps_since(self, earlier: tuple[int, int]) -> tuple[int, range]:
        """Returns the epoch of the current pass, and which of its steps were taken since then.

        Args:
            earlier: What `position` was, perhaps in the pass before.
        """
        return self._position.steps_since(earlier)

    @property
    def order(self) -> dict:
        """The settings that determine the order of the examples, by name."""
        names = ("num_examples", "global_batch_size", "seed", "remainder", "steps_per_epoch")
        buffer = getattr(self._source, "shuffle_buffer", None)
        return {**{name: getattr(self.plan, name) for name in names}, "shuffle_buffer": buffer}

    def set_position(self, epoch: int, step: int = 0) -> None:
        """Makes the next pass begin at a step of an epoch, to resume training.

        Args:
            epoch: Number of the epoch, from 0, as `initial_epoch` of `fit`.
            step: Number of the step in the epoch, from 0; the number of steps for its end.

        Raises:
            ValueError: For an epoch or a step that does not exist.
        """
        if epoch < 0 or not 0 <= step <= self.plan.steps_per_epoch:
            raise ValueError(
                "`epoch` must be from 0, and `step` within the epoch. "
                f"Received: epoch={epoch}, step={step}, "
                f"with {self.plan.steps_per_epoch} steps per epoch. Use step=0 for its start."
            )
        self._position.set(epoch, step)
        self._looked_at.set(epoch, step)

    def measure_waiting(self) -> None:
        """Makes the steps of the next `fit` measure how long they wait for their rows."""
        if self._position.waiting is None:
            # A step may not read the clock if only deterministic operations are allowed.
            refused = tf.errors.FailedPreconditionError
            with contextlib.suppress(refused), tf.init_scope(), tf.device("CPU:0"):
                tf.timestamp()
                self._position.waiting = WaitTimer()

    @property
    def seconds_waited(self) -> float | None:
        """Seconds that steps have waited for their rows; None if unknown."""
        waiting = self._position.waiting
        return None if waiting is None else waiting.seconds

    def steps_left(self) -> int:
        """Returns the steps that the next pass will take."""
        return self.plan.steps_per_epoch - self._position.next_step()

    def end_pass(self) -> None:
        """Ends a pass without remaining steps, so that the next pass begins the next epoch."""
        self._position.set(self._position.get()[0] + 1, 0)

    def map(self, map_func, *args, **kwargs) -> EpochDataset:
        """Applies a function to the batch of each replica; Keras does so for `class_weight`.

        It must act row by row: a replica has only a part of the rows of a step, so that what a
        function computes from all of its rows, as in `x / tf.reduce_max(x)`, differs from that of
        one device. It may leave rows out or add some, but not with `remainder="pad"`.

        Args:
            map_func: Function of a batch; of its parts, if it is a tuple.
            *args: Not used: the batches keep their order in any case.
            **kwargs: Not used either.

        Returns:
            A dataset with the position of this one.

        Raises:
            ValueError: If rows are padded, and the function changes their number.
        """
        maps = [*self._maps, map_func]
        return EpochDataset(self._source, self.plan, self.strategy, parent=self, maps=maps)

    def prefetch(self, buffer_size, name=None) -> EpochDataset:
        """Returns this dataset, which already prefetches."""
        return self

    def __iter__(self):
        if tf.inside_function():
            return super().__iter__()
        looked_at = self._pass(self._global, None, self._looked_at)
        return self.train_pass() if self._position.counts_all else iter(looked_at)

    def train_pass(self) -> iterators.ReplicaIterator:
        """Returns an iterator over the global batches of the next pass, which counts them."""
        return iter(self._pass(self._batches_of_training, None, self._position))

    @functools.cached_property
    def _batches_of_training(self):
        return self._global_batches(self._position)

    def count_all(self) -> None:
        """Makes all iterations count: Keras trains a model without a strategy from the dataset."""
        self._position.counts_all = True

    def _pass(self, batches, strategy, position, *, counted=False):
        padded = self.plan.remainder == "pad"
        return Pass(batches, position, strategy, self.element_spec, counted=counted, padded=padded)

    def distribute_to(self, strategy) -> Pass:
        """Returns the distributed dataset that Keras iterates over; strategies call it.

        Raises:
            ValueError: If it was made for another strategy.
        """
        if strategy is not self.strategy:
            raise ValueError(
                "A dataset must be distributed by the strategy of the model. "
                f"Received: a dataset for {self.strategy.num_replicas_in_sync} replicas, "
                f"a model on {strategy.num_replicas_in_sync}. "
                "Pass the model's strategy to distribute_train or distribute_eval."
            )
        log = self.audit.record if self.audit else _no_audit
        several = topology.num_workers(strategy) > 1
        sampled = Samples(getattr(strategy, "keeps_samples", False), several)
        numbers = topology.local_batch_indices(strategy)
        batches = self._replica_batches_of(numbers, log, sampled, self._position)
        distributed = self._pass(batches, strategy, self._position, counted=self.keeps_rows)
        sampled.unpack = lambda step: as_user_sees(distributed.peek(step))
        marks.SAMPLE.set(distributed, sampled)
        return distributed

    def _global_batches(self, position) -> tf.data.Dataset:
        numbers = tuple(range(self.plan.num_replicas))
        unwanted = Samples(wanted=False)
        return self._replica_batches_of(numbers, _no_audit, unwanted, position).map(_join)

    def _replica_batches_of(self, numbers, log, sampled, position) -> tf.data.Dataset:
        def begin(_):
            epoch, step = tf.numpy_function(position.begin, [], [tf.int64] * 2)
            return tf.ensure_shape(epoch, []), tf.ensure_shape(step, [])

        def finish(count, batches):
            return count, tuple(self._finish(batch, weights) for batch, weights in batches)

        start = tf.data.Dataset.range(1).map(begin)
        dataset = sampled.of(
            self._source.batches(self.plan, numbers, start, log, sampled.digested).map(finish)
        )
        options = tf.data.Options()
        # Without this, its thread would delay the end of `fit` by seconds.
        options.autotune.enabled = False
        return dataset.prefetch(2).with_options(options)

    def _finish(self, batch, weights):
        batch = maps_lib.apply(self._maps, batch)
        if self.plan.remainder != "pad":
            return batch
        if not self.keeps_rows:
            batch = maps_lib.refuse_other_rows(batch, weights)
        return _mark_padding(batch, weights)


class Pass:
    """A dataset of the local replica batches; each iterator makes one pass over an epoch.

    Args:
        batches: The number of rows of each step, and its local replica batches.
        position: The position of training.
        strategy: The strategy of the replicas; None for one that takes the global batch.
        element_spec: Spec of a global batch.
        counted: Whether the numbers of rows are those that the replicas get.
        padded: Whether batches can end in padding rows.
    """

    def __init__(
        self,
        batches: tf.data.Dataset,
        position: Position,
        strategy,
        element_spec,
        *,
        counted: bool,
        padded: bool,
    ):
        self._replica_batches, self._position = batches, position
        self.strategy, self.element_spec = strategy, element_spec
        self._counted, self._padded = counted, padded
        self._number = iterators.register(self)

    @property
    def waiting(self) -> WaitTimer | None:
        """The timer of the steps' waiting times, or None."""
        return self._position.waiting

    def __iter__(self) -> iterators.ReplicaIterator:
        # A variable cannot be created within a traced step.
        _ = self._position.taken
        if self.waiting is not None:
            self.waiting.prepare()
        return iterators.create_iterator(self, self._number, self._replica_batches)

    def take(self, step: tuple):
        """Counts a step as taken, and returns its replica batches as one distributed value."""
        tensors = tf.nest.flatten(step, expand_composites=True)
        with tf.control_dependencies([t for t in tensors if isinstance(t, tf.Tensor)]):
            self._position.taken.assign_add(1)
        return self.peek(step)

    def peek(self, step: tuple):
        """Returns a step's replica batches as one distributed value."""
        batches = step[:1] if self.strategy is None else step[1]
        if self._padded:
            batches = tuple(Padded(*batch) for batch in batches)
        if self.strategy is None:
            return batches[0]
        count = step[0]
        if self.strategy.num_replicas_in_sync > 1 and self._counted:
            batches = tuple(Counted(batch, count) for batch in batches)
        return iterators.to_replicas(self.strategy, batches)


def _no_audit(epoch, step, replica, rows):
    """Keeps no record of the rows."""


def _join(count, batches):
    return (tf.nest.map_structure(lambda *rows: tf.concat(rows, axis=0), *batches),)


def _mark_padding(batch, weights):
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise ValueError(
            '`remainder="pad"` adds rows of weight 0, so data must be (x, y) or '
            f"(x, y, sample_weight). Received: {tf.nest.map_structure(lambda t: t.shape, batch)}. "
            'Use `remainder="uneven"`, which adds no rows.'
        )
    is_padding = weights == 0
    if len(batch) == 2:
        return (*batch, weights)
    own = tf.cast(batch[2], tf.float32)
    is_padding = tf.reshape(is_padding, [-1, *[1] * (own.shape.rank - 1)])
    # A user's own -0.0 leaves a row out, and does not mark it.
    own = tf.where(own == 0, tf.zeros_like(own), own)
    return (*batch[:2], tf.where(is_padding, PADDING_WEIGHT, own))
