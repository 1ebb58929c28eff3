"""Runs the user's step both ways: whole on one replica, and split into replica batches."""

from __future__ import annotations

import collections
import contextlib
import functools
import random

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.step import accumulation, gradients, model_contents
from tfmulti.step.first_replica import replica_number
from tfmulti.step.rows import count_rows, current_replica_batch, num_rows, replica_range
from tfmulti.verification import rows as rows_lib
from tfmulti.verification.case import PREDICT, TRAIN, Case
from tfmulti.verification.comparison import Outcome, by_name
from tfmulti.verification.graph_search import find_decisions, find_own_noise, find_ratios
from tfmulti.verification.python_values import Numbers, restored

# A gate that is open half of the time is the same on two replicas in every other run.
_NUM_SALTS = 6


class Reference:
    """The step as on one device, computed by the worker's first replica from all rows.

    Args:
        case: The step to verify.
        example: Rows with the structure of those that will be passed.
        without_rows: Numbers of the draws that are known to have no rows.

    Attributes:
        not_replaced: Random operations whose numbers could not be fixed.
        sizes: The first axes of draws, as `Draws.sizes`.
    """

    def __init__(self, case: Case, example: list, without_rows: frozenset = frozenset()):
        self._case, self.not_replaced, self.sizes = case, {}, {}
        self._without_rows = without_rows
        with _as_one_device(case.strategy):
            self.function = _traced(case, self._run, example)

    def __call__(self, parts: list) -> Outcome:
        """Runs it on rows."""
        with _as_one_device(self._case.strategy):
            outputs, metrics = self.function(*parts)
        return Outcome(by_name(outputs), by_name(metrics))

    def _run(self, *parts):
        case = self._case
        step = _step_of(case)

        def whole(data):
            def rows():
                # Which part a number of rows belongs to is unknown: all rows then draw the same.
                return 0, 1 if case.rows.are_unequal else num_rows(data)

            fixed = keras_compat.fixed_random_numbers(rows, self._without_rows)
            with keras_compat.as_first_replica(), fixed as draws:
                outputs = step(data)
            self.not_replaced.update(draws.not_replaced)
            self.sizes.update(draws.sizes)
            return outputs, {} if case.kind == PREDICT else case.model.get_metrics_result()

        # The replica has all rows, so its gradients are those of the whole batch.
        whole = gradients.with_step_state(whole, reduced=True)
        return case.strategy.run(whole, args=(case.rows.pack(parts),))


class Distributed:
    """The step as the replicas compute it together, each on its replica batch.

    Args:
        case: The step to verify.
        example: Rows with the structure of those that will be passed.
        only_build: Whether to trace only until the model and its optimizers are built.
        without_rows: Numbers of the draws that are known to have no rows.
        draws_freely: Whether it draws random numbers as in training.

    Attributes:
        salt: A variable; other than 0, each replica draws random numbers of its own.
        draws: Whether it draws random numbers.
        shuffles: Whether it puts rows in a random order.
        sizes: The first axes of draws, as `Draws.sizes`.
        decisions: Where it decides by one replica's own rows; empty if it runs eagerly.
        ratios: Where it divides by a number of such rows, or the like.
        own_noise: Where random numbers of one replica meet reduced ones; likewise.
    """

    def __init__(
        self,
        case: Case,
        example: list,
        only_build: bool = False,
        without_rows: frozenset = frozenset(),
        draws_freely: bool = False,
    ):
        self._case = case
        self.decisions, self.ratios, self.own_noise = [], [], []
        self._draws_freely = draws_freely
        self._rows: list[list[tf.Tensor]] = []
        self._noise: list[list[tuple[int, tf.Tensor]]] = []
        self.sizes: dict[int, tuple[int, bool]] = {}
        self._without_rows = without_rows
        self.salt = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.draws = self.shuffles = False
        with keras_compat.separate_traces():
            if only_build:
                _trace_built(case, self._run, example, is_done=lambda: is_built(case.model))
            else:
                self.function = _traced(case, self._run, example)
        is_split = case.num_replicas > 1 and not case.is_replicated
        if is_split and not only_build and not case.eager and case.kind != PREDICT:
            # A trace for one number of rows does not tell which numbers belong to a row.
            of_any = not case.is_traced_static
            self.decisions = find_decisions(self.function.graph, self._rows, of_any_size=of_any)
            if of_any:
                self.ratios = find_ratios(self.function.graph, self._rows)
            self.own_noise = find_own_noise(self.function.graph, self._rows, self._noise)
        self._draws_without_rows = any(self._noise)
        self._rows, self._noise = [], []

    def __call__(self, parts: list) -> Outcome:
        """Runs it on rows."""
        case = self._case
        with keras_compat.separate_traces(), keras_compat.without_optimized_graphs():
            outputs = self.function(*parts)
            metrics = {} if case.kind == PREDICT else case.model.get_metrics_result()
            accumulation.settle(case.model, model_contents.optimizers_of(case.model, nested=True))
        return Outcome(by_name(outputs), by_name(metrics))

    def salts(self) -> range:
        """Returns the salts to draw with: single numbers can be equal by chance."""
        return range(1, 1 + (_NUM_SALTS if self._draws_without_rows else 1))

    @contextlib.contextmanager
    def drawing_apart(self, salt: int):
        """Has each replica draw random numbers of its own, as long as this lasts.

        Args:
            salt: Which ones; not 0.
        """
        self.salt.assign(salt)
        try:
            yield
        finally:
            self.salt.assign(0)

    def _run(self, *parts):
        case, strategy = self._case, self._case.strategy
        all_rows = count_rows(parts[0])
        number = strategy.num_replicas_in_sync
        step = _step_of(case)

        self._rows, self._noise = [], []

        def on_replica(data):
            if self._draws_freely:
                return step(data)
            tensors = tf.nest.flatten(data, expand_composites=True)
            self._rows.append([each for each in tensors if each is not None])
            context = tf.distribute.get_replica_context()
            index = topology.replica_batch_index(context)
            start = 0 if case.is_replicated else replica_range(all_rows, number, index)[0]
            salt = self.salt.read_value() * (1 + tf.cast(replica_number(), tf.int64))

            def rows():
                return (0, 1, salt) if case.rows.are_unequal else (start, num_rows(data), salt)

            with keras_compat.fixed_random_numbers(
                rows, self._without_rows, _num_gathered_rows
            ) as draws:
                outputs = step(data)
                self._noise.append(draws.without_rows)
            self.sizes.update(draws.sizes)
            self.draws |= draws.number > 0 or bool(draws.not_replaced)
            self.shuffles |= draws.shuffles
            return outputs

        marks.STEP.set(on_replica, (case.kind, case.model))
        batch = case.rows.pack(parts)
        batches = rows_lib.take_replica_batches(
            strategy,
            batch,
            counted=case.counted,
            padded=case.padded and case.kind != PREDICT,
            in_chunks=case.in_chunks and case.rows.are_unequal,
        )
        outputs = strategy.run(on_replica, args=(batches,))
        reduction = "concat" if case.kind == PREDICT else "auto"
        return keras_compat.reduce_outputs(outputs, strategy, reduction)


def trace_both(case: Case, example: list) -> tuple[Distributed, Reference]:
    """Traces the step on the replicas and on one device.

    A draw that has the same size in both, with different numbers of rows, has no rows: that the
    number of rows divides its size is chance. It is then the same on every replica.

    Args:
        case: The step to verify.
        example: Rows with the structure of those that will be passed.
    """
    # The distributed step comes first, so objects created during the trace are as in training.
    many = Distributed(case, example)
    one = Reference(case, example)
    sizes = [(number, size, many.sizes.get(number)) for number, size in one.sizes.items()]
    by_chance = frozenset(n for n, a, b in sizes if b and a[0] == b[0] and (a[1] or b[1]))
    if case.num_replicas > 1 and by_chance:
        many = Distributed(case, example, without_rows=by_chance)
        one = Reference(case, example, by_chance)
    return many, one


def _num_gathered_rows(drawn: tf.Tensor) -> tf.Tensor | None:
    """Returns the number of rows of the whole batch if random numbers are drawn for these."""
    batch = current_replica_batch()
    if batch is None or not batch.has_gathered_rows(drawn):
        return None
    return tf.shape(batch.gathered[0])[0]


@contextlib.contextmanager
def _as_one_device(strategy):
    with (
        keras_compat.as_one_device(strategy),
        keras_compat.on_first_replica(strategy),
        keras_compat.separate_traces(),
        keras_compat.without_optimized_graphs(),
    ):
        yield


def _step_of(case):
    if case.kind == PREDICT:
        return keras_compat.predict_step_of(case.model)
    return case.model.train_step if case.kind == TRAIN else case.model.test_step


def _traced(case, function, example):
    if case.eager and is_built(case.model):
        return function
    traced = _trace_built(case, function, example)
    return function if case.eager else traced


def is_built(model: keras.Model) -> bool:
    """Whether a model and its optimizers have all their variables."""
    optimizers = model_contents.optimizers_of(model, nested=True)
    return keras_compat.is_built(model) and all(optimizer.built for optimizer in optimizers)


def trace_built(model, function, specs, around, is_done=lambda: False):
    """Traces a function; first builds, in the scope, everything that the trace would build.

    Args:
        model: The model.
        function: A function of tensors, which runs the model's step.
        specs: Their specs.
        around: Function that returns a context manager for each trace.
        is_done: Function that returns whether to stop, before each trace.
    """
    noted: collections.Counter = collections.Counter()
    while not is_done():
        optimizers = model_contents.optimizers_of(model, nested=True)
        noting = keras_compat.noting_unbuilt(optimizers, model, noted)
        # What one trace keeps in an attribute no other trace can read.
        as_before = restored(Numbers(model))
        with around(), as_before, noting as unbuilt:
            run = _ending_at(unbuilt, function)
            traced = tf.function(run).get_concrete_function(*specs)
            if not unbuilt:
                return traced
        # Layers draw seeds for their weights here: the generators are as the user left them.
        with model.distribute_strategy.scope():
            unbuilt[0]()
    return None


def _trace_built(case, function, example, is_done=lambda: False):
    specs = rows_lib.specs_of(example, case.is_traced_static, case.rows.open_axes)
    around = functools.partial(same_random_numbers, case, seed=0)
    return trace_built(case.model, function, specs, around, is_done)


def _ending_at(unbuilt, function):
    """Ends a trace early without an error, so that TensorFlow initializes the variables it made.

    The next trace, which a step begins with `if self.count is None`, would not create them again.
    A function that has created variables is traced twice; what is to be built is known by then.
    """

    @tf.autograph.experimental.do_not_convert
    def run(*parts):
        if unbuilt:
            return None
        with tf.variable_creator_scope(_create_outside):
            try:
                return function(*parts)
            except Exception:
                if not unbuilt:
                    raise
                return None

    return run


def _create_outside(next_creator, **kwargs):
    """Creates, outside of the trace, a variable that a step makes in its first call.

    TensorFlow cannot initialize the copies of a variable of several replicas in a trace.
    """
    value = kwargs.pop("initial_value")
    known = tf.get_static_value(value) if tf.is_tensor(value) else value
    if known is None:
        return next_creator(initial_value=value, **kwargs)
    with tf.init_scope():
        return next_creator(initial_value=known, **kwargs)


@contextlib.contextmanager
def same_random_numbers(case: Case, seed: int | None = None):
    """Restores the random states of TensorFlow, Python and NumPy on exit.

    Those of Python and NumPy are left alone while another thread may draw from them for batches.

    Args:
        case: The step to verify.
        seed: Where Python's and NumPy's begin, since a step may draw from them in its trace.
    """
    with keras_compat.same_eager_numbers():
        if case.is_read_meanwhile:
            yield
            return
        python, numpy = random.getstate(), np.random.get_state()
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
