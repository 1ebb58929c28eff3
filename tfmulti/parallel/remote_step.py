"""Runs a model's steps on the workers of parameter servers; the chief applies their gradients.

A worker reads the weights from the servers, runs `train_step` up to the optimizer, and answers with
the gradients and with the changes of other state. It writes nothing, so another worker can repeat a
step that a lost worker had begun. The chief applies the answers one after the other, so no update
is lost between a read and a write, and each counts once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel import partitioned
from tfmulti.step import model_contents
from tfmulti.step import rows as rows_lib
from tfmulti.verification import messages

# Distances between the seeds of two steps, and of two parts of a step, so that their random numbers
# differ.
_DRAWS_OF_STEP, _DRAWS_OF_PART = 4096, 1_000_003


@dataclasses.dataclass(frozen=True)
class Answer:
    """A worker's answer to a training step, as NumPy arrays.

    Attributes:
        updates: The number of updates that had been made when the worker read the weights.
        worker: The worker's number.
        process: The id of its process, which changes with a restart.
        rows: The number of rows of its batch.
        gradients: For each variable an array, a pair (values, row numbers) for some rows of a
            table, or None.
        changes: By how much each state other than weights has changed.
        metrics: The metrics' states over these rows only.
        logs: The logs of `train_step` that are not metrics, by name.
    """

    updates: int
    worker: int
    process: int
    rows: int
    gradients: list
    changes: list[np.ndarray]
    metrics: list[np.ndarray]
    logs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


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
        seeds = [v for v in model.non_trainable_variables if keras_compat.is_seed_state(v)]
        self._states = [
            v for v in model.non_trainable_variables if not keras_compat.is_seed_state(v)
        ]
        self._seeds, self._metrics = seeds, list(model.metrics_variables)
        self._weights = list(model.trainable_variables)
        self._variables: list[keras.Variable] = []
        self._sparse: list[bool] = []
        self.first_metrics = self._reset_metrics()
        number = tf.TensorSpec([], tf.int64)
        self._train = tf.function(self._train_on, input_signature=[element_spec, number, number])
        self._test = tf.function(self._test_on, input_signature=[test_spec])
        self._apply = tf.function(self._apply_now, reduce_retracing=True)
        self._results = tf.function(self._results_of)
        self._here = None

    def schedule(self, coordinator, batch, step: int, part: int = 0) -> Callable[[], Answer]:
        """Sends a step to a worker; returns a function that waits for its answer.

        Args:
            coordinator: The strategy's coordinator.
            batch: The rows.
            step: The number of the step since training began, from 0.
            part: The number of this part of the step's batch.
        """
        numbers = [tf.constant(each, tf.int64) for each in (step, part)]
        remote = coordinator.schedule(self._train, args=(batch, *numbers))
        return lambda: self._answer(remote.fetch())

    def check_test(self, name: str) -> None:
        """Traces the evaluation step, as it is done anyway before it is first computed.

        Args:
            name: The argument that gave the data.

        Raises:
            ValueError: If the model cannot be evaluated on such data.
        """
        try:
            with self.model.distribute_strategy.scope():
                self._test.get_concrete_function()
        except Exception as error:
            [spec] = self._test.input_signature
            raise ValueError(
                f"`{name}` must be what the model's `test_step` takes. Received: {spec}, with "
                f"which it fails: {messages.shorten(error)}. Give inputs and labels as for "
                "training."
            ) from error

    def schedule_test(self, coordinator, batch) -> Callable[[], list[np.ndarray]]:
        """Sends an evaluation step; returns a function that waits for the metrics' states."""
        remote = coordinator.schedule(self._test, args=(batch,))
        return lambda: remote.fetch()

    def compute_here(self, batch, metrics: Sequence[np.ndarray] | None = None) -> Answer:
        """Computes the first step of training in this process, and changes nothing.

        All rows draw the same random numbers, so that parts of a batch can be compared with it.

        Args:
            batch: The rows.
            metrics: The metrics' states before the step; None for those of an epoch's beginning.
        """
        if self._here is None:
            self._here = tf.function(self._compute_alike, reduce_retracing=True)
        zero = tf.constant(0, tf.int64)
        begin = self.first_metrics if metrics is None else metrics
        here = self._here(batch, zero, zero, [tf.convert_to_tensor(each) for each in begin])
        computed = tf.nest.map_structure(lambda x: x.numpy(), here)
        return self._answer((0, (0, 0), rows_lib.num_rows(batch), *computed))

    def name_of(self, gradient: int) -> str:
        """Returns the path of the weight to which a gradient belongs, by the gradient's place."""
        return self._variables[gradient].path

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

    def results(self, metrics: Sequence[np.ndarray]) -> dict[str, float]:
        """Returns the metrics by name, from their states."""
        results = self._results([tf.convert_to_tensor(metric) for metric in metrics])
        return {name: _plain(value) for name, value in results.items()}

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

    def _train_on(self, batch, step, part):
        updates = self._updates.read_value()
        with tf.control_dependencies([updates]):
            who = self._who()
            computed = self._compute(batch, step, part, map(tf.constant, self.first_metrics))
        return updates, who, rows_lib.num_rows(batch), *computed

    def _compute(self, batch, step, part, metrics):
        seeds = [_seed_of(v, step, part) for v in self._seeds]
        before = [tf.identity(v.value) for v in self._states]
        state = [*zip(self._seeds, seeds), *zip(self._states, before)]
        state += zip(self._metrics, metrics)
        # Without `collect_losses` what layers add to the loss would be dropped.
        with keras.StatelessScope(state_mapping=state, collect_losses=True) as scope:
            weights = _let_read(scope, self._weights)
            gradients, logs = self._run_step(batch)
            after = [_value_in(scope, v) for v in self._states]
            metrics = [_value_in(scope, v) for v in self._metrics]
        self._refuse_other_writes(scope, weights)
        changes = [_change(new, old) for new, old in zip(after, before)]
        return gradients, changes, metrics, logs

    def _compute_alike(self, batch, step, part, metrics):
        with keras_compat.fixed_random_numbers(lambda: (0, 1)) as draws:
            computed = self._compute(batch, step, part, metrics)
        self.is_random = bool(draws.not_replaced)
        return computed

    def _run_step(self, batch) -> tuple[list, dict]:
        """Runs `train_step`; returns the gradients that it gives to the optimizer, and its logs."""
        applied: list = []

        def take(grads, trainable_variables=None):
            variables = trainable_variables or self.model.trainable_variables
            applied.append((list(grads), list(variables)))

        optimizers = model_contents.optimizers_of(self.model)
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(_with_attribute(optimizer, "apply", take))
            logs = self.model.train_step(batch) or {}
        metrics = self.model.get_metrics_result()
        logs = {name: tf.convert_to_tensor(v) for name, v in logs.items() if name not in metrics}
        if len(applied) != 1 or len(optimizers) != 1:
            raise ValueError(
                "With parameter servers, a `train_step` must have one optimizer and call its "
                f"`apply` once. Received: {len(optimizers)} optimizers and {len(applied)} calls of "
                "`apply`. Use one optimizer and one update in a step, or the strategy multi_worker."
            )
        gradients, self._variables = applied[0]
        self._sparse = [None if g is None else isinstance(g, tf.IndexedSlices) for g in gradients]
        gradients = [
            (g.values, g.indices) if isinstance(g, tf.IndexedSlices) else g
            for g in gradients
            if g is not None
        ]
        return gradients, logs

    def _refuse_other_writes(self, scope, weights):
        """Raises ValueError if a step assigns weights itself: these changes would be lost."""
        written = [v for v in self._weights if scope.get_current_value(v) is not weights[id(v)]]
        if written:
            raise ValueError(
                "With parameter servers a `train_step` must change weights by its optimizer only. "
                f"Received: a step that assigns {written[0].path}. Use the strategy multi_worker, "
                "or make that weight non-trainable."
            )

    def _test_on(self, batch):
        metrics = list(zip(self._metrics, map(tf.constant, self.first_metrics)))
        with keras.StatelessScope(state_mapping=metrics, collect_losses=True) as scope:
            _let_read(scope, [*self._weights, *self._states, *self._seeds])
            self.model.test_step(batch)
            return [_value_in(scope, v) for v in self._metrics]

    def _apply_now(self, gradients, changes):
        present = iter(gradients)
        gradients = []
        for sparse, variable in zip(self._sparse, self._variables):
            each = None if sparse is None else next(present)
            # `tf.shape` would read the variable: a copy of a whole table in each step.
            shape = tf.constant(list(variable.shape), tf.int32)
            gradients.append(tf.IndexedSlices(*each, shape) if sparse else each)
        self.model.optimizer.apply(gradients, self._variables)
        for variable, change in zip(self._states, changes):
            if variable.dtype == "bool":
                variable.value.assign(change)
            else:
                variable.value.assign_add(change)
        self._updates.assign_add(1)

    def _results_of(self, metrics):
        with keras.StatelessScope(state_mapping=list(zip(self._metrics, metrics))):
            return self.model.get_metrics_result()

    def _reset_metrics(self) -> list[np.ndarray]:
        with keras.StatelessScope() as scope:
            self.model.reset_metrics()
            values = [_value_in(scope, v) for v in self._metrics]
        return [np.asarray(keras.ops.convert_to_numpy(value)) for value in values]


@contextlib.contextmanager
def _with_attribute(owner, name, value):
    """Gives an object an attribute of its own within the context."""
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


def build(model: keras.Model, batch) -> None:
    """Creates all variables of a compiled model on the servers.

    Raises:
        ValueError: If the model is not compiled with an optimizer, or with one that cannot update
            a table in parts.
    """
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "A model must be compiled with an optimizer before it is trained. "
            f"Received: {model.name!r}, which is not. Call model.compile(optimizer, loss) in the "
            "strategy's scope."
        )
    with model.distribute_strategy.scope():
        keras_compat.build_model(model, batch)
        partitioned.prepare_optimizer(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)


def add_gradients(answers: Sequence[Answer]) -> tuple[list, list[np.ndarray]]:
    """Combines the gradients and changes of a batch's parts into those of the batch.

    Those of each part are means over its rows, and are weighted as in `tfmulti.step.weighting`.
    """
    total = sum(answer.rows for answer in answers)
    weights = [np.float64(answer.rows / total) for answer in answers]
    gradients = [
        _add_gradient(parts, weights) for parts in zip(*(answer.gradients for answer in answers))
    ]
    changes = [
        _weighted_sum(parts, weights) for parts in zip(*(answer.changes for answer in answers))
    ]
    return gradients, changes


def mean_logs(answers: Sequence[Answer]) -> dict[str, float]:
    """Returns the logs of a step that are not metrics: means over its parts, weighted by rows."""
    total = sum(answer.rows for answer in answers)
    return {
        name: _plain(sum(np.asarray(a.logs[name]) * (a.rows / total) for a in answers))
        for name in answers[0].logs
    }


def _add_gradient(parts, weights):
    if parts[0] is None:
        return None
    if isinstance(parts[0], tuple):
        values = [part[0] * part[0].dtype.type(w) for part, w in zip(parts, weights)]
        return np.concatenate(values), np.concatenate([part[1] for part in parts])
    return _weighted_sum(parts, weights)


def _weighted_sum(parts, weights):
    if parts[0].dtype.kind not in "fcV":
        # Counters and flags: the same in each part.
        return parts[0]
    return sum(part * part.dtype.type(w) for part, w in zip(parts, weights))


def _seed_of(variable, step, part) -> tf.Tensor:
    """Returns a generator's state for a step, so that a repeated step draws the same numbers."""
    offset = tf.stack([part * _DRAWS_OF_PART, step * _DRAWS_OF_STEP])
    return variable.value.read_value() + tf.cast(offset, variable.value.dtype)


def _let_read(scope, variables) -> dict[int, tf.Variable]:
    """Lets Keras read variables directly in a stateless scope; returns TensorFlow's by Keras's id.

    A tape must see the reads, and a table must not be read whole, so the scope gets the variables
    and not their values.
    """
    values = {id(variable): variable.value for variable in variables}
    scope.state_mapping.update(values)
    return values


def _value_in(scope, variable) -> tf.Tensor:
    value = scope.get_current_value(variable)
    return tf.convert_to_tensor(variable.value if value is None else value)


def _change(new, old) -> tf.Tensor:
    return new if new.dtype == tf.bool else new - old


def _plain(value):
    value = np.asarray(value)
    return float(value) if value.ndim == 0 else value
