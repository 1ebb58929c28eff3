"""Stages on the workers of a cluster."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.parallel import schedule
from tfmulti.parallel.staged_call import StagedCall, differentiated_once, spread_over
from tfmulti.parallel.stages import weights_of
from tfmulti.step import current_replica_batch, parameters


class WorkerStages(StagedCall):
    """A model's call as a pass through stages, of which each worker has one."""

    def install(self) -> None:
        """Gives each weight to the worker of its stage, and takes the place of the call."""
        worker = topology.worker_index(self._strategy)
        self._planned = functools.partial(
            schedule.WorkerPlan, strategy=self._strategy, worker=worker
        )
        super().install()
        count = {}
        for stage in self._stages:
            for weight in stage.weights:
                count.setdefault(id(weight), [weight, 0])[1] += 1
        self._weights = [(weight, number > 1) for weight, number in count.values()]
        is_whole = len(self._stages) == topology.num_workers(self._strategy)
        if self._num_micro_batches == 1 and is_whole:
            for layer in keras_compat.all_layers(self._model):
                marks.SEES_BATCH.set(layer, True)

    def _place(self):
        sharded = parameters.of_strategy(self._strategy)
        for stage, part in enumerate(self._cut.parts):
            for weight in weights_of(part.model):
                if getattr(weight, "stages", None) is None:
                    sharded.place(weight, stage, len(self._cut.parts))

    def _is_step(self):
        return parameters.in_replica() and current_replica_batch() is not None

    def _passed(self, plan, before, flat):
        weights = [
            parameters.gather(each, each.held(), for_stages=True) if is_shared else each.held()
            for each, is_shared in self._weights
        ]
        batch, number = current_replica_batch(), len(flat)
        num_rows = tf.where(batch.num_real > 0, tf.shape(flat[0])[0], 0)
        wants_inputs = keras_compat.is_recorded(before.floats(flat))
        places = {id(each): place for place, (each, _) in enumerate(self._weights)}
        mine = [places[id(each)] for each in self._stages[plan.me].weights]
        one = None

        @tf.custom_gradient
        def compute(*tensors):
            nonlocal one
            tensors = [tf.stop_gradient(each) for each in tensors]
            own = [tensors[number + place] for place in mine]
            one = schedule.Pass(plan, num_rows, wants_inputs)
            results = one.forward(tensors[:number], own)

            def gradient(*upstream):
                upstream = [tf.convert_to_tensor(each) for each in plan.outputs.floats(upstream)]
                of_inputs, of_weights = one.backward(upstream)
                of_inputs = differentiated_once(of_inputs, [*flat, *weights])
                of_weights = dict(zip(mine, of_weights))
                own = [place for place in of_weights if not self._weights[place][1]]
                added = one.of_copies([of_weights[place] for place in own])
                of_weights.update(zip(own, added))
                of_inputs = spread_over(before, of_inputs, wants_inputs)
                return [*of_inputs, *self._of_weights(plan, of_weights)]

            return results, gradient

        results = compute(*flat, *weights)
        schedule.updated_everywhere(plan, one)
        return results

    def _of_weights(self, plan, gradients):
        for place, (weight, is_shared) in enumerate(self._weights):
            own = gradients.get(place)
            if not is_shared:
                yield schedule.whole_or_held(plan, weight, own)
            else:
                yield tf.zeros(weight.shape, weight.dtype) if own is None else own
