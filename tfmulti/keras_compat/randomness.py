"""Random numbers that do not depend on how a batch is divided among replicas."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator

import tensorflow as tf
from keras.src.backend.common import symbolic_scope
from tensorflow.python.framework import op_def_registry

from tfmulti.keras_compat import seeds
from tfmulti.keras_compat.random_values import REPLACEMENTS, Draw
from tfmulti.keras_compat.replaced_ops import current_replace, replaced_ops
from tfmulti.runtime.scoped import with_attributes

_RANDOM = re.compile(
    r"Random|Shuffle|Sampler$|^Multinomial$|TruncatedNormal|^Stateful(?!Partitioned)|RngBit"
)
# Ops that store or convert seeds, and draw nothing; and gradients, which are deterministic.
_NO_DRAW = re.compile(r"Seed|GetKeyCounter|GetAlg|^Rng|Grad$|Queue|^CudnnRNN|AccidentalHits$")
_SHUFFLES = ("RandomShuffle", "StatelessShuffle")
_SEED_INPUTS = ("seed", "key", "counter")
# Ops that keep or reverse the order of numbers, and the op that sorts.
_SORTING = {"Neg", "Mul", "AddV2", "Cast", "Identity", "TopKV2"}


class Draws:
    """The random draws within `fixed_random_numbers`.

    Attributes:
        number: How many draws were replaced.
        sizes: By the number of a draw in a graph, the size of its first axis, if known, and whether
            that may be the axis of rows.
        without_rows: Number and tensor of each draw in a graph that has no axis of rows.
        shuffles: Whether a draw changes the order of rows.
        not_replaced: Types of random ops that could not be replaced, each with the name of its
            first op in a graph, or "". If it is not empty, the results are random.
    """

    def __init__(
        self,
        rows: Callable,
        seeds_of_generators: set,
        without_rows=frozenset(),
        whole_rows: Callable | None = None,
    ):
        self.number, self._whole_rows = 0, whole_rows
        self.sizes: dict[int, tuple[int, bool]] = {}
        self.without_rows: list[tuple[int, tf.Tensor]] = []
        self._numbers_without_rows = without_rows
        self.shuffles = False
        self._seeds = seeds_of_generators
        self.not_replaced: dict[str, str] = {}
        self._rows = rows
        self._only_graphs = not tf.executing_eagerly()
        self._paused = False
        self._same_along: int | None = None
        # Numbers that may be sorted for an order of rows; whether those are of this replica alone.
        self._ordered: dict = {}

    def create_variable(self, next_creator, **kwargs):
        """Creates a variable with the random values that its initializer draws."""
        with self._pause():
            return next_creator(**kwargs)

    def forget_tensors(self):
        """Releases tensors, and with them the graph, because the object outlives it."""
        self._ordered.clear()
        self.without_rows = []
        self._seeds = set()
        self._rows = self._whole_rows = None

    def _pause(self):
        return with_attributes(self, _paused=True)

    def replace(self, op_type, inputs, outputs, name, eager):
        """Returns new outputs for an op, or None to keep its outputs."""
        if self._paused or (eager and self._only_graphs):
            return None
        if self._ordered and op_type in _SORTING:
            return self._on_sort(op_type, inputs, outputs)
        # Where Keras only computes shapes nothing is drawn, and a draw must not be counted.
        if not is_random(op_type) or symbolic_scope.in_symbolic_scope():
            return None
        if self._has_fixed_seed(op_type, inputs):
            return None
        if op_type not in REPLACEMENTS:
            self.not_replaced.setdefault(op_type, name or "")
            return None
        # The ops of a replacement that run eagerly come here, too.
        with self._pause():
            return [self._replaced(op_type, inputs, outputs[0])]

    def _has_fixed_seed(self, op_type, inputs) -> bool:
        """Whether an op draws the same numbers on each replica, because its seed is constant."""
        if not op_type.startswith("Stateless") or tf.executing_eagerly():
            return False
        names = _inputs_of(op_type)
        pending = [x for name, x in zip(names, inputs) if name in _SEED_INPUTS]
        if not pending:
            return False
        seen: set = set()
        while pending:
            tensor = pending.pop()
            if not isinstance(tensor, tf.Tensor) or tensor.ref() in self._seeds:
                return False
            op = tensor.op
            if op.name in seen or tensor.dtype == tf.resource:
                continue
            # The state of a generator is a vector; a counter of steps is a scalar.
            if op.type == "ReadVariableOp" and tensor.shape.rank != 0:
                return False
            if op.type == "Placeholder" or "Rng" in op.type or _RANDOM.search(op.type):
                # That op converts a seed, and draws nothing.
                if not op.type.endswith("GetKeyCounter"):
                    return False
            seen.add(op.name)
            pending += op.inputs
        return True

    def _replaced(self, op_type, inputs, output):
        first_row, num_rows, *salt = self._rows()
        whole = self._whole_rows(output) if self._whole_rows else None
        if whole is not None:
            first_row, num_rows = 0, whole
        known = self.number in self._numbers_without_rows
        draw = Draw(
            output,
            self.number,
            first_row,
            num_rows,
            *salt,
            without_rows=known,
            same_along=self._same_along,
        )
        mixes_rows = whole is None and draw.may_have_rows()
        self.shuffles |= op_type in _SHUFFLES and mixes_rows
        new = REPLACEMENTS[op_type](draw, dict(zip(_inputs_of(op_type), inputs)))
        if not tf.executing_eagerly():
            new.set_shape(output.shape)
            self._note_rows(draw, new)
        self.number += 1
        if (
            new.shape.rank == 1
            and draw.may_have_rows()
            and op_type.endswith(("Uniform", "UniformV2"))
        ):
            self._ordered[new.ref()] = mixes_rows
        return new

    def _note_rows(self, draw, new):
        may_have_rows = draw.may_have_rows()
        if not may_have_rows:
            self.without_rows.append((draw.number, new))
        if draw.output.shape.rank and draw.output.shape[0] is not None:
            self.sizes[draw.number] = draw.output.shape[0], may_have_rows

    def _on_sort(self, op_type, inputs, outputs):
        """Replaces a sort by random numbers, which shuffles rows, by the original order.

        `keras.random.shuffle` sorts drawn numbers, scaled and shifted. A permutation of the whole
        batch cannot be computed from replica batches.
        """
        if not (isinstance(inputs[0], tf.Tensor) and inputs[0].ref() in self._ordered):
            return None
        mixes_rows = self._ordered[inputs[0].ref()]
        if op_type == "TopKV2":
            self.shuffles |= mixes_rows
            with self._pause():
                values, order = outputs
                new = tf.range(tf.size(order), dtype=order.dtype)
                return [values, tf.ensure_shape(new, order.shape)]
        if len(inputs) == 1 or tf.convert_to_tensor(inputs[1]).shape.rank == 0:
            self._ordered[outputs[0].ref()] = mixes_rows
        return None


def _inputs_of(op_type):
    return [each.name for each in op_def_registry.get(op_type).input_arg]


@functools.cache
def is_random(op_type: str) -> bool:
    """Whether ops of a type draw random numbers."""
    if op_type in REPLACEMENTS:
        return True
    definition = op_def_registry.get(op_type)
    if definition is None or _NO_DRAW.search(op_type):
        return False
    names = {each.name for each in (*definition.input_arg, *definition.attr)}
    return "seed" in names or bool(_RANDOM.search(op_type))


@contextlib.contextmanager
def fixed_random_numbers(
    rows: Callable, without_rows=frozenset(), whole_rows: Callable | None = None
) -> Iterator[Draws]:
    """Replaces random numbers by numbers that depend only on the draw, the row and the column.

    A replica with rows 3 and 4 of the global batch then draws for them the same numbers as one
    device does for its rows 3 and 4, so replica batches can be compared with the whole batch. This
    holds for every op that is created or run in this thread: in graphs, in bodies of `tf.cond` and
    `tf.while_loop`, eagerly, and in every `tf.function` that is called, which is traced again
    within the context and after it. Each replica has its own thread, so enter the context within
    the function that `strategy.run` calls. If it is entered while a graph is built, eager ops (in
    `tf.init_scope`) are not replaced. Initial values of variables stay random. Generators and the
    states of `keras.random.SeedGenerator` advance as usual.

    Uniform, normal, integer and categorical numbers keep their distribution; gamma, beta, Poisson
    and binomial numbers are replaced by their means; a shuffle keeps the order. Every run of a
    trace, and every iteration of a loop, draws the same numbers.

    How entries of a tensor's first axis belong to rows is documented in `Draw.rows`. A fixed size
    that `num_rows` happens to divide is mistaken for rows, and differs between replicas. That
    cannot happen in graphs for any number of rows, where that size is known and `num_rows` is not.

    Not replaced: Python's `random` and NumPy, which draw while a graph is built (as
    `keras.layers.AugMix` does), ops of concrete functions and of loaded models, `tf.numpy_function`
    and `tf.py_function`, dropout within cuDNN's own cells, other threads.

    ```python
    with keras_compat.fixed_random_numbers(lambda: (first_row, tf.shape(x)[0])) as draws:
        logs = model.train_step((x, y))
    if draws.not_replaced:
        print("not verified: random")
    ```

    Args:
        rows: Function that returns the number of this replica's first row in the global batch, and
            its number of rows, ints or integer scalars; an optional third value changes all numbers
            if it is not 0. It is called at every draw, in the graph that is being built; tensors of
            an outer graph are captured. The number of rows should be known statically (an int, or
            `tf.shape(x)[0]`) if the batch's size is.
        without_rows: Numbers of draws that are known to have no rows, whatever their size.
        whole_rows: Function of the output of a random op; returns the number of rows of the global
            batch if it has these, gathered from all replicas, else None.

    Yields:
        A `Draws`, which is complete, and without tensors, when the context ends.
    """
    with seeds.noting_seeds() as seeds_of_generators:
        draws = Draws(rows, seeds_of_generators, without_rows, whole_rows)
        try:
            with replaced_ops(draws.replace), tf.variable_creator_scope(draws.create_variable):
                yield draws
        finally:
            draws.forget_tensors()


@contextlib.contextmanager
def draws_of(rows: Callable | None = None, number: int | None = None) -> Iterator[Draws | None]:
    """Draws numbers for other rows, within `fixed_random_numbers`.

    Args:
        rows: As in `fixed_random_numbers`, without a third value, which stays the same; None for
            the same rows.
        number: How many draws come before; None for the actual number.

    Yields:
        The `Draws`; None outside of `fixed_random_numbers`.
    """
    draws = _current_draws()
    if draws is None:
        yield None
        return
    before = draws._rows
    other = before if rows is None else lambda: (*rows(), *before()[2:])
    number = draws.number if number is None else number
    with with_attributes(draws, _rows=other, number=number):
        yield draws


def num_draws() -> int:
    """Returns how many draws were replaced so far; 0 outside of `fixed_random_numbers`."""
    draws = _current_draws()
    return 0 if draws is None else draws.number


def forget_draws_after(number: int) -> None:
    """Lets draws have their numbers again, because what drew them is not used.

    Args:
        number: What `num_draws` was before them.
    """
    draws = _current_draws()
    if draws is not None:
        draws.number = number


@contextlib.contextmanager
def scratch_graph() -> Iterator[None]:
    """Makes a graph of which nothing runs, and no draw counts; it may use tensors from outside."""
    draws = _current_draws()
    with draws._pause() if draws is not None else contextlib.nullcontext():
        with tf.__internal__.FuncGraph("scratch").as_default():
            yield


@contextlib.contextmanager
def same_draws_along(axis: int) -> Iterator[None]:
    """Draws the same numbers for all rows, and along one more axis, in `fixed_random_numbers`.

    For code that may have rows of several replicas and a part of that axis.
    """
    draws = _current_draws()
    if draws is None:
        yield
        return
    before = draws._rows
    with with_attributes(draws, _rows=lambda: (0, 1, *before()[2:]), _same_along=axis):
        yield


def _current_draws() -> Draws | None:
    # `fixed_random_numbers` passes the bound method `Draws.replace`.
    draws = getattr(current_replace(), "__self__", None)
    return draws if isinstance(draws, Draws) else None
