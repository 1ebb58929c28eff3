"""One pass of a batch through the stages of a pipeline, forwards and back, over MPI.

The rows of all workers are put together on the first stage's worker, and cut into micro-batches,
which go from stage to stage (GPipe: Huang et al., 2019, https://arxiv.org/abs/1811.06965). Each
worker gets the outputs of its own rows from the last stage, and computes its loss of them. Its
gradient goes the same way back.

All workers make their calls of MPI in the order of this module. Sending waits for nothing, so
that no two workers wait for each other.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfmulti import topology
from tfmulti.parallel.stage_run import Plan, StageRun, added, joined
from tfmulti.step import owners, parameters


@dataclasses.dataclass(frozen=True)
class WorkerPlan(Plan):
    """A plan with a stage on each worker; worker i has stage `i % len(stages)`.

    Attributes:
        strategy: A strategy with one replica for each worker, over MPI.
        worker: The number of this worker.
    """

    strategy: tf.distribute.Strategy
    worker: int

    @property
    def me(self) -> int:
        """The number of this worker's stage."""
        return self.worker % len(self.stages)

    @property
    def copies(self) -> list[int]:
        """The workers that have the same stage as this one, in copies of the stages."""
        return list(range(self.me, topology.num_workers(self.strategy), len(self.stages)))


class Pass:
    """A pass of a batch through the stages.

    Args:
        plan: The plan.
        num_rows: The rows of this worker; 0 where it only has a padding row.
        wants_inputs: Whether gradients with respect to the inputs are asked for.
    """

    def __init__(self, plan: WorkerPlan, num_rows: tf.Tensor, wants_inputs: bool):
        self._plan, self._me, self._wants_inputs = plan, plan.me, wants_inputs
        self._traced = plan.traces[plan.me]
        self._number, self._mpi = len(plan.stages), plan.strategy.extended
        self._is_first, self._is_last = plan.me == 0, plan.me == self._number - 1
        self._has_rows, self._first_worker = num_rows > 0, plan.worker - plan.me
        own = tf.one_hot(plan.worker, topology.num_workers(plan.strategy), dtype=tf.int32)
        counts = self._mpi.add([own * num_rows])[0]
        rows_before = tf.reduce_sum(counts[: self._first_worker])
        counts = counts[self._first_worker :][: self._number]
        # A copy of the stages without rows computes a padding row, of which nothing comes.
        padding = tf.cast(tf.reduce_sum(counts) == 0, tf.int32)
        self._counts = counts + padding * tf.one_hot(0, self._number, dtype=tf.int32)
        self._num_rows = self._counts[plan.me]
        self._ends = tf.cumsum(self._counts)
        self._total = self._ends[-1]
        self._run = StageRun(plan, plan.me, self._total, rows_before)

    @property
    def updates(self) -> list[tf.Tensor]:
        """The new values of the variables that this worker's stage updates."""
        return self._run.updates

    def forward(self, flat, weights) -> list[tf.Tensor]:
        """Returns the outputs of this worker's rows.

        Args:
            flat: The inputs of this worker's rows, with their masks.
            weights: The values of its stage's weights.
        """
        run, done = self._run, []
        given = self._collect(flat, 0, self._traced.before.specs if self._is_first else None)
        for index in range(self._plan.num_micro_batches):
            taken = (
                run.micro_batch(given, index)
                if self._is_first
                else self._receive(self._traced.before.specs, self._me - 1)
            )
            outputs = run.forward(index, taken, weights)
            if self._is_last:
                done.append(outputs)
            else:
                run.previous = self._send(outputs, self._me + 1)
        results = self._spread(joined(done), self._number - 1, self._plan.outputs.specs, least=1)
        # A worker that has a padding row alone gets some row for it.
        last = tf.shape(results[0])[0] - 1
        rows = tf.minimum(tf.range(tf.shape(flat[0])[0]), last)
        return [tf.gather(result, rows) for result in results]

    def backward(self, upstream) -> tuple[list, list]:
        """Returns the gradients of this worker's inputs, and of its stage's weights in this copy.

        Args:
            upstream: Gradients of what `forward` has returned, of those that are numbers.
        """
        last = self._number - 1
        mine = [tf.where(self._has_rows, each, tf.zeros_like(each)) for each in upstream]
        specs = self._plan.outputs.floats(self._plan.outputs.specs)
        given = self._collect(mine, last, specs if self._is_last else None)
        run, weights, inputs = self._run, None, []
        run.previous = []
        for index in reversed(range(self._plan.num_micro_batches)):
            after = self._traced.after
            begin, end = run.bounds(index)
            gradients = (
                [each[begin:end] for each in given]
                if self._is_last
                else self._receive(after.floats(after.specs), self._me + 1)
            )
            of_inputs, of_weights = run.backward(index, gradients)
            weights = of_weights if weights is None else added(weights, of_weights)
            if self._is_first:
                inputs.insert(0, [each[: end - begin] for each in of_inputs])
                sent = of_inputs if self._wants_inputs else []
            else:
                sent = self._send(of_inputs, self._me - 1)
            run.previous += sent
        if self._wants_inputs:
            first = self._plan.traces[0].before
            inputs = self._spread(joined(inputs), 0, first.floats(first.specs), least=0)
            size = tf.shape(upstream[0])[0] - self._num_rows
            inputs = [_padded(each, size) for each in inputs]
        return inputs, weights

    def of_copies(self, gradients) -> list:
        """Adds gradients of the stage's weights over the copies of the stage."""
        if len(self._plan.copies) == 1 or not gradients:
            return gradients
        dense = [tf.convert_to_tensor(each) for each in gradients]
        # MPI adds no halves.
        sent = [tf.cast(x, tf.float32) if x.dtype.size < 4 else x for x in dense]
        sums = self._mpi.add_among(sent, self._plan.copies)
        return [tf.cast(new, old.dtype) for new, old in zip(sums, dense)]

    def _send(self, flat, stage):
        return self._mpi.send(flat, self._first_worker + stage)

    def _receive(self, specs, stage):
        return self._mpi.receive_sent(specs, self._first_worker + stage)

    def _collect(self, mine, worker, specs) -> list[tf.Tensor]:
        """Returns the rows of all stages' workers on one of them, in the order of stages.

        Args:
            mine: This worker's tensors.
            worker: The number of the stage that gets them.
            specs: What they are, on that worker; None on the others.
        """
        if specs is None:
            self._send([each[: self._num_rows] for each in mine], worker)
            return []
        own = [each[: self._num_rows] for each in mine]
        parts = [
            own if other == worker else self._receive(specs, other) for other in range(self._number)
        ]
        return joined(parts)

    def _spread(self, flat, worker, specs, least) -> list[tf.Tensor]:
        """Returns this worker's rows of tensors that one worker has.

        Args:
            flat: The tensors, on that worker.
            worker: The number of its stage.
            specs: What they are.
            least: How many rows a worker gets at least.
        """
        if self._me != worker:
            return self._receive(specs, worker)
        mine = None
        for other in range(self._number):
            begin = tf.minimum(self._ends[other] - self._counts[other], self._total - least)
            end = tf.maximum(self._ends[other], begin + least)
            part = [each[begin:end] for each in flat]
            if other == self._me:
                mine = part
            else:
                self._send(part, other)
        return mine


def updated_everywhere(plan: WorkerPlan, one: Pass) -> None:
    """Writes what the stages have updated, on all workers of the same copy of the stages.

    Args:
        plan: The plan.
        one: The pass of this worker.
    """
    pairs = [(stage, v) for stage, each in enumerate(plan.traces) for v in each.updated]
    own = dict(zip(map(id, plan.traces[plan.me].updated), one.updates))
    values = [
        own[id(variable)] if stage == plan.me else tf.zeros(variable.shape, variable.dtype)
        for stage, variable in pairs
    ]
    received = list(values)
    for first in range(0, topology.num_workers(plan.strategy), len(plan.stages)):
        sources = [first + stage for stage, _ in pairs]
        for place, value in owners.from_owners(plan.strategy, values, sources):
            if first == plan.worker - plan.me:
                received[place] = value
    for (_, variable), value in zip(pairs, received):
        variable.assign(value)


def whole_or_held(plan: WorkerPlan, weight, gradient) -> tf.Tensor:
    """Returns the gradient of a stage's weight as the step uses it.

    Keras's own step updates it on its owner, and needs it there alone; other steps get it on all.

    Args:
        plan: The plan.
        weight: The weight.
        gradient: Its gradient on its owner; None elsewhere.
    """
    weight.unreduced = False
    if parameters.are_handed_on():
        return tf.zeros([0], weight.dtype) if gradient is None else gradient
    whole = tf.zeros([0], weight.dtype) if gradient is None else tf.convert_to_tensor(gradient)
    return owners.receive_from(plan.strategy, whole, weight.owner, weight.shape)


def _padded(rows, number):
    return tf.concat([rows, tf.zeros([number, *rows.shape[1:]], rows.dtype)], axis=0)
