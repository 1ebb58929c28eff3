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
from collections.abc import Callable

import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.parallel.stages import Boundary, Stage, StageTrace
from tfmulti.step import owners, parameters


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call of the model passes through the stages; the same on all workers.

    Attributes:
        strategy: A strategy with one replica for each worker, over MPI.
        worker: The number of this worker.
        stages: The stages; worker i has stage `i % len(stages)`.
        traces: What each stage does.
        num_micro_batches: The number of micro-batches.
        recomputes: Whether a stage keeps its inputs alone, and runs again for gradients.
        training: As in a layer's call.
        context: Function that makes the context in which the model was called.
    """

    strategy: tf.distribute.Strategy
    worker: int
    stages: list[Stage]
    traces: list[StageTrace]
    num_micro_batches: int
    recomputes: bool
    training: bool | None
    context: Callable

    @property
    def me(self) -> int:
        """The number of this worker's stage."""
        return self.worker % len(self.stages)

    @property
    def copies(self) -> list[int]:
        """The workers that have the same stage as this one, in copies of the stages."""
        return list(range(self.me, topology.num_workers(self.strategy), len(self.stages)))

    @property
    def outputs(self) -> Boundary:
        """What the last stage hands on."""
        return self.traces[-1].after


class Pass:
    """A pass of a batch through the stages.

    Args:
        plan: The plan.
        num_rows: The rows of this worker; 0 where it only has a padding row.
        wants_inputs: Whether gradients with respect to the inputs are asked for.
    """

    def __init__(self, plan: Plan, num_rows: tf.Tensor, wants_inputs: bool):
        self._plan, self._me, self._wants_inputs = plan, plan.me, wants_inputs
        self._stage, self._traced = plan.stages[plan.me], plan.traces[plan.me]
        self._number, self._mpi = len(plan.stages), plan.strategy.extended
        self._is_first, self._is_last = plan.me == 0, plan.me == self._number - 1
        self._has_rows, self._first_worker = num_rows > 0, plan.worker - plan.me
        own = tf.one_hot(plan.worker, topology.num_workers(plan.strategy), dtype=tf.int32)
        counts = self._mpi.add([own * num_rows])[0]
        # Rows of the copies of the stages before this one.
        self._before = tf.reduce_sum(counts[: self._first_worker])
        counts = counts[self._first_worker :][: self._number]
        # A copy of the stages without rows computes a padding row, of which nothing comes.
        padding = tf.cast(tf.reduce_sum(counts) == 0, tf.int32)
        self._counts = counts + padding * tf.one_hot(0, self._number, dtype=tf.int32)
        self._num_rows = self._counts[plan.me]
        self._ends = tf.cumsum(self._counts)
        self._total = self._ends[-1]
        # For each micro-batch a function that returns a tape, what it watches, and its outputs.
        self._recorded: list[Callable] = []
        # What ends when the previous micro-batch has been computed and its sending has begun.
        self._previous: list = []
        self.updates: list[tf.Tensor] = []

    def forward(self, flat, weights) -> list[tf.Tensor]:
        """Returns the outputs of this worker's rows.

        Args:
            flat: The inputs of this worker's rows, with their masks.
            weights: The values of its stage's weights.
        """
        state = list(zip(self._traced.updated, keras_compat.values_of(self._traced.updated)))
        given = self._collect(flat, 0, self._traced.before.specs if self._is_first else None)
        done = []
        for index in range(self._plan.num_micro_batches):
            taken = (
                self._micro_batch(given, index)
                if self._is_first
                else self._receive(self._traced.before.specs, self._me - 1)
            )
            outputs, after = self._run(index, taken, weights, state)
            state = [
                old if keras_compat.is_seed_state(old[0]) else new for old, new in zip(state, after)
            ]
            if self._is_last:
                done.append(outputs)
                self._previous = outputs
            else:
                self._previous = self._send(outputs, self._me + 1)
        self.updates = [value for _, value in after]
        results = self._spread(_joined(done), self._number - 1, self._plan.outputs.specs, least=1)
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
        weights, inputs, self._previous = None, [], []
        for index in reversed(range(self._plan.num_micro_batches)):
            after = self._traced.after
            gradients = (
                [each[slice(*self._bounds(index))] for each in given]
                if self._is_last
                else self._receive(after.floats(after.specs), self._me + 1)
            )
            of_inputs, of_weights = self._gradients(index, gradients)
            weights = of_weights if weights is None else _added(weights, of_weights)
            if self._is_first:
                begin, end = self._bounds(index)
                inputs.insert(0, [each[: end - begin] for each in of_inputs])
                sent = of_inputs if self._wants_inputs else []
            else:
                sent = self._send(of_inputs, self._me - 1)
            self._previous = [*sent, *tf.nest.flatten(of_weights, expand_composites=True)]
        if self._wants_inputs:
            first = self._plan.traces[0].before
            inputs = self._spread(_joined(inputs), 0, first.floats(first.specs), least=0)
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
        added = self._mpi.add_among(sent, self._plan.copies)
        return [tf.cast(new, old.dtype) for new, old in zip(added, dense)]

    def _send(self, flat, stage):
        return self._mpi.send(flat, self._first_worker + stage)

    def _receive(self, specs, stage):
        return self._mpi.receive_sent(specs, self._first_worker + stage)

    def _run(self, index, taken, weights, state):
        """Computes this worker's stage on one micro-batch, and keeps what its gradient needs."""
        before, after = self._traced.before, self._traced.after
        taken = self._in_turn(taken)
        sources = [*before.floats(taken), *weights]
        if self._plan.recomputes:
            flat, new = self._computed(index, taken, weights, state)

            def recorded(upstream):
                return self._computed_again(index, upstream, taken, weights, state)
        else:
            # A step may take several gradients of what it has computed once.
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(sources)
                flat, new = self._computed(index, taken, weights, state)

            def recorded(upstream):
                return tape, sources, after.floats(flat)

        self._recorded.append(recorded)
        return flat, new

    def _in_turn(self, tensors) -> list[tf.Tensor]:
        """Has a micro-batch wait for the previous one.

        TensorFlow would compute them side by side, or in any order: all would be done late.
        """
        with tf.control_dependencies(self._previous):
            return [tf.identity(each) for each in tensors]

    def _computed(self, index, taken, weights, state):
        begin, end = self._bounds(index)
        drawn = sum(each.num_draws for each in self._plan.traces[: self._me])
        with keras_compat.draws_of() as draws:
            number = draws.number + drawn if draws is not None else None

        def rows():
            return self._before + begin, tf.shape(taken[0])[0]

        # Each micro-batch has random numbers of its own, as each replica has.
        own = keras_compat.draws_of(rows, number), keras_compat.random_stream(index)
        with own[0], own[1], self._plan.context():
            _, flat, new = self._stage.run(
                self._traced.before, taken, weights, state, self._plan.training
            )
        if self._is_last:
            # A micro-batch without rows has had some row in their place.
            flat = [each[: end - begin] for each in flat]
        return flat, new

    def _gradients(self, index, upstream):
        upstream = self._in_turn(upstream)
        tape, sources, outputs = self._recorded[index](upstream)
        found = tape.gradient(
            outputs, sources, output_gradients=upstream, unconnected_gradients="zero"
        )
        number = len(self._traced.before.floats(self._traced.before.specs))
        return [tf.convert_to_tensor(each) for each in found[:number]], found[number:]

    def _computed_again(self, index, upstream, taken, weights, state):
        # Otherwise TensorFlow would find that it has computed this, and keep that.
        with tf.control_dependencies(upstream):
            taken, weights = [tf.identity(x) for x in taken], [tf.identity(x) for x in weights]
            state = [(variable, tf.identity(value)) for variable, value in state]
        sources = [*self._traced.before.floats(taken), *weights]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            flat, _ = self._computed(index, taken, weights, state)
        return tape, sources, self._traced.after.floats(flat)

    def _bounds(self, index):
        number = self._plan.num_micro_batches
        return index * self._total // number, (index + 1) * self._total // number

    def _micro_batch(self, flat, index):
        begin, end = self._bounds(index)
        # One without rows gets some row, whose outputs are dropped.
        begin = tf.minimum(begin, self._total - 1)
        return [each[begin : tf.maximum(end, begin + 1)] for each in flat]

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
        return _joined(parts)

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


def updated_everywhere(plan: Plan, one: Pass) -> None:
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


def whole_or_held(plan: Plan, weight, gradient) -> tf.Tensor:
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


def _joined(parts) -> list[tf.Tensor]:
    """Concatenates the rows of several lists of tensors."""
    return [tf.concat(each, axis=0) for each in zip(*parts)]


def _padded(rows, number):
    return tf.concat([rows, tf.zeros([number, *rows.shape[1:]], rows.dtype)], axis=0)


def _added(some, others) -> list:
    return [_sum(a, b) for a, b in zip(some, others)]


def _sum(a, b):
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        values, rows = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, rows, a.dense_shape)
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)
