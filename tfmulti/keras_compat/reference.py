"""Computes one device's result on each replica: without reductions, and without lasting traces."""

from __future__ import annotations

import contextlib
import itertools

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.framework import ops
from tensorflow.python.ops import summary_ops_v2

from tfmulti.keras_compat.replacement import in_scope, replace
from tfmulti.runtime.scoped import Scoped, with_attributes

_numbers = itertools.count(1)
_reduces = Scoped(False)
_mark: int | None = None
# The methods with which a strategy reduces and gathers, and substitutes that return own values.
_UNREDUCED = {
    "_batch_reduce_to": lambda reduce_op, pairs, options: [value for value, _ in pairs],
    "_reduce_to": lambda reduce_op, value, destinations, options: value,
    "_replica_ctx_all_reduce": lambda reduce_op, value, options=None: value,
    "_gather_to_implementation": lambda value, destinations, axis, options: value,
}


@contextlib.contextmanager
def reducing_nothing(strategy: tf.distribute.Strategy):
    """Makes all reductions and gathers of a strategy return each replica's own value."""
    with with_attributes(strategy.extended, **_UNREDUCED):
        yield


@contextlib.contextmanager
def as_one_device(strategy: tf.distribute.Strategy):
    """Makes each replica of a strategy of ours compute what one device computes from its rows."""
    with reducing_nothing(strategy), with_attributes(strategy, counts_one_replica=True):
        yield


@contextlib.contextmanager
def reducing_as_usual(strategy: tf.distribute.Strategy):
    """Suspends `reducing_nothing`, for communication that one device would not need.

    It makes a sharded weight whole, as it is on one device.
    """
    replaced = {n: f for n, f in vars(strategy.extended).items() if n in _UNREDUCED}
    for name in replaced:
        delattr(strategy.extended, name)
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(strategy.extended, name, function)


@contextlib.contextmanager
def among_all_replicas(strategy: tf.distribute.Strategy):
    """Suspends `as_one_device`, for what all replicas compute together."""
    with _reduces.set_to(True), reducing_as_usual(strategy):
        yield


@contextlib.contextmanager
def as_first_replica():
    """Gives the replica that is being traced the number of the first.

    The gradient of a gather selects the replica's own rows by its number.
    """
    replica = tf.distribute.get_replica_context()
    with with_attributes(replica, _replica_id_in_sync_group=0):
        yield


@contextlib.contextmanager
def reducing_over_replicas(number):
    """Suspends `as_one_device` and `as_first_replica` for a reduction over all replicas.

    Args:
        number: The number of the replica that is being traced; None if they are not in use.
    """
    if number is None:
        yield
        return
    replica = tf.distribute.get_replica_context()
    # While this replica waits in the reduction, another one may still trace what comes before.
    as_itself = with_attributes(replica, _replica_id_in_sync_group=number)
    with among_all_replicas(replica.strategy), as_itself:
        yield


def computes_like_one_device(strategy: tf.distribute.Strategy) -> bool:
    """Whether this thread's replica is in `as_one_device`, and in no reduction over replicas."""
    return getattr(strategy, "counts_one_replica", False) and not _reduces.value


@contextlib.contextmanager
def on_first_replica(strategy: tf.distribute.Strategy):
    """Makes `strategy.run` run its function on this worker's first replica alone."""
    extended = strategy.extended
    devices = extended.worker_devices
    # `strategy.run` starts a thread for each of them. A strategy of one device has no such list.
    first = {"_devices": devices[:1]} if len(devices) > 1 else {}
    with with_attributes(extended, **first):
        yield


@contextlib.contextmanager
def without_optimized_graphs():
    """Makes functions whose first run is in this context run as they were traced.

    Optimizing a graph takes as long as tracing it, which does not pay for a few runs.
    """
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


@contextlib.contextmanager
def separate_traces():
    """Keeps traces that `tf.function`s make in the context separate from all other traces.

    Otherwise TensorFlow would reuse them in training, although they are for another number of
    replicas and contain tensors of a step that is over.

    TensorFlow keeps the gradient of every `tf.custom_gradient` and every all-reduce that is traced,
    and with it the graph, as long as the process lives. Those of these traces are let go.

    Steps in the context write no summaries: a user's file of events cannot be restored.
    """
    global _mark
    # Once replaced they stay, but act only while there is a mark.
    replace(function_context, "make_function_context", _marked, _separates)
    replace(summary_ops_v2, "_should_record_summaries_internal", _never_records, _separates_here)
    previous, _mark = _mark, next(_numbers)
    kept = set(ops.gradient_registry.list())
    try:
        yield
    finally:
        _mark = previous
        for name in set(ops.gradient_registry.list()) - kept:
            # A registry has no public way to remove an entry.
            del ops.gradient_registry._registry[name]


def in_separate_traces() -> bool:
    """Whether traces that are made now are not used afterwards; see `separate_traces`."""
    return _mark is not None


def _separates(*_, **__):
    return _mark is not None


def _marked(original):
    def make_function_context(scope_type=None):
        made = original(scope_type)
        mark = ("tfmulti", _mark, made.context.xla_context_id)
        # TensorFlow finds traces by a key of these fields; this one takes any value.
        return made._replace(context=made.context._replace(xla_context_id=mark))

    return make_function_context


def _separates_here(*_, **__):
    # Another thread of the user's may record meanwhile.
    return _mark is not None and in_scope()


def _never_records(original):
    # A step may have a `tf.summary.record_if` of its own, which replaces one around it.
    return lambda default_state: tf.constant(False)


def handles_of(function) -> list[tf.Tensor]:
    """Returns the handles of all variables that a traced function reads or changes."""
    handles = [t for t in function.captured_inputs if t.dtype == tf.resource]
    return [handle for handle in handles if _dtype_of_handle(handle) is not None]


def handle_key(handle: tf.Tensor) -> int:
    """Returns a key that identifies a variable's handle."""
    return handle._id


def _dtype_of_handle(handle):
    """Returns the dtype of a handle's variable; None for the handle of a table or an iterator."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.dtypes.as_dtype(data.shape_and_type[0].dtype)


# Others, such as bfloat16, Python's buffers cannot describe.
_VIEWED = (tf.float32, tf.float64, tf.int32, tf.int64)


class _View(np.ndarray):
    """A read-only array in the memory of a tensor.

    A variable that is given the tensor takes that memory, until an update gives it other memory;
    so a state is read and restored without copies.
    """

    tensor: tf.Tensor | None = None


def read_handle(handle: tf.Tensor) -> np.ndarray:
    """Returns the value of a variable as a NumPy array, which can be read-only."""
    tensor = tf.raw_ops.ReadVariableOp(resource=handle, dtype=_dtype_of_handle(handle))
    if "CPU" not in tensor.device or tensor.dtype not in _VIEWED:
        return tensor.numpy()
    view = np.asarray(memoryview(tensor)).view(_View)
    view.tensor = tensor
    return view


def write_handle(handle: tf.Tensor, value) -> None:
    """Assigns a value to a variable."""
    tensor = value.tensor if isinstance(value, _View) else None
    with tf.device(handle.device):
        if tensor is None or tensor.device != handle.device:
            tensor = tf.constant(value, _dtype_of_handle(handle))
        tf.raw_ops.AssignVariableOp(resource=handle, value=tensor)


def container_of(handle: tf.Tensor):
    """Returns the distributed variable to which a replica's handle belongs, or None."""
    find = getattr(handle, "_distributed_container", None)
    return find() if find is not None else None


def operations_of(function) -> set[str]:
    """Returns the types of the operations of a traced function, and of functions that it calls."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return {node.op for node in nodes}


def predict_step_of(model: keras.Model):
    """Returns a model's step of `predict` in the form that Keras passes to `strategy.run`."""

    def one_step_on_data(data):
        return model.predict_step(data)

    # `step_of` knows the step of `predict` by its module.
    one_step_on_data.__module__ = keras_trainer.__name__
    return one_step_on_data


def reduce_outputs(outputs, strategy: tf.distribute.Strategy, reduction: str):
    """Combines the replicas' outputs into one value, as Keras does.

    Args:
        outputs: What `strategy.run` returned.
        strategy: The strategy.
        reduction: `"auto"` for logs, `"concat"` for predictions.
    """
    return keras_trainer.reduce_per_replica(outputs, strategy, reduction=reduction)


def compiled_state(model: keras.Model):
    """Returns an object that changes with every `compile`, or None before the first."""
    return getattr(model, "_compile_config", None)


@contextlib.contextmanager
def same_eager_numbers():
    """Restores the state of eager random operations after the context."""
    # Eager random ops without a seed take theirs from it.
    generator = getattr(context.context(), "_rng", None)
    state = generator.getstate() if generator is not None else None
    try:
        yield
    finally:
        if generator is not None:
            generator.setstate(state)
