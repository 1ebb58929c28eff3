"""Runs a model's steps on the workers of parameter servers; the chief applies their gradients.

A worker reads the weights from the servers, runs `train_step` up to the optimizer, and answers with
the gradients and with the changes of other state. It writes nothing, so another worker can repeat a
step that a lost worker had begun. The chief applies the answers one after the other, so no update
is lost between a read and a write, and each counts once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel import partitioned, step_checks
from tfmulti.parallel.answers import Answer, plain
from tfmulti.parallel.step_logs import StepLogs, counting_as
from tfmulti.runtime.scoped import with_attributes
from tfmulti.step import model_contents
from tfmulti.step import rows as rows_lib
from tfmulti.verification import messages

# Distances between the seeds of two steps, and of two parts of a step, so that their random numbers
# differ.
_DRAWS_OF_STEP, _DRAWS_OF_PART = 4096, 1_000_003


class RemoteStep:
    """The steps of one model.

    Args:
        model: A compiled model, built in the scope of the strategy.
        element_spec: The spec of a batch.
        test_spec: The spec of a batch for evaluation, which may lack sample weights.
        who: Function that returns, within a step, the worker's number and process id.

    Attributes:
        is_random: Whether `compute_here` draws random numbers that differ each time.

    Raises:
        ValueError: When it computes a step, if parameter servers do not support the model's step.
    """

    def __init__(self, model: keras.Model, element_spec, test_spec, who: Callable):
        self.model, self._who, self.is_random = model, who, False
        with model.distribute_strategy.scope():
            self._updates = tf.Variable(0, trainable=False, dtype=tf.int64, name="tfmulti_updates")
        self._metrics = list(model.metrics_variables)
        self._find_variables()
        # The following are known once a step is traced.
        self._variables: list[keras.Variable] = []
        self._sparse: list[bool] = []
        self._changed: dict[str, list[keras.Variable]] = {}
        self._lost: dict[str, list[keras.Variable]] = {}
        self._logs = {kind: StepLogs(model) for kind in ("train", "test")}
        is_scaling = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        self._scale = model.optimizer.dynamic_scale if is_scaling else None
        self.first_metrics = self._reset_metrics()
        number, state = tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.int64)
        numbers = [number, number, state, tf.TensorSpec([], tf.float64)]
        self._train = tf.function(self._train_on, input_signature=[element_spec, *numbers])
        self._test = tf.function(self._test_on, input_signature=[test_spec, number, state])
        self._apply = tf.function(self._apply_now, reduce_retracing=True)
        self._results = tf.function(self._results_of)
        begin = [tf.TensorSpec(each.shape, each.dtype) for each in self.first_metrics]
        # As on workers, which know no number of rows: Keras then counts some losses otherwise.
        signature = [element_spec, *numbers, begin]
        self._here = tf.function(self._compute_alike, input_signature=signature)

    def _find_variables(self) -> None:
        states = self.model.non_trainable_variables
        self._seeds = [v for v in states if keras_compat.is_seed_state(v)]
        self._states = [v for v in states if not keras_compat.is_seed_state(v)]
        self._weights = list(self.model.trainable_variables)

    def schedule(
        self, coordinator, batch, step: int, part: int = 0, share: float = 1.0
    ) -> Callable[[], Answer]:
        """Sends a step to a worker; returns a function that waits for its answer.

        Args:
            coordinator: The strategy's coordinator.
            batch: The rows.
            step: The number of the step since training began, from 0.
            part: The number of this part of the step's batch.
            share: The part's share of the batch's rows.
        """
        remote = coordinator.schedule(self._train, args=(batch, *_numbers(step, part, share)))
        return lambda: self._answer(remote.fetch())

    def check_train(self) -> None:
        """Traces the training step, as it is done anyway before it is first computed.

        Raises:
            ValueError: If it changes what the chief cannot update by the answers of workers.
        """
        with self.model.distribute_strategy.scope():
            traced = self._train.get_concrete_function()
            changed = set(map(id, self._changed["train"]))
            fixed = [v for v in self._states if id(v) not in changed]
            tables = set(map(id, partitioned.tables_of(self.model)))
            if any(id(v) in tables for v in fixed):
                # Only now it is known that they may be read as weights are, row by row.
                self._weights, self._states = [*self._weights, *fixed], self._changed["train"]
                signature = self._train.input_signature
                self._train = tf.function(self._train_on, input_signature=signature)
                traced = self._train.get_concrete_function()
        step_checks.refuse_writes("train_step", self._lost["train"], traced)
        step_checks.refuse_infinite(self._changed["train"])

    def trace_again(self) -> None:
        """Traces the training step again, for code that reads what a callback has changed.

        Call it when no step is under way.
        """
        # A callback may have frozen layers, or the reverse.
        self._find_variables()
        self._train = tf.function(self._train_on, input_signature=self._train.input_signature)
        self._apply = tf.function(self._apply_now, reduce_retracing=True)
        self._results = tf.function(self._results_of)
        self.check_train()

    def check_test(self, name: str) -> None:
        """Traces the evaluation step, as it is done anyway before it is first computed.

        Args:
            name: The argument that gave the data.

        Raises:
            ValueError: If the model cannot be evaluated on such data.
        """
        try:
            with self.model.distribute_strategy.scope():
                traced = self._test.get_concrete_function()
        except Exception as error:
            spec, *_ = self._test.input_signature
            raise ValueError(
                f"`{name}` must be what the model's `test_step` takes. Received: {spec}, with "
                f"which it fails: {messages.shorten(error)}. Give inputs and labels as for "
                "training."
            ) from error
        step_checks.refuse_writes("test_step", self._lost["test"], traced)

    def schedule_test(self, coordinator, batch, step: int) -> Callable[[], tuple]:
        """Sends an evaluation step; returns a function that waits for the metrics' states and logs.

        Args:
            coordinator: The strategy's coordinator.
            batch: The rows.
            step: The number of the step in this evaluation, from 0.
        """
        number, _, state, _ = _numbers(step, 0)
        remote = coordinator.schedule(self._test, args=(batch, number, state))
        return lambda: remote.fetch()

    def compute_here(
        self, batch, metrics: Sequence[np.ndarray] | None = None, share: float = 1.0
    ) -> Answer:
        """Computes the first step of training in this process, and changes nothing.

        All rows draw the same random numbers, so that parts of a batch can be compared with it.

        Args:
            batch: The rows.
            metrics: The metrics' states before the step; None for those of an epoch's beginning.
            share: Which share of the step's batch the rows are.
        """
        begin = self.first_metrics if metrics is None else metrics
        begin = [tf.convert_to_tensor(each) for each in begin]
        here = self._here(batch, *_numbers(0, 0, share), begin)
        computed = tf.nest.map_structure(lambda x: x.numpy(), here)
        return self._answer((0, (0, 0), rows_lib.num_rows(batch), *computed))

    def name_of(self, gradient: int) -> str:
        """Returns the path of the weight to which a gradient belongs, by the gradient's place."""
        return self._variables[gradient].path

    def name_of_state(self, change: int) -> str:
        """Returns the path of the state to which a change belongs, by the change's place."""
        return self._changed["here"][change].path

    def apply(self, gradients: Sequence, changes: Sequence[np.ndarray]) -> None:
        """Updates the weights with gradients, and adds the changes of other state."""
        given = [
            tuple(map(tf.convert_to_tensor, grad))
            if isinstance(grad, tuple)
            else tf.convert_to_tensor(grad)
            for grad in gradients
            if grad is not None
        ]
        self._apply(given, [tf.convert_to_tensor(change) for change in changes])

    def results(self, metrics: Sequence[np.ndarray], kind: str = "train") -> dict[str, float]:
        """Returns the metrics by name, from their states, as far as the step returns them.

        Args:
            metrics: The states.
            kind: `"train"` or `"test"`, the step.
        """
        results = self._results([tf.convert_to_tensor(metric) for metric in metrics], kind)
        return {name: plain(value) for name, value in results.items()}

    def advance_seeds(self, steps: int) -> None:
        """Sets the generators to what no step of this training has drawn, as `fit` leaves them."""
        for variable in [*self._seeds, keras_compat.global_seed()]:
            drawn = tf.constant([0, steps * _DRAWS_OF_STEP], tf.int64)
            variable.assign_add(tf.cast(drawn, variable.dtype))

    def put_metrics(self, metrics: Sequence[np.ndarray]) -> None:
        """Sets the model's own metrics, which callbacks read after an epoch."""
        for variable, value in zip(self._metrics, metrics):
            variable.assign(value)

    def _answer(self, fetched) -> Answer:
        updates, who, rows, present, changes, metrics, logs = fetched
        present = iter(present)
        gradients = [None if sparse is None else next(present) for sparse in self._sparse]
        return Answer(
            int(updates), int(who[0]), int(who[1]), int(rows), gradients, changes, metrics, logs
        )

    def _train_on(self, batch, step, part, drawn, share):
        updates = self._updates.read_value()
        with tf.control_dependencies([updates]):
            who = self._who()
            begin = map(tf.constant, self.first_metrics)
            computed = self._compute("train", batch, step, part, drawn, share, begin)
        return updates, who, rows_lib.num_rows(batch), *computed

    def _compute(self, kind, batch, step, part, drawn, share, metrics):
        seeds = self._seeds_of(step, part, drawn)
        before = [tf.identity(v.value) for v in self._states]
        state = [*seeds, *zip(self._states, before), *zip(self._metrics, metrics)]
        if self._scale is not None:
            # It is read twice, and an update may come in between.
            state.append((self._scale, tf.identity(self._scale.value)))
        with keras_compat.RecordingScope(state) as scope:
            _let_read(scope, self._weights)
            first = keras_compat.reading_kernels_first()
            with first, self._logs["train"].noting_results(), counting_as(share):
                gradients, logs = self._run_step(batch)
            logs = self._logs["train"].others(scope, logs)
            after = [_value_in(scope, v) for v in self._states]
            metrics = [_value_in(scope, v) for v in self._metrics]
        self._lost["train"] = step_checks.updated_besides(scope, seeds, self._states, self._metrics)
        # Of the others nothing is sent: they may be large, or not finite.
        states = zip(self._states, after, before)
        changed = [(v, _change(*values)) for v, *values in states if id(v) in scope.updated]
        self._changed[kind] = [v for v, _ in changed]
        return gradients, [change for _, change in changed], metrics, logs

    def _compute_alike(self, batch, step, part, drawn, share, metrics):
        with keras_compat.fixed_random_numbers(lambda: (0, 1)) as draws:
            computed = self._compute("here", batch, step, part, drawn, share, metrics)
        self.is_random = bool(draws.not_replaced)
        return computed

    def _seeds_of(self, step, part, drawn) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the generators' states for a step, so that a repeated one draws the same."""
        states = [(v, v.value.read_value()) for v in self._seeds]
        states.append((keras_compat.global_seed(), drawn))
        offset = tf.stack([part * _DRAWS_OF_PART, step * _DRAWS_OF_STEP])
        return [(v, tf.cast(state, v.dtype) + tf.cast(offset, v.dtype)) for v, state in states]

    def _run_step(self, batch) -> tuple[list, dict]:
        """Runs `train_step`; returns the gradients that it gives to the optimizer, and its logs."""
        applied: list = []

        def take(optimizer, grads, trainable_variables=None):
            variables = list(trainable_variables or self.model.trainable_variables)
            # The chief's optimizer divides by the scale that it has at the update.
            scaled = self._scaled(grads, variables, lambda scale: 1 / scale)
            applied.append((optimizer, scaled, variables))

        with contextlib.ExitStack() as stack:
            # All that it could call, such as that of a compiled model within this one.
            for optimizer in model_contents.optimizers_of(self.model):
                apply = functools.partial(take, optimizer)
                stack.enter_context(with_attributes(optimizer, apply=apply))
            logs = self.model.train_step(batch)
        if [optimizer for optimizer, *_ in applied] != [self.model.optimizer]:
            calls = [f"`apply` of {optimizer.name}" for optimizer, *_ in applied]
            raise ValueError(
                "With parameter servers, a `train_step` must call `apply` of the optimizer of "
                f"`compile`, {self.model.optimizer.name}, once, and no other. Received: "
                f"{', '.join(calls) or 'no call'}. Use one optimizer and one update in a step, or "
                "the strategy multi_worker."
            )
        _, gradients, self._variables = applied[0]
        self._sparse = [None if g is None else isinstance(g, tf.IndexedSlices) for g in gradients]
        gradients = [
            (g.values, g.indices) if isinstance(g, tf.IndexedSlices) else g
            for g in gradients
            if g is not None
        ]
        return gradients, logs

    def _scaled(self, gradients, variables, factor: Callable) -> list:
        """Multiplies gradients by a function of the loss scale, if there is one."""
        if self._scale is None:
            return list(gradients)
        factor = factor(tf.convert_to_tensor(self._scale.value))
        # Such a gradient is its variable's next value.
        return [
            g if g is None or v.overwrite_with_gradient else _times(g, factor)
            for g, v in zip(gradients, variables)
        ]

    def _test_on(self, batch, step, drawn):
        seeds = self._seeds_of(step, tf.zeros_like(step), drawn)
        metrics = zip(self._metrics, map(tf.constant, self.first_metrics))
        with keras_compat.RecordingScope([*seeds, *metrics]) as scope:
            _let_read(scope, [*self._weights, *self._states])
            with keras_compat.reading_kernels_first(), self._logs["test"].noting_results():
                logs = self.model.test_step(batch)
            logs = self._logs["test"].others(scope, logs)
            states = [_value_in(scope, v) for v in self._metrics]
        known = self._weights, self._states, self._metrics
        self._lost["test"] = step_checks.updated_besides(scope, seeds, *known)
        return states, logs

    def _apply_now(self, gradients, changes):
        present = iter(gradients)
        gradients = []
        for sparse, variable in zip(self._sparse, self._variables):
            each = None if sparse is None else next(present)
            # `tf.shape` would read the variable: a copy of a whole table in each step.
            shape = tf.constant(list(variable.shape), tf.int32)
            gradients.append(tf.IndexedSlices(*each, shape) if sparse else each)
        gradients = self._scaled(gradients, self._variables, lambda scale: scale)
        self.model.optimizer.apply(gradients, self._variables)
        for variable, change in zip(self._changed["train"], changes):
            if variable.dtype == "bool":
                variable.value.assign(change)
            else:
                variable.value.assign_add(change)
        self._updates.assign_add(1)

    def _results_of(self, metrics, kind):
        with keras.StatelessScope(state_mapping=list(zip(self._metrics, metrics))):
            return self._logs[kind].results()

    def _reset_metrics(self) -> list[np.ndarray]:
        with keras.StatelessScope() as scope:
            self.model.reset_metrics()
            values = [_value_in(scope, v) for v in self._metrics]
        return [np.asarray(keras.ops.convert_to_numpy(value)) for value in values]


def _numbers(step, part, share=1.0) -> tuple[tf.Tensor, ...]:
    """Returns a step's numbers, the state of Keras's seed, and the part's share of the rows.

    Keras's seed is a variable of the chief's, which workers do not read.
    """
    numbers = (step, part, keras_compat.global_seed_state())
    return *(tf.constant(each, tf.int64) for each in numbers), tf.constant(share, tf.float64)


def _let_read(scope, variables) -> None:
    """Lets Keras read variables directly in a stateless scope.

    A tape must see the reads, and a table must not be read whole, so the scope gets the variables
    and not their values.
    """
    scope.state_mapping.update({id(variable): variable.value for variable in variables})


def _times(gradient, factor):
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _value_in(scope, variable) -> tf.Tensor:
    value = scope.get_current_value(variable)
    return tf.convert_to_tensor(variable.value if value is None else value)


def _change(new, old) -> tf.Tensor:
    return new if new.dtype == tf.bool else new - old
