"""Split weights: each worker of a group holds a part of a weight, and computes only with that.

Whoever reads the variable gets the whole weight, with its shape and path: files, checkpoints and
all code outside of the layer are those of the unsplit model. Its slots are split in the same way,
so an element-wise update needs nothing from other workers. `tfmulti.parallel.tensor` makes layers
compute with parts.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.step import assignments, owners, parameters, slots
from tfmulti.step.rows import in_graph_of_step

# Optimizers whose update of an element reads no other element.
_OF_ELEMENTS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
)


@dataclasses.dataclass(frozen=True)
class Split:
    """How a weight is split over the workers of each group.

    Attributes:
        shape: The shape of the whole weight.
        axis: The axis along which it is split.
        parts: The number of parts, and of workers in a group.
        worker: The number of this worker, which has part `worker % parts`.

    >>> [Split((5, 2), 0, 2, worker).bounds() for worker in (0, 1, 2)]
    [(0, 2), (2, 5), (0, 2)]
    """

    shape: tuple[int, ...]
    axis: int
    parts: int
    worker: int

    @property
    def part(self) -> int:
        """The number of this worker's part."""
        return self.worker % self.parts

    def bounds(self, part: int | None = None) -> tuple[int, int]:
        """Returns the first index of a part, and the one after its last; None for this worker's."""
        part, size = self.part if part is None else part, self.shape[self.axis]
        return part * size // self.parts, (part + 1) * size // self.parts

    def shape_of(self, part: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a part; None for this worker's."""
        begin, end = self.bounds(part)
        return (*self.shape[: self.axis], end - begin, *self.shape[self.axis + 1 :])

    def take(self, whole):
        """Returns this worker's part of a whole tensor, an array or a sparse gradient."""
        if not isinstance(whole, tf.IndexedSlices):
            return whole[(*[slice(None)] * self.axis, slice(*self.bounds()))]
        begin, end = self.bounds()
        values, rows = whole.values, whole.indices
        if self.axis == 0:
            is_here = (rows >= begin) & (rows < end)
            values, rows = tf.boolean_mask(values, is_here), tf.boolean_mask(rows, is_here) - begin
        else:
            values = values[(*[slice(None)] * self.axis, slice(begin, end))]
        return tf.IndexedSlices(values, rows, tf.constant(self.shape_of()))

    def join(self, strategy: tf.distribute.Strategy, own: tf.Tensor) -> tf.Tensor:
        """Returns the whole tensor from the parts of all workers; a collective, in a replica."""
        # The others' parts are zeros that are not sent: they tell shapes and dtypes.
        parts = [
            own if part == self.part else tf.zeros(self.shape_of(part), own.dtype)
            for part in range(self.parts)
        ]
        for part, value in owners.from_owners(strategy, parts, list(range(self.parts))):
            parts[part] = value
        return tf.concat(parts, self.axis)

    def pad(self, own):
        """Returns a gradient of the whole weight: this worker's part, and zeros elsewhere."""
        begin, end = self.bounds()
        around = [(0, 0)] * len(self.shape)
        around[self.axis] = (begin, self.shape[self.axis] - end)
        if not isinstance(own, tf.IndexedSlices):
            return tf.pad(tf.ensure_shape(own, self.shape_of()), around)
        if self.axis == 0:
            rows = own.indices + tf.cast(begin, own.indices.dtype)
            return tf.IndexedSlices(own.values, rows, tf.constant(self.shape))
        values = tf.pad(own.values, around)
        return tf.IndexedSlices(values, own.indices, tf.constant(self.shape))


class SplitParameter(parameters.ShardedParameter):
    """A weight of which each worker holds a part.

    Attributes:
        split: How it is split.
    """

    owner, is_here, has_whole = 0, True, False

    def whole(self) -> tf.Tensor:
        """Returns the whole value; in a step a collective, with a gradient."""
        if not parameters.in_replica():
            return super().whole()
        assignments.refuse_stale_read(self)
        with in_graph_of_step():
            return _gather(self)

    def assign(self, value):
        """Assigns the whole value; each worker keeps its part."""
        if keras_compat.in_stateless_scope():
            return keras.Variable.assign(self, value)
        value = assignments.value_to_assign(value)
        assignments.note_assigned(self)
        _assign(self, value, self.parameters.values)
        return value


class SplitSlot(slots.SlotVariable):
    """A slot of a weight of which each worker updates a part; the worker keeps its part of it.

    Args:
        shards: The shards of the optimizer.
        split: How the weight is split.
        initializer: Its initializer.
        dtype: Its dtype.
        name: Its name.
    """

    has_whole = False

    def __init__(self, shards, split: Split, initializer, dtype, name: str):
        self.split, held = split, split.shape_of()
        super().__init__(shards, 0, True, split.shape, initializer, dtype, name, True, held)

    def assign(self, value):
        """Assigns the whole value; each worker keeps its part."""
        _assign(self, value, self._shards.values)
        return value


def split(variable: keras.Variable, strategy: tf.distribute.Strategy, axis: int, parts: int):
    """Splits a variable over the workers of each group; a collective.

    Args:
        variable: A weight, which another worker may hold.
        strategy: Its strategy, with one replica for each worker.
        axis: The axis along which it is split.
        parts: The number of workers in a group.
    """
    sharded, worker = parameters.of_strategy(strategy), topology.worker_index(strategy)
    is_sharded = isinstance(variable, parameters.ShardedParameter)
    whole = sharded.give_up(variable) if is_sharded else tf.convert_to_tensor(variable.value)
    keras_compat.hold(variable, SplitParameter, strategy, is_here=True)
    variable.split = Split(tuple(variable.shape), axis, parts, worker)
    variable.parameters, variable.counters = sharded, []
    keras_compat.move_held(variable, strategy, variable.split.take(whole))


def compute_with(parameter: SplitParameter) -> tf.Tensor:
    """Returns this worker's part, for a layer that computes with it on the rows of its group.

    The gradients of the groups, each of the rows of its workers, are added.

    Args:
        parameter: The parameter.
    """
    strategy, parts = tf.distribute.get_strategy(), parameter.split
    copies = list(range(parts.part, topology.num_workers(strategy), parts.parts))

    @tf.custom_gradient
    def receive(value):
        def gradient(upstream):
            is_sparse = isinstance(upstream, tf.IndexedSlices)
            # The user's own step reads whole gradients. If a step also reads the whole weight,
            # the tape adds both gradients, which need the same shape.
            if not parameters.only_update_reads() or parameters.num_reads(parameter):
                parameter.unreduced = True
            else:
                # `add_among` adds dense tensors only.
                parameter.unreduced = is_sparse and len(copies) > 1
            if parameter.unreduced:
                # The step adds it over workers, like the gradients of other weights.
                return parts.pad(upstream)
            if is_sparse:
                shape = tf.constant(parts.shape_of())
                return tf.IndexedSlices(upstream.values, upstream.indices, shape)
            upstream = tf.ensure_shape(upstream, parts.shape_of())
            if len(copies) > 1:
                upstream = strategy.extended.add_among([upstream], copies)[0]
            return upstream

        return tf.identity(value), gradient

    return receive(parameter.held())


def _gather(parameter):
    """Returns the whole value for code that reads it; the step adds its gradient over workers."""
    parameters.note_read(parameter)
    strategy, parts = tf.distribute.get_strategy(), parameter.split

    @tf.custom_gradient
    def receive(value):
        def gradient(upstream):
            parameter.unreduced = True
            if not isinstance(upstream, tf.IndexedSlices):
                return parameters.zero_without_rows(tf.ensure_shape(upstream, parts.shape))
            values = parameters.zero_without_rows(upstream.values)
            return tf.IndexedSlices(values, upstream.indices, tf.constant(parts.shape))

        return parts.join(strategy, value), gradient

    return receive(parameter.held())


def _assign(variable, value, values):
    with keras_compat.held_values():
        held = variable.value
    value = tf.convert_to_tensor(value, dtype=held.dtype)
    # An optimizer's update assigns the part; files, callbacks and scripts assign the whole.
    is_part = keras_compat.are_held_values() and value.shape == held.shape
    if not is_part:
        slots.refuse_other_shape(variable, value)
    held.assign(value if is_part else variable.split.take(value))
    if not is_part:
        values.keep_value(variable, np.asarray(value) if tf.executing_eagerly() else value)


def held_gradient(gradient, variable):
    """Returns the part of a gradient for this worker's update of a variable.

    It is empty if another worker holds the variable, and this worker's part if it is split.
    """
    if gradient is None:
        return None
    if isinstance(variable, SplitParameter):
        # It is the part already, or that of the whole weight: see `compute_with`.
        shape = tuple(gradient.shape) if gradient.shape.rank is not None else None
        return gradient if shape == variable.split.shape_of() else variable.split.take(gradient)
    return gradient if getattr(variable, "is_here", True) else tf.zeros([0], gradient.dtype)


def updates_elements(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer of Keras's own treats each element of a variable by itself."""
    kind = type(optimizer)
    is_own = not keras_compat.is_stock(kind) or keras_compat.own_methods(optimizer)
    return not is_own and kind.__name__ in _OF_ELEMENTS


def owners_of_updates(
    optimizer: keras.optimizers.Optimizer, variables, num_workers: int, by_rows: bool
) -> list[int | None]:
    """Returns the worker that updates each variable; None if each worker updates some of its rows.

    Args:
        optimizer: The optimizer.
        variables: The variables.
        num_workers: The number of workers.
        by_rows: Whether a variable may be divided by rows if it makes the workers' shares uneven.
    """
    known = {place: v.owner for place, v in enumerate(variables) if hasattr(v, "owner")}
    places = set(range(len(variables))) - set(known) if by_rows else set()
    # With fewer rows than workers, some of these would have none.
    have_rows = {p for p in places if [*variables[p].shape[:1]] >= [num_workers]}
    divisible = have_rows if updates_elements(optimizer) else ()
    sizes = [owners.owned_bytes(variable) for variable in variables]
    return owners.by_bytes(sizes, num_workers, known, divisible)


def most_updated(optimizer, variables, num_workers: int, by_rows: bool) -> int:
    """Returns the bytes of weights that a worker updates, for the worker with the most.

    Args:
        optimizer: The optimizer, which may be a `LossScaleOptimizer`.
        variables: The variables that it updates.
        num_workers: The number of workers.
        by_rows: See `owners_of_updates`.
    """
    inner = keras_compat.inner_optimizer(optimizer)
    owned_by = owners_of_updates(inner, variables, num_workers, by_rows)
    return max(owners.bytes_of_each(variables, num_workers, owned_by))


def refuse_other_updates(optimizer: keras.optimizers.Optimizer, variables) -> None:
    """Raises ValueError if an optimizer needs whole weights, and some are split.

    Args:
        optimizer: The optimizer.
        variables: The variables that it updates.
    """
    parts = [variable for variable in variables if isinstance(variable, SplitParameter)]
    if not parts:
        return
    if not updates_elements(optimizer):
        raise ValueError(
            "Split weights need an element-wise optimizer, because each worker updates a part. "
            f"Received: {type(optimizer).__name__}, and {parts[0].path}, which is split. "
            f"Use one of {', '.join(_OF_ELEMENTS)}, or shard='parameters' without "
            "tfmulti.tensor_parallel."
        )


def refuse_own_parts(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError for an optimizer whose own code would get only the gradients held here.

    Args:
        optimizer: The optimizer, whose weights are to be sharded.
    """
    own = keras_compat.own_parts_of_apply(optimizer)
    if own:
        raise ValueError(
            "With shard='parameters' an optimizer may define `apply`, which gets all "
            "gradients, and `update_step`, but none of Keras's private methods for gradients, of "
            f"which each worker has some. Received: {type(optimizer).__name__}.{own[0]}. Change "
            "gradients in `apply` before you call super().apply, or use shard='state'."
        )
