"""Weights whose value only one worker holds; on the others they have a shape but no memory."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.distribute import values as distributed_values

from tfmulti import marks
from tfmulti.runtime.scoped import Scoped

_reads_held = Scoped(False)
_num_moves = 0


class HeldVariable(keras.Variable):
    """A weight that one worker holds.

    Reading it returns the whole value, which `whole`, of a subclass, gets from its owner. Within
    `held_values`, as in an optimizer's update, it returns what this worker holds, and nothing is
    sent. In a `keras.StatelessScope` it returns the value that the scope has for it.

    Attributes:
        is_here: Whether this worker holds it.
    """

    is_here = True

    def whole(self) -> tf.Tensor:
        """Returns the whole value."""
        raise NotImplementedError

    def held(self) -> tf.Tensor:
        """Returns what this worker holds: the value, or a tensor without elements."""
        with held_values():
            return tf.convert_to_tensor(self.value)

    @property
    def value(self):
        """The whole value, or the variable with what this worker holds; see the class."""
        if are_held_values():
            return self._value
        if in_stateless_scope() and get_stateless_scope().get_current_value(self) is not None:
            return super().value
        # Where only shapes are computed, the owner need not send anything.
        if in_symbolic_scope():
            return self._maybe_autocast(tf.zeros(self.shape, self._dtype))
        return self._maybe_autocast(self.whole())

    @property
    def handle(self):
        """The handle of the variable that this worker holds; tapes differentiate by it."""
        return self._value.handle

    @property
    def constraint(self):
        """The constraint of the value; None on workers without the value."""
        # Keras's `apply` assigns the constrained value, and other workers hold an empty tensor.
        return self._constraint if self.is_here else None


class UpdatedRows:
    """Some rows of a weight, which an optimizer's update reads and assigns like a variable.

    The optimizer finds the slots of the weight by them.

    Args:
        optimizer: The optimizer.
        variable: The weight, or its `own_variable`, with one replica.
        begin: The first of the rows.
        end: The row after the last one.
    """

    def __init__(self, optimizer, variable: keras.Variable, begin: int, end: int):
        value = own_variable(variable)
        self._whole = getattr(value, "values", (value,))[0]
        self._begin, self._end = begin, end
        # `Optimizer._var_key` takes this attribute of what it is given.
        self._unique_id = optimizer._var_key(variable)
        self.dtype, self.shape = variable.dtype, (end - begin, *variable.shape[1:])

    @property
    def value(self) -> tf.Tensor:
        """The rows, which have a method `assign`."""
        return self._whole[self._begin : self._end]

    def __tf_tensor__(self, dtype=None, name=None):
        return tf.convert_to_tensor(self.value, dtype, name=name)

    def assign(self, value) -> None:
        """Assigns the rows."""
        self.value.assign(value)

    def assign_add(self, value) -> None:
        """Adds to the rows."""
        # A slice of a variable has no `assign_add`.
        rows = self.value
        rows.assign(rows + value)

    def assign_sub(self, value) -> None:
        """Subtracts from the rows."""
        rows = self.value
        rows.assign(rows - value)

    def scatter_update(self, value: tf.IndexedSlices) -> None:
        """Assigns some of the rows."""
        self._whole.scatter_update(self._of_whole(value))

    def scatter_add(self, value: tf.IndexedSlices) -> None:
        """Adds to some of the rows."""
        self._whole.scatter_add(self._of_whole(value))

    def scatter_sub(self, value: tf.IndexedSlices) -> None:
        """Subtracts from some of the rows."""
        self._whole.scatter_sub(self._of_whole(value))

    def _of_whole(self, value):
        rows = value.indices + tf.cast(self._begin, value.indices.dtype)
        return tf.IndexedSlices(value.values, rows)


def held_values() -> contextlib.AbstractContextManager:
    """Makes reading a `HeldVariable` return what this worker holds, within the context."""
    return _reads_held.set_to(True)


def are_held_values() -> bool:
    """Whether reading a `HeldVariable` returns what this worker holds; see `held_values`."""
    return _reads_held.value


def own_variable(variable):
    """Returns the `tf.Variable` with what this worker holds of a variable.

    Keras's optimizers on one device update and decay it, and may decide by its name, in which the
    names of the layers precede that of the weight.

    Args:
        variable: A Keras variable, or already a `tf.Variable`.
    """
    with held_values():
        return variable.value if isinstance(variable, keras.Variable) else variable


def num_moves() -> int:
    """Returns how often variables of this process have moved, the same on all workers."""
    return _num_moves


def _note_move():
    """Notes that functions which were traced before may read what a variable no longer holds."""
    global _num_moves
    _num_moves += 1


def hold(variable: keras.Variable, kind: type, strategy: tf.distribute.Strategy, is_here: bool):
    """Turns a variable into a `HeldVariable`, in place; frees its value on other workers.

    Args:
        variable: A variable of the strategy's scope.
        kind: A subclass of `HeldVariable`.
        strategy: A strategy with one replica for each worker.
        is_here: Whether this worker holds it.
    """
    # On the worker that holds it, too: the others wait for it to send the value.
    _note_move()
    # In place: the layer and its lists of weights hold this object.
    variable.__class__ = kind
    variable.is_here = is_here
    if not is_here:
        _set_value(variable, strategy, tf.zeros([0], variable._value.dtype))


def move_held(variable: HeldVariable, strategy: tf.distribute.Strategy, value) -> None:
    """Moves a `HeldVariable` to this worker, or away from it.

    Args:
        variable: The variable.
        strategy: A strategy with one replica for each worker.
        value: Its whole value if this worker will hold it, else None.
    """
    _note_move()
    variable.is_here = value is not None
    empty = tf.zeros([0], variable._value.dtype)
    _set_value(variable, strategy, empty if value is None else value)


def _set_value(variable, strategy, value):
    old = variable._value

    def create():
        with tf.device(strategy.extended.worker_devices[0]):
            # `trainable` as at creation: Keras does not change it to freeze or unfreeze weights.
            return tf.Variable(value, trainable=old.trainable, name=_name_of(old))

    # In a strategy's scope, creating a variable is a collective.
    new = _with_key_of(old, call_outside_scope(create))
    variable._value = distributed_values.MirroredVariable(strategy, [new], old.aggregation)


def _name_of(value: tf.Variable) -> str:
    """Returns the name by which a variable of TensorFlow was created."""
    return value.name.split(":")[0]


def _with_key_of(old, new: tf.Variable) -> tf.Variable:
    """Returns a new variable, which optimizers take for the old one whose place it takes.

    An optimizer keeps the keys of variables that it was told to exclude from weight decay.
    """
    new._unique_id = old._unique_id
    return new


def call_outside_scope(function: Callable):
    """Calls a function outside of the strategy's scope, which belongs to the current thread."""
    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def put_on(variable: keras.Variable, device: str) -> None:
    """Moves a variable of one process to a device, in place; `marks.DEVICE` has its name.

    Args:
        variable: A variable that no step has been traced with.
        device: A device of this process, such as `"GPU:1"`.
    """
    _note_move()
    old = variable._value

    def create():
        with tf.device(device):
            return tf.Variable(
                old,
                trainable=old.trainable,
                name=_name_of(old),
                aggregation=old.aggregation,
                synchronization=old.synchronization,
            )

    # In a strategy's scope, variables are created on its device.
    new = _with_key_of(old, call_outside_scope(create))
    # Optimizers ask the variable's strategy to create slots on the same device.
    new._distribute_strategy = old._distribute_strategy
    variable._value = new
    marks.DEVICE.set(variable, device)


def keys_of_held(original):
    """Makes an optimizer look up variables without gathering their whole values.

    Args:
        original: `Optimizer._var_key`.
    """

    # Keras takes the key from `variable.value`, which would be the gathered value.
    def var_key(self, variable):
        with held_values():
            return original(self, variable)

    return var_key


def swap_held_averages(original, keep):
    """Makes `SwapEMAWeights` swap what each worker holds of weights and averages.

    Args:
        original: `SwapEMAWeights._tf_swap_variables`.
        keep: Function of the optimizer and the variables whose values have changed.
    """

    def swap(self, optimizer):
        with held_values():
            original(self, optimizer)
        weights = optimizer._trainable_variables
        keep(optimizer, [*weights, *optimizer._model_variables_moving_average])

    return swap


def end_with_held_averages(original, keep):
    """Makes `SwapEMAWeights` assign weights to averages that are no variables of the strategy.

    Args:
        original: `SwapEMAWeights._tf_finalize_ema_values`.
        keep: Function of the optimizer and the variables whose values have changed.
    """

    def assign_averages(self, optimizer):
        averages = optimizer._model_variables_moving_average
        with held_values():
            for weight, average in zip(optimizer._trainable_variables, averages):
                optimizer.assign(average, tf.convert_to_tensor(weight.value))
        keep(optimizer, averages)

    return assign_averages


@contextlib.contextmanager
def after_add_weight(function: Callable[[keras.Variable], None]) -> Iterator[None]:
    """Calls a function with each weight that layers create within the context, in this thread."""
    original, thread = keras.layers.Layer.add_weight, threading.get_ident()

    @functools.wraps(original)
    def add_weight(self, *args, **kwargs):
        variable = original(self, *args, **kwargs)
        if threading.get_ident() == thread:
            function(variable)
        return variable

    keras.layers.Layer.add_weight = add_weight
    try:
        yield
    finally:
        keras.layers.Layer.add_weight = original


def is_initialized(variable: keras.Variable) -> bool:
    """Whether a variable has a value; while Keras only computes shapes, it has none."""
    return variable._value is not None


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the weights of a layer, without those of the layers that it contains."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_state(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns those of a layer's `own_weights` that it has created with `trainable=False`."""
    return list(layer._non_trainable_variables)
