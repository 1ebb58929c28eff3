"""Counts, pads and splits the rows of a batch; keeps the replica batch of the current step."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmulti import topology
from tfmulti.runtime.scoped import Scoped
from tfmulti.sharding import PADDING_WEIGHT
from tfmulti.step import row_axis, weighting

_PADDING_BITS = int(PADDING_WEIGHT.view(np.int32))
_KINDS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, np.ndarray)


class Counted(NamedTuple):
    """A replica batch, and the number of rows of the whole step.

    Attributes:
        replica_batch: The rows of one replica.
        num_global: Rows of all replicas without padding, int32 scalar.
    """

    replica_batch: Any
    num_global: tf.Tensor


class Padded(NamedTuple):
    """A batch that can end in padding rows, which have the weight `PADDING_WEIGHT`.

    Only this type tells: a user may give a row of any other data the same weight, -0.0.

    Attributes:
        x: Inputs.
        y: Labels.
        sample_weight: Weights, float32.
    """

    x: Any
    y: Any
    sample_weight: Any


def without_count(data):
    """Returns the replica batch without the count."""
    return data.replica_batch if isinstance(data, Counted) else data


def as_user_sees(data):
    """Returns the replica batch as an ordinary tuple, without the count."""
    data = without_count(data)
    return tuple(data) if isinstance(data, Padded) else data


def is_unpacked(data) -> bool:
    """Whether `tf.data.Dataset.map` passes the parts of a batch, or of its spec, one by one.

    A namedtuple, which is a tuple too, is one argument.
    """
    return type(data) is tuple


def of_arguments(arguments: tuple, spec):
    """Returns the batch that `tf.data.Dataset.map` passes as some arguments.

    Args:
        arguments: What the function is given.
        spec: The `element_spec` of the dataset.
    """
    return arguments if is_unpacked(spec) else arguments[0]


def parts_of(data) -> list | None:
    """Returns the tensors of a batch, or None if one of them has no axis of rows."""
    parts = [part for part in tf.nest.flatten(data, expand_composites=False) if part is not None]
    known = all(isinstance(part, _KINDS) and tf.TensorShape(part.shape).rank for part in parts)
    return parts if parts and known else None


def missing_rows_error(data) -> ValueError:
    """Returns the error about a batch of which `parts_of` is None."""
    shapes = tf.nest.map_structure(lambda part: getattr(part, "shape", part), data)
    return ValueError(
        "Every tensor of a batch must have rows: replicas are weighted by their number of rows. "
        f"Received: {shapes}. Store scalars as attributes of the model instead."
    )


def count_rows(part) -> tf.Tensor:
    """Returns the number of rows of a tensor, an int32 scalar; a constant if known statically."""
    if part.shape[0] is not None:
        return tf.constant(part.shape[0])
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int32)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int32)
    return tf.shape(part)[0]


def num_rows(data) -> tf.Tensor:
    """Returns the number of rows of a batch, an int32 scalar."""
    return count_rows(parts_of(data)[0])


def with_any_number(data):
    """Returns a batch whose dense tensors have any number of rows, for the graph being traced."""

    def open_axis(part):
        if not isinstance(part, tf.Tensor):
            return part
        return tf.compat.v1.placeholder_with_default(part, [None, *part.shape[1:]])

    return _map(open_axis, data)


def some_rows(data, start: int, stop: int):
    """Returns the rows of a batch from `start` up to, but not including, `stop`."""
    return _map(lambda part: take_rows(part, start, stop - start), data)


def without_padding(data):
    """Cuts off the padding rows at the end of a replica batch, if it is `Padded`."""
    if not isinstance(data, Padded):
        return data
    # By bits, since -0.0 equals the 0.0 with which a user leaves out a row.
    marked = tf.bitcast(data.sample_weight, tf.int32) == _PADDING_BITS
    is_padding = tf.reduce_all(marked, axis=list(range(1, marked.shape.rank)))
    num_real = tf.shape(is_padding)[0] - tf.reduce_sum(tf.cast(is_padding, tf.int32))
    return _map(lambda part: part[:num_real], tuple(data))


def fill_if_empty(data, *, of_ones: bool = False):
    """Adds one dummy row, of zeros or empty, to a batch without rows.

    Args:
        data: The batch.
        of_ones: Whether the inputs of a batch `(x, y)` get ones instead, which a mask does not
            hide: cuDNN's recurrent layers raise an error for a row that is hidden as a whole.
    """
    if parts_of(data) is None:
        return data
    if of_ones and isinstance(data, tuple) and data:
        filled = (_map(lambda part: _fill_part(part, tf.ones), data[0]), _map(_fill_part, data[1:]))
        # It may be a namedtuple.
        flat = tf.nest.flatten(filled, expand_composites=False)
        return tf.nest.pack_sequence_as(data, flat)
    return _map(_fill_part, data)


def replica_range(num_rows, num_replicas: int, number, *, in_chunks: bool = False) -> tuple:
    """Returns the first row, and the number of rows, of one of `num_replicas` parts of a batch.

    Args:
        num_rows: The number of rows of the batch, an int32 scalar.
        num_replicas: The number of parts.
        number: The index of the part.
        in_chunks: As in `take_replica_rows`.
    """
    number = tf.cast(number, tf.int32)
    size, longer = num_rows // num_replicas, num_rows % num_replicas
    if in_chunks:
        # As tf.distribute divides: 4 rows on 3 replicas are 2, 2 and 0.
        chunk = size + tf.cast(longer > 0, tf.int32)
        start = tf.minimum(number * chunk, num_rows)
        return start, tf.minimum(chunk, num_rows - start)
    return number * size + tf.minimum(number, longer), size + tf.cast(number < longer, tf.int32)


def take_replica_rows(data, number: tf.Tensor, num_replicas: int, *, in_chunks: bool = False):
    """Takes one of `num_replicas` contiguous parts of a batch; sizes differ by at most one.

    Args:
        data: The batch.
        number: The index of the part.
        num_replicas: The number of parts.
        in_chunks: Whether instead every part is as large as the first one until the rows run out.
    """

    def take(part):
        rows = replica_range(count_rows(part), num_replicas, number, in_chunks=in_chunks)
        return take_rows(part, *rows)

    return _map(take, data)


def take_rows(part, start, size):
    """Returns some rows of a tensor, which may be ragged or sparse, that follow one another.

    Args:
        part: The tensor.
        start: The first row.
        size: The number of rows.
    """
    if not isinstance(part, tf.SparseTensor):
        return part[start : start + size]
    shape = tf.cast(part.dense_shape, tf.int64)
    starts = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], axis=0)
    sizes = tf.concat([[tf.cast(size, tf.int64)], shape[1:]], axis=0)
    return _keep_shape(tf.sparse.slice(part, starts, sizes), part)


def _map(function, data):
    def apply(part):
        return None if part is None else function(part)

    return tf.nest.map_structure(apply, data, expand_composites=False)


def _fill_part(part, create=tf.zeros):
    empty = count_rows(part) == 0
    if isinstance(part, tf.RaggedTensor):
        last = tf.repeat(part.row_splits[-1:], tf.cast(empty, tf.int32))
        splits = tf.concat([part.row_splits, last], axis=0)
        return tf.RaggedTensor.from_row_splits(part.values, splits, validate=False)
    if isinstance(part, tf.SparseTensor):
        rows = tf.maximum(part.dense_shape[:1], 1)
        shape = tf.concat([rows, part.dense_shape[1:]], axis=0)
        return _keep_shape(tf.SparseTensor(part.indices, part.values, shape), part)
    filled = tf.cond(empty, lambda: _dummy_row(part, create), lambda: tf.identity(part))
    if not tf.executing_eagerly():
        filled.set_shape([None, *part.shape[1:]])
    return filled


def zeros_of(specs, num_rows: int):
    """Returns rows of zeros, or of empty strings; axes of unknown size have the size 1."""
    shape_of = lambda spec: [num_rows, *[size or 1 for size in spec.shape[1:]]]
    return tf.nest.map_structure(lambda spec: tf.zeros(shape_of(spec), spec.dtype), specs)


def _dummy_row(tensor, create):
    create = tf.zeros if tensor.dtype == tf.string else create
    row = create(tf.concat([[1], tf.shape(tensor)[1:]], axis=0), tensor.dtype)
    return tf.ensure_shape(row, [None, *tensor.shape[1:]])


def _keep_shape(sparse, original):
    sparse.set_shape([None, *original.shape[1:]])
    return sparse


_current = Scoped(None)
_graph = Scoped(None)


def in_this_graph() -> contextlib.AbstractContextManager:
    """Makes the graph that is being built that of the step, within the context."""
    is_eager = tf.executing_eagerly()
    return _graph.set_to(None if is_eager else tf.compat.v1.get_default_graph())


def in_branch() -> bool:
    """Whether a branch, a loop or a function within the step is being traced."""
    return _graph.value is not None and _graph.value is not tf.compat.v1.get_default_graph()


def in_graph_of_step() -> contextlib.AbstractContextManager:
    """Leaves the branches and loops that are being traced, within the context.

    Workers may run these more or less often than each other, but must communicate alike.
    """
    return _graph.value.as_default() if in_branch() else contextlib.nullcontext()


@dataclasses.dataclass
class ReplicaBatch:
    """One replica's rows of a step, while the step is traced.

    Attributes:
        num_rows: Rows that the model sees, int32 scalar.
        num_real: Rows without padding, int32 scalar; an empty replica batch has one dummy row.
        may_be_empty: Whether `num_real` can be 0.
        model: The Keras model of this step, or None.
        was_padded: Whether the batch had, or could have, padding rows with weights.
        num_global: Rows of all replicas without padding, float32 scalar; None until counted.
        gathers: Decides when layers gather sharded weights, a
            `tfmulti.parallel.prefetch.GatherSchedule`; None until the first gathers.
        gathered: The tensors that `gather_batch` has returned in this step; none in eager steps.
        reduced: Weak references to the gradients that tapes have reduced in this step, by id.
        of_stages: Variables of metrics that this worker's stage of a pipeline has updated, with
            rows that other workers may have.
    """

    num_rows: tf.Tensor
    num_real: tf.Tensor
    may_be_empty: bool = False
    model: keras.Model | None = None
    was_padded: bool = False
    num_global: tf.Tensor | None = None
    gathers: object | None = None
    gathered: list[tf.Tensor] = dataclasses.field(default_factory=list)
    reduced: dict[int, object] = dataclasses.field(default_factory=dict)
    of_stages: list[keras.Variable] = dataclasses.field(default_factory=list)

    def count_globally(self) -> tf.Tensor:
        """Returns the number of rows of all replicas without padding, a float32 scalar.

        It is a collective, once a step, if the data pipeline does not know the number.
        """
        # Not a cached_property: before Python 3.12 its lock makes the threads of two replicas
        # wait for each other.
        if self.num_global is None:
            context = tf.distribute.get_replica_context()
            num_real = tf.cast(self.num_real, tf.float32)
            if context.num_replicas_in_sync > 1:
                num_real = context.all_reduce(tf.distribute.ReduceOp.SUM, num_real)
            self.num_global = num_real
        return self.num_global

    @property
    def weight(self) -> tf.Tensor:
        """Weight of this replica's mean in the mean over all replicas, a scalar."""
        return weighting.row_weight(self.num_real, self.count_globally())

    def zero_if_empty(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a tensor, but zeros without rows; multiplying by 0 would keep NaN."""
        return tf.where(self.num_real > 0, value, tf.zeros_like(value))

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value times this replica's weight; zeros without rows."""
        return self.zero_if_empty(value * tf.cast(self.weight, value.dtype))

    def real_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of a tensor, without the dummy row of an empty batch.

        In an empty replica batch all that is computed from its only row is padding.
        """
        if not self.may_be_empty:
            return tensor
        return tensor[: tf.where(self.num_real > 0, tf.shape(tensor)[0], 0)]

    def note_gathered(self, tensors: Iterable[tf.Tensor]) -> None:
        """Notes tensors that `gather_batch` returns in this step."""
        if not tf.executing_eagerly():
            self.gathered.extend(tensors)

    def has_gathered_rows(self, tensor) -> bool:
        """Whether the rows of a tensor are those of the whole batch, from `gather_batch`.

        A sum over such rows is the same number on every replica, and must not be added over
        replicas. The number of rows does not tell: two views of half of the rows are as many as
        all rows. It is False where that is unknown, as in an eager step.
        """
        if not self.gathered or not tf.is_symbolic_tensor(tensor):
            return False
        return tensor.shape.rank != 0 and row_axis.has_rows_of(tensor, self.gathered)

    def note_reduced(self, grads: Iterable) -> None:
        """Notes gradients that a tape has reduced in this step."""
        # With the tensor itself, because a new one can get the id of a deleted one.
        tensors = [grad for grad in grads if isinstance(grad, tf.Tensor)]
        self.reduced.update({id(tensor): weakref.ref(tensor) for tensor in tensors})

    def are_reduced(self, structure) -> bool:
        """Whether a nested structure consists of gradients that a tape has reduced in this step.

        Every replica has the same ones, and so the products of their derivatives with given
        vectors, such as those of the Hessian, can be weighted and added.
        """
        known = self.reduced
        return all(id(x) in known and known[id(x)]() is x for x in tf.nest.flatten(structure))


def current_replica_batch() -> ReplicaBatch | None:
    """Returns the replica batch of the step that this thread traces, or None outside a step."""
    return _current.value


def distributed_batch() -> ReplicaBatch | None:
    """Returns the current replica batch within a step of several replicas, else None."""
    return current_replica_batch() if topology.is_one_of_several_replicas() else None


def batch_of_loop() -> ReplicaBatch | None:
    """Returns a replica batch that counts as much as every other one, in a loop of the user's own.

    A script has passed the function of this replica to `strategy.run` itself; nobody knows how many
    rows it gets. In Keras's own steps, and on one replica, it is None.
    """
    if current_replica_batch() is not None or not topology.is_one_of_several_replicas():
        return None
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    return ReplicaBatch(tf.constant(1), tf.constant(1), num_global=tf.constant(float(count)))


def as_current(replica_batch: ReplicaBatch | None) -> contextlib.AbstractContextManager:
    """Makes `replica_batch` the current one; None means outside a step."""
    return _current.set_to(replica_batch)
