"""Pipeline stages on the workers of a cluster, which send micro-batches to each other over MPI.

All workers send their rows to the worker of the first stage. It cuts them into micro-batches, which
pass from stage to stage (GPipe: Huang et al., 2019, https://arxiv.org/abs/1811.06965). The worker
of the last stage sends each worker the outputs of its own rows, and that worker computes its loss
from them. Gradients travel the same way back.

All workers make their MPI calls in the order of this module. Sending never blocks, so no two
workers wait for each other.
"""

from __future__ import annotations

import collections

import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.parallel.staged_call import (
    Plan,
    StagedCall,
    StageRun,
    add_gradients,
    concat_rows,
    link,
    refuse_second_derivative,
    spread_over,
)
from tfmulti.parallel.stages import weights_of
from tfmulti.step import normalization, owners, parameters
from tfmulti.step.row_axis import OF_ALL_ROWS
from tfmulti.step.rows import current_replica_batch, in_branch
from tfmulti.step.sums import values_of_gradient, with_values


class WorkerStages(StagedCall):
    """Replaces a model's call by a pass through stages, of which each worker has one.

    Worker i has stage `i % len(stages)`. With more workers than stages there are several copies of
    the stages, which share the rows of the global batch.
    """

    def install(self) -> None:
        """Gives each weight to the worker of its stage, and replaces the model's call."""
        self._refuse_synchronized()
        super().install()
        weights = [weight for stage in self._stages for weight in stage.weights]
        num_stages = collections.Counter(map(id, weights))
        # Each weight once, and whether several stages share it.
        unique = {id(weight): weight for weight in weights}
        self._weights = [(weight, num_stages[key] > 1) for key, weight in unique.items()]
        if self._num_micro_batches == 1 and self._num_copies == 1:
            for layer in keras_compat.all_layers(self._model):
                marks.SEES_BATCH.set(layer, True)

    @property
    def _num_copies(self):
        return topology.num_workers(self._strategy) // len(self._cut.parts)

    def _refuse_synchronized(self):
        """Raises ValueError for synchronized batch normalization in several copies of a stage."""
        synchronized = [layer.name for layer in normalization.synchronized_layers(self._model)]
        if synchronized and self._num_copies > 1:
            raise ValueError(
                "Synchronized batch normalization cannot span several copies of a pipeline: each "
                f"copy sees only its own rows. Received: {synchronized[0]}, with "
                f"{self._num_copies} copies of {len(self._cut.parts)} stages. Use as many stages "
                "as workers, synchronized=False for the statistics of each copy, or "
                "keras.layers.GroupNormalization."
            )

    def _place_weights(self):
        # A weight that stages share is with the first of them.
        first: dict = {}
        for stage, part in enumerate(self._cut.parts):
            for weight in weights_of(part.model):
                first.setdefault(id(weight), (weight, stage))
        for weight, stage in first.values():
            self._refuse_placed(weight, stage)
        sharded = parameters.of_strategy(self._strategy)
        for weight, stage in first.values():
            if not _is_placed(weight):
                sharded.place(weight, stage, len(self._cut.parts))

    def _refuse_placed(self, weight, stage):
        """Raises ValueError if another pipeline has a weight elsewhere: this stage would not."""
        number = len(self._cut.parts)
        if _is_placed(weight) and (weight.owner, weight.stages) != (stage, number):
            raise ValueError(
                "Pipelines that share a layer must have the same number of stages, and the layer "
                "in the same one. "
                f"Received: {weight.path}, in stage {stage} of {number} of {self._model.name!r}, "
                f"and in stage {weight.owner} of {weight.stages} of another pipeline. Choose "
                "the same number of `stages`, cut so that the layer is in the same stage."
            )

    def _is_step(self):
        is_step = parameters.in_replica() and current_replica_batch() is not None
        if is_step and in_branch():
            raise ValueError(
                "Workers must not pass rows through a pipeline within tf.cond, tf.while_loop or "
                "tf.map_fn: one worker could enter the branch and another not. Received: a call of "
                f"{self._model.name!r} in a branch or a loop of a step. Call it before the branch, "
                "a fixed number of times in Python, or use shard='parameters' without "
                "tfmulti.pipeline."
            )
        return is_step

    def _run_stages(self, plan, before, flat):
        self._refuse_synchronized()
        weights = [
            parameters.gather(each, each.held(), for_stages=True) if is_shared else each.held()
            for each, is_shared in self._weights
        ]
        batch, number = current_replica_batch(), len(flat)
        num_rows = tf.where(batch.num_real > 0, tf.shape(flat[0])[0], 0)
        wants_inputs = keras_compat.is_recorded(before.floats(flat))
        places = {id(each): place for place, (each, _) in enumerate(self._weights)}
        stage = topology.worker_index(self._strategy) % len(plan.stages)
        mine = [places[id(weight)] for weight in plan.stages[stage].weights]
        one = None

        @tf.custom_gradient
        def compute(*tensors):
            nonlocal one
            # An outer tape must not record what the stages compute: it differs between workers,
            # which would then reduce the gradients of shared weights in different orders.
            tensors = [tf.stop_gradient(tensor) for tensor in tensors]
            own = [tensors[number + place] for place in mine]
            one = _WorkerPass(plan, self._strategy, num_rows, wants_inputs)
            results = one.forward(tensors[:number], own)

            def gradient(*upstream):
                upstream = [tf.convert_to_tensor(each) for each in plan.outputs.floats(upstream)]
                of_inputs, of_weights = one.backward(upstream)
                of_weights = dict(zip(mine, of_weights))
                own = [place for place in of_weights if not self._weights[place][1]]
                sums = one.add_over_copies([of_weights[place] for place in own])
                of_weights.update(zip(own, sums))
                reached = self._reached(plan)
                of_weights = list(self._gradients_of_weights(of_weights, reached))
                links = [link(each) for each in (*before.floats(flat), *weights)]
                of_inputs = refuse_second_derivative(of_inputs, links)
                of_weights = refuse_second_derivative(of_weights, links)
                return [*spread_over(before, of_inputs, wants_inputs), *of_weights]

            return results, gradient

        results = compute(*flat, *weights)
        one.update()
        return results

    def _reached(self, plan) -> set[int]:
        """Returns the ids of the weights of all stages that a loss depends on."""
        pairs = zip(plan.stages, plan.connections.reached())
        return {
            id(weight)
            for stage, reached in pairs
            for weight, is_reached in zip(stage.weights, reached)
            if is_reached
        }

    def _gradients_of_weights(self, gradients, reached):
        """Yields a gradient for each weight, from those of this worker's stage by their places.

        It is None, on all workers, for weights that are not reached.
        """
        for place, (weight, is_shared) in enumerate(self._weights):
            own = gradients.get(place)
            if id(weight) not in reached:
                weight.unreduced = False
                yield None
                continue
            if is_shared:
                yield tf.zeros(weight.shape, weight.dtype) if own is None else own
                continue
            weight.unreduced = False
            own = tf.zeros([0], weight.dtype) if own is None else own
            if not parameters.only_update_reads():
                # Keras's own step needs a gradient on the weight's owner only; other steps read it.
                own = tf.convert_to_tensor(own)
                own = owners.receive_from(self._strategy, own, weight.owner, weight.shape)
            with tf.name_scope(OF_ALL_ROWS):
                yield tf.identity(own)


class _WorkerPass:
    """One pass of a batch through the stages, forward and backward, and this worker's part in it.

    Args:
        plan: The plan.
        strategy: A strategy with one replica for each worker, over MPI.
        num_rows: The rows of this worker; 0 if it has only a dummy row.
        wants_inputs: Whether gradients with respect to the inputs are asked for.
    """

    def __init__(self, plan: Plan, strategy, num_rows: tf.Tensor, wants_inputs: bool):
        self._plan, self._strategy, self._wants_inputs = plan, strategy, wants_inputs
        self._number, self._mpi = len(plan.stages), strategy.extended
        worker, num_workers = topology.worker_index(strategy), topology.num_workers(strategy)
        self._me = worker % self._number
        # The worker of the first stage in this copy of the stages.
        self._first_worker = worker - self._me
        self._copies = list(range(self._me, num_workers, self._number))
        self._trace = plan.traces[self._me]
        self._is_first, self._is_last = self._me == 0, self._me == self._number - 1
        self._has_rows = num_rows > 0
        own = tf.one_hot(worker, num_workers, dtype=tf.int32)
        counts = self._mpi.add([own * num_rows])[0]
        rows_before = tf.reduce_sum(counts[: self._first_worker])
        counts = counts[self._first_worker :][: self._number]
        # A copy of the stages without rows computes one dummy row, whose results are not used.
        self._is_padding = tf.reduce_sum(counts) == 0
        padding = tf.cast(self._is_padding, tf.int32)
        self._counts = counts + padding * tf.one_hot(0, self._number, dtype=tf.int32)
        self._num_rows = self._counts[self._me]
        self._ends = tf.cumsum(self._counts)
        self._total = self._ends[-1]
        self._run = StageRun(plan, self._me, self._total, rows_before)

    def forward(self, flat, weights) -> list[tf.Tensor]:
        """Returns the outputs of this worker's rows.

        Args:
            flat: The inputs of this worker's rows, with their masks.
            weights: The values of its stage's weights.
        """
        run, finished = self._run, []
        inputs = self._collect(flat, 0, self._trace.before.specs if self._is_first else None)
        for index in range(self._plan.num_micro_batches):
            taken = (
                run.micro_batch(inputs, index)
                if self._is_first
                else self._receive(self._trace.before.specs, self._me - 1)
            )
            outputs = run.forward(index, taken, weights)
            if self._is_last:
                finished.append(outputs)
            else:
                run.previous = self._send(outputs, self._me + 1)
        specs = self._plan.outputs.specs
        results = self._spread(concat_rows(finished), self._number - 1, specs, at_least=1)
        # A worker that only has a dummy row receives some other row in its place.
        last = tf.shape(results[0])[0] - 1
        rows = tf.minimum(tf.range(tf.shape(flat[0])[0]), last)
        return [tf.gather(result, rows) for result in results]

    def backward(self, upstream) -> tuple[list, list]:
        """Returns the gradients of this worker's inputs, and of its stage's weights in this copy.

        Those of the inputs are none if nobody asks for them.

        Args:
            upstream: Gradients of the floating-point tensors that `forward` returned.
        """
        last = self._number - 1
        own = [tf.where(self._has_rows, grad, tf.zeros_like(grad)) for grad in upstream]
        specs = self._plan.outputs.floats(self._plan.outputs.specs)
        collected = self._collect(own, last, specs if self._is_last else None)
        run, weights, inputs = self._run, None, []
        run.previous = []
        for index in reversed(range(self._plan.num_micro_batches)):
            after = self._trace.after
            begin, end = run.bounds(index)
            gradients = (
                [tensor[begin:end] for tensor in collected]
                if self._is_last
                else self._receive(after.floats(after.specs), self._me + 1)
            )
            of_inputs, of_weights = run.backward(index, gradients)
            weights = of_weights if weights is None else add_gradients(weights, of_weights)
            if self._is_first:
                inputs.insert(0, [each[: end - begin] for each in of_inputs])
                sent = of_inputs if self._wants_inputs else []
            else:
                sent = self._send(of_inputs, self._me - 1)
            run.previous += sent
        if len(self._copies) > 1:
            weights = [self._without_padding(grad) for grad in weights]
        if not self._wants_inputs:
            return [], weights
        first = self._plan.traces[0].before
        specs = first.floats(first.specs)
        inputs = self._spread(concat_rows(inputs), 0, specs, at_least=0)
        missing = tf.shape(upstream[0])[0] - self._num_rows
        return [_add_zero_rows(each, missing) for each in inputs], weights

    def _without_padding(self, gradient):
        """Returns zeros if this copy has a dummy row alone, of which 0 times NaN may have come."""
        values = values_of_gradient(gradient)
        return with_values(gradient, tf.where(self._is_padding, tf.zeros_like(values), values))

    def add_over_copies(self, gradients) -> list:
        """Adds gradients of the stage's weights over the copies of the stage.

        Sparse gradients are concatenated: an optimizer squares each of their rows by itself, as on
        one device.
        """
        if len(self._copies) == 1:
            return gradients
        dense = [grad for grad in gradients if not isinstance(grad, tf.IndexedSlices)]
        sums = iter(self._mpi.add_among(dense, self._copies) if dense else [])
        return [
            self._concat_over_copies(grad) if isinstance(grad, tf.IndexedSlices) else next(sums)
            for grad in gradients
        ]

    def _concat_over_copies(self, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        own = self._first_worker + self._me
        others = [worker for worker in self._copies if worker != own]

        def concat(tensor):
            received = iter(self._mpi.exchange_among([tensor] * len(others), others))
            parts = [tensor if worker == own else next(received) for worker in self._copies]
            return tf.ensure_shape(tf.concat(parts, axis=0), [None, *tensor.shape[1:]])

        values, rows = concat(gradient.values), concat(gradient.indices)
        return tf.IndexedSlices(values, rows, gradient.dense_shape)

    def update(self) -> None:
        """Assigns the variables that the stages have updated, on all workers of each copy.

        Those of metrics, of which a read adds all workers' values, stay where they were updated.
        """
        pairs = [(stage, v) for stage, each in enumerate(self._plan.traces) for v in each.updated]
        own = dict(zip(map(id, self._trace.updated), self._run.updates, strict=True))
        added = [v for v in self._trace.updated if v.synchronization == "on_read"]
        for variable, before in zip(added, keras_compat.values_of(added)):
            variable.assign(tf.where(self._is_padding, before, own[id(variable)]))
        current_replica_batch().of_stages += added
        pairs = [(stage, v) for stage, v in pairs if v.synchronization != "on_read"]
        # In the variables' own dtypes: those that a call casts to have other sizes.
        now = keras_compat.values_of(variable for _, variable in pairs)
        values = [
            own[id(variable)] if stage == self._me else value
            for (stage, variable), value in zip(pairs, now)
        ]
        received = list(values)
        for first in range(0, topology.num_workers(self._strategy), self._number):
            sources = [first + stage for stage, _ in pairs]
            for place, value in owners.from_owners(self._strategy, values, sources):
                if first == self._first_worker:
                    received[place] = value
        for (_, variable), value in zip(pairs, received):
            variable.assign(value)

    def _send(self, flat, stage):
        return self._mpi.send(flat, self._first_worker + stage)

    def _receive(self, specs, stage):
        return self._mpi.receive_sent(specs, self._first_worker + stage)

    def _collect(self, mine, stage, specs) -> list[tf.Tensor]:
        """Collects the rows of all stages' workers on one of them, in the order of stages.

        Args:
            mine: This worker's tensors.
            stage: The number of the stage whose worker receives them.
            specs: Their specs, on that worker; None on the others.
        """
        own = [each[: self._num_rows] for each in mine]
        if specs is None:
            self._send(own, stage)
            return []
        parts = [
            own if other == stage else self._receive(specs, other) for other in range(self._number)
        ]
        return concat_rows(parts)

    def _spread(self, flat, stage, specs, at_least) -> list[tf.Tensor]:
        """Returns this worker's rows of tensors that the worker of one stage has.

        Args:
            flat: The tensors, on that worker.
            stage: The number of its stage.
            specs: Their specs.
            at_least: How many rows a worker receives at least.
        """
        if self._me != stage:
            return self._receive(specs, stage)
        mine = None
        for other in range(self._number):
            begin = tf.minimum(self._ends[other] - self._counts[other], self._total - at_least)
            end = tf.maximum(self._ends[other], begin + at_least)
            part = [tensor[begin:end] for tensor in flat]
            if other == self._me:
                mine = part
            else:
                self._send(part, other)
        return mine


def _is_placed(weight):
    return getattr(weight, "stages", None) is not None


def _add_zero_rows(rows, number):
    return tf.concat([rows, tf.zeros([number, *rows.shape[1:]], rows.dtype)], axis=0)
