"""Runs a step both ways from the same state, and finds differences beyond rounding."""

from __future__ import annotations

import dataclasses
import functools
import time

import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.verification import messages, views
from tfmulti.verification.case import TRAIN, Case
from tfmulti.verification.compared_numbers import find_compared_numbers
from tfmulti.verification.comparison import (
    Comparison,
    FailsHere,
    NothingChanges,
    NotVerified,
    Outcome,
    Rounding,
    finite_values,
    with_moved_weights,
)
from tfmulti.verification.custom_parts import coarsest_dtype
from tfmulti.verification.differences import CLOSE, Difference, same_bits
from tfmulti.verification.explanation import Clues
from tfmulti.verification.graph_search import find_repeated_noise, find_shared_objects
from tfmulti.verification.later_state import reads_scalar, vary_state
from tfmulti.verification.origin import find_origin
from tfmulti.verification.python_values import Containers, Numbers, restored
from tfmulti.verification.runs import Distributed, trace_both
from tfmulti.verification.state import OPTIMIZER, TRAINABLE, End, State
from tfmulti.verification.views import PLAIN, View

# How long one step on many rows may take; it also bounds the memory that they need.
_MOST_SECONDS = 2.0
# How often the time of a few rows is measured before fewer than the many rows are run.
_TIMES = 3
# How long one device may compute other moments of the training; the replicas need as long again.
_SECONDS_OF_MOMENTS, _LEAST_MOMENTS = 0.5, 4
_RANDOM_NUMBERS = (
    "random: from the same state and rows it gives another result each time, by random numbers "
    "that cannot be fixed or by state that is in no variable, such as a list or a global number"
)
_NOTHING_TO_VARY = "there is nothing to vary"
_NO_NUMBERS = "the result on one device is not finite"
_NOTHING_CHANGES = "no weight changes in its first steps, for example with a learning rate of 0"


class Trial:
    """Compares one step of a model on one device and on the replicas.

    Args:
        case: The step to verify.
        workers: The `Workers`.

    Attributes:
        distributed: The step as the replicas compute it.
        clues: What is known of the differences, after some were found.
        synthetic_values: The synthetic values of the latest view, in words.
        counts: The number of rows of each part, for each step of the latest view.
        random: Why no comparison proves anything, if the step gives another result each time.
        settings: Handles and values of small variables that the step reads and leaves.
        outside: Names of variables that the step changes and that have no copy for each replica.
        shared: Where the step changes a table, a queue or an iterator; then nothing is run.
        attributes: Names of Python numbers that a step changes which runs eagerly.
        containers: Names of lists and other containers that such a step changes.
    """

    def __init__(self, case: Case, workers):
        self._case = case
        self._agree = functools.partial(workers.agree, case.strategy)
        self._all_fail = functools.partial(workers.all_fail, case.strategy)
        self._examples = case.examples()
        self.distributed, self._reference = trace_both(case, self._examples[0])
        self._functions = (
            [] if case.eager else [self.distributed.function, self._reference.function]
        )
        self.shared: list[str] = []
        if self._functions:
            number = topology.num_local_replicas(case.strategy)
            self.shared = find_shared_objects(self.distributed.function.graph, number)
        self.clues = Clues()
        self.outside: list[str] = []
        self.settings: list[tuple[tf.Tensor, np.ndarray]] = []
        self.synthetic_values = self.random = ""
        self.counts = case.sizes()
        self._seconds, self._enlarged, self._has_shown_nothing = 0.0, 1.0, False
        self.attributes: list[str] = []
        self.containers: list[str] = []
        self._original = self._at_begin = None
        self._comparison: Comparison | None = None
        # The values that are finite after the step on one device with unchanged rows.
        self._is_known: set = set()
        self._compute = coarsest_dtype(case.model)
        self._close = CLOSE.get(self._compute, CLOSE["float32"])

    @functools.cached_property
    def _state(self) -> State:
        return State(self._case.model, self._functions, [self.distributed.salt])

    def differences(self, view: View = PLAIN) -> list[Difference]:
        """Returns the differences from one device, the first one first.

        All state is restored in every case.

        Args:
            view: The variation of rows and state.

        Raises:
            NotVerified: If the result on one device is not reproducible, no weight changes, or
                the variation has no effect or gives no finite result.
        """
        if self.shared:
            return []
        examples = self._examples if view.is_plain else [self._varied(view)]
        original = self._originally()
        self._enlarged = views.ENLARGED if views.OUTLIERS in view.ways else 1.0
        try:
            begin = self._begin(original, view)
            expected = self._expect(begin, examples, view)
            found = self._distribute(begin, examples)
            if self.attributes:
                return []
            if view.is_plain:
                self._is_known = finite_values(expected[0])
                self.settings = self._state.unchanged_settings(
                    self._functions, begin, expected[0][1]
                )
                ends = expected[-1][1], found[-1][1]
                self.outside = self._state.changed_outside(begin, ends)
            if self.outside:
                return []
            if not self._is_on_any(self._compare(begin, expected, found, None)):
                self._look_for_changes(begin, expected)
                return []
            if self._is_on_any(self._is_random(begin, expected, examples)):
                self.random = _RANDOM_NUMBERS
                raise NotVerified(_RANDOM_NUMBERS)
            differences = self._beyond_rounding(begin, expected, found, examples)
            if self._is_on_any(differences):
                self.clues.containers = self.containers
                self.clues.growth = self._measure_growth(begin, expected, examples)
                if self._functions:
                    graph = self._reference.function.graph
                    self.clues.repeated_noise = find_repeated_noise(graph)
                self._state.write(begin)
                last = differences[0].step if differences else len(examples)
                self.clues.origin = find_origin(
                    self._case, self._state, examples[:last], self._close
                )
            return differences
        finally:
            self._state.write(original)

    def begin_again(self) -> None:
        """Takes the case's rows, and the state as it is now; lets go of what was read before."""
        self._examples = self._case.examples()
        self._original = self._at_begin = self._comparison = None
        self.__dict__.pop("_state", None)
        self.clues, self.outside, self.attributes = Clues(), [], []

    def _varied(self, view) -> list:
        """Returns the rows of a view: one step suffices, and halves the reads of state."""
        rows = self._case.rows
        if views.MANY in view.ways:
            number = self._affordable(rows.num_many)
            self.synthetic_values, self.counts = "", [[number] * len(rows.counts)]
            return rows.some_of_many(number)
        self.counts = self._case.sizes()
        parts, used = views.vary_rows(rows, self._examples[0], view)
        if not view.varies_state and not used:
            raise NotVerified(_NOTHING_TO_VARY)
        self.synthetic_values = str(dataclasses.replace(view, ways=used))
        return parts

    def _affordable(self, number: int) -> int:
        """Returns how many rows to run, so that a step on one device takes two seconds at most."""
        few = max(self._case.sizes()[0])
        if number <= few or self._case.is_traced_static:
            raise NotVerified(_NOTHING_TO_VARY)
        if not self._agree(not self._has_shown_nothing):
            # A step that needs more rows than a few, as one that cuts off the first eight.
            return number
        seconds = float("inf")
        # The first run took longer: TensorFlow prepared the graph. A busy machine delays others.
        for _ in range(_TIMES):
            self._steps(self._reference, self._originally(), self._examples[:1])
            self._state.write(self._originally())
            seconds = min(seconds, self._seconds)
            if self._agree(seconds * number / few <= _MOST_SECONDS):
                return number
        while number > few and not self._agree(seconds * number / few <= _MOST_SECONDS):
            number //= 2
        if number <= few:
            raise NotVerified(_NOTHING_TO_VARY)
        return number

    def _is_on_any(self, found) -> bool:
        """Whether something was found; where workers have values of their own, on any of them."""
        return not self._agree(not found) if self._state.is_sharded else bool(found)

    def drifting(self) -> tuple[str, list[End], float]:
        """Runs a step in which each replica draws random numbers of its own.

        Returns:
            The name of a trained variable that replicas then hold differently, or "", those of
            the first local replica, to compare with other workers', and the fraction of a change
            that is rounding.
        """
        original = self._originally()
        ends, drifted, step = [], "", self.distributed
        if self._case.is_replicated:
            # Keras draws the same numbers on every replica there, and TensorFlow does not.
            step = Distributed(self._case, self._examples[0], draws_freely=True)
        try:
            begin = self._begin(original, PLAIN)
            for salt in step.salts():
                with step.drawing_apart(salt):
                    values = self._steps(step, begin, self._examples[:1])[0][1]
                name = self._state.find_drift(begin, values, ends, self._close)
                drifted = drifted or name
        finally:
            self._state.write(original)
        return drifted, ends, self._close

    @property
    def tests_numbers(self) -> bool:
        """Whether the step tests numbers for NaN or infinity, as one that runs eagerly may."""
        is_eager = self._case.eager
        return is_eager or bool(self._operations & {"IsFinite", "IsInf", "IsNan"})

    @property
    def compared_numbers(self) -> list[float]:
        """Numbers that the step compares with; none if it runs eagerly."""
        return find_compared_numbers(self._reference.function.graph) if self._functions else []

    @property
    def num_moments(self) -> int:
        """How many moments of the training to try in the time that there is for them."""
        if not self._functions or not reads_scalar(self._reference.function.graph):
            return 0
        return int(max(_LEAST_MOMENTS, min(views.NUM_MOMENTS, _SECONDS_OF_MOMENTS / self._seconds)))

    @property
    def calls_python(self) -> bool:
        """Whether a traced step calls Python functions of the user."""
        if not self._functions:
            return True
        operations = keras_compat.operations_of(self._reference.function)
        return any("PyFunc" in kind for kind in operations)

    @property
    def may_fail(self) -> bool:
        """Whether workers are together again after a step that failed on all of them.

        A worker that fails before it has sent state that others need leaves them waiting for ever.
        """
        return not self._state.is_sharded

    @functools.cached_property
    def _operations(self) -> set[str]:
        return set().union(*(keras_compat.operations_of(each) for each in self._functions))

    def _originally(self):
        if self._original is None:
            self._original = self._state.read()
        return self._original

    def _begin(self, original, view):
        """Returns the initial state; it is read once, since every comparison restores it."""
        if self._at_begin is None:
            self._case.model.reset_metrics()
            self._at_begin = self._state.with_sums_of_zero(self._state.read())
            kind = self._case.kind
            self._comparison = Comparison(kind, self._state, self._at_begin, self._close)
        if not view.varies_state:
            return self._at_begin
        begin = vary_state(self._state, self._at_begin, self._case, self._functions, view)
        if not self._is_on_any(any(a is not b for a, b in zip(begin, self._at_begin))):
            raise NotVerified(_NOTHING_TO_VARY)
        return begin

    def _expect(self, begin, examples, view):
        """Returns the result of one device, on all workers or on none."""
        expected, reason, failure = None, _NO_NUMBERS, None
        try:
            expected = self._steps(self._reference, begin, examples)
        except Exception as error:
            reason, failure = f"{type(error).__name__} with synthetic values", error
        if view.is_plain:
            if not self._agree(failure is None):
                raise failure or NotVerified("another worker could not run it")
            return expected
        known = self._is_known
        if set(views.SPOILED) & set(view.ways):
            # A step that skips such rows keeps its weights finite; its logs may be NaN.
            known = {i for i, p in enumerate(self._state.parts) if p.kind == TRAINABLE} & known
        usable = expected is not None and known <= finite_values(expected[0])
        if not self._agree(usable):
            raise NotVerified(reason)
        return expected

    def _distribute(self, begin, examples) -> list:
        """Runs the steps on all replicas, and notes the Python numbers that they change."""
        try:
            return self._steps(self.distributed, begin, examples)
        except FailsHere:
            raise
        except Exception:
            # Replicas that count together do not do the same.
            if not self.attributes:
                raise
            return []

    def _steps(self, run, begin, examples) -> list[tuple[Outcome, list[np.ndarray]]]:
        self._state.write(begin)
        done = []
        # A step that runs eagerly changes them each time, another one only while it is traced.
        model = self._case.model if self._case.eager else None
        with restored(Numbers(model)) as numbers, restored(Containers(model)) as containers:
            try:
                for parts in examples:
                    done.append(self._step(run, parts))
            finally:
                if run is self.distributed:
                    self.containers = self.containers or containers.changed()
                    if topology.num_local_replicas(self._case.strategy) > 1:
                        self.attributes = self.attributes or numbers.changed()
        return done

    def _step(self, run, parts) -> tuple[Outcome, list[np.ndarray]]:
        begin = time.perf_counter()
        try:
            outcome = run(parts)
        except Exception as error:
            waits = run is self.distributed or self._state.is_sharded
            if waits and not self._all_fail():
                raise FailsHere(
                    messages.describe_failure(self._case, messages.shorten(error))
                ) from error
            raise
        values = self._state.read()
        if run is self._reference:
            self._seconds = time.perf_counter() - begin
            values = self._state.as_on_first_replica(values)
        return outcome, values

    def _compare(self, begin, expected, found, noise) -> list[Difference]:
        self._comparison.is_synthetic = bool(self.synthetic_values)
        self._comparison.enlarged = self._enlarged
        return self._comparison.differences(begin, expected, found, noise)

    def _beyond_rounding(self, begin, expected, found, examples) -> list[Difference]:
        rounding = Rounding(
            functools.partial(with_moved_weights, self._state.parts, begin, dtype=self._compute),
            lambda start: self._steps(self._reference, start, examples),
            lambda start: self._distribute(start, examples),
            self._compare,
            self._is_on_any,
        )
        if self._case.num_later:
            return rounding.differences_that_last(begin, expected, found)
        return rounding.differences(begin, expected, found)

    def _look_for_changes(self, begin, expected):
        """Raises `NothingChanges` if nothing changed: a learning rate of 0 hides all gradients."""
        last, parts = expected[-1][1], self._state.parts
        kinds = (TRAINABLE, OPTIMIZER)
        learned = [i for i, p in enumerate(parts) if p.kind in kinds and begin[i].ndim]
        changed = not all(same_bits(begin[i], last[i]) for i in learned)
        if self._case.kind == TRAIN and learned and not changed:
            self._has_shown_nothing = True
            raise NothingChanges(_NOTHING_CHANGES)

    def _is_random(self, begin, expected, examples) -> bool:
        if self._reference.not_replaced:
            return True
        if self._functions and not self.calls_python:
            return False
        again = self._steps(self._reference, begin, examples)
        return bool(self._compare(begin, expected, again, None))

    def _measure_growth(self, begin, expected, examples) -> dict[str, float]:
        if self._case.is_traced_static:
            return {}
        self._state.write(begin)
        twice = self._reference(self._case.rows.twice(examples[0])).outputs
        once = expected[0][0].outputs
        names = [name for name in once if np.ndim(once[name]) == 0 and once[name]]
        return {name: float(twice[name] / once[name]) for name in names}
