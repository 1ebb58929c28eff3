"""The slots of an optimizer with sharded state: each slot is kept by one worker."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.runtime.scoped import Scoped
from tfmulti.step import owners

if TYPE_CHECKING:
    from tfmulti.step.sharded_state import Shards

# Within `collective_reads`: a function that is called before the first read.
_gathers = Scoped(None)
_numbers = itertools.count()
_MAKE_ROOM = (
    "Make room in the folder of temporary files, or name another one in TMPDIR, and call "
    "tfmulti.gather_optimizer_state(model) on every worker."
)


class SlotVariable(keras.Variable):
    """A slot of an optimizer, such as a momentum, that one worker keeps.

    On the other workers it has a name and a shape, but no memory. A value that is assigned there
    is written to a file, and reading it in a step is an error.

    Attributes:
        owner: The number of the worker that keeps it.
        is_here: Whether that is this worker.
        has_whole: Whether this worker keeps the whole value.
        own_counter: What counts the runs of steps that assign it by themselves, or None.

    Args:
        shards: The shards of the optimizer.
        owner: The number of the worker that keeps it.
        is_here: Whether this worker keeps it.
        shape: Its shape.
        initializer: Its initializer.
        dtype: Its dtype.
        name: Its name.
        with_weight: Whether Keras reads it on all workers together with its sharded weight, as a
            moving average; it is empty where the weight is.
        held: The shape of this worker's part; None if the slot is not split.
    """

    own_counter = None

    def __init__(
        self,
        shards: Shards,
        owner: int,
        is_here: bool,
        shape,
        initializer,
        dtype,
        name: str,
        with_weight=False,
        held=None,
    ):
        self.owner, self.is_here, self._shards = owner, is_here, shards
        self._with_weight = with_weight
        self._whole = tf.TensorShape(shape)
        initializer = keras.initializers.get(initializer) if self.is_here else np.zeros([0])
        dtype = dtype or keras.config.floatx()
        super().__init__(initializer, held or self._whole, dtype, trainable=False, name=name)

    @property
    def shape(self):
        """The shape of the owner's value."""
        return self._whole

    @property
    def counters(self) -> list[tf.Variable]:
        """What counts the updates that change it."""
        return [self._shards.updates]

    @property
    def has_whole(self) -> bool:
        """Whether this worker keeps the whole value."""
        return self.is_here

    @property
    def value(self):
        """The owner's `tf.Variable`; on another worker, outside of a step, the value that it keeps.

        Raises:
            RuntimeError: On another worker, in a step, or if the value is not kept.
        """
        if not (self.is_here or (self._with_weight and keras_compat.are_held_values())):
            if not keras_compat.are_held_values() and _is_outside_of_steps():
                return tf.convert_to_tensor(self.numpy())
            raise RuntimeError(
                "With sharded state, a slot exists only on its owner and can be read only in the "
                f"update of its own variable. Received: a read of {self.path}, owned by worker "
                f"{self.owner}, on worker {self._shards.worker}. Update each variable from its own "
                "slots and do not log slots in a step, or leave shard out for this optimizer."
            )
        return super().value

    def assign(self, value):
        """Assigns the whole value on the owner; the other workers keep it in a file."""
        if self.is_here:
            super().assign(value)
        elif not keras_compat.are_held_values():
            refuse_other_shape(self, value)
        # In an update only the owner has the value, and others an empty one.
        if not keras_compat.are_held_values():
            # On the owner too: all workers must agree on whether the value is known.
            self._shards.values.keep_value(self, value)
        return value

    def numpy(self) -> np.ndarray:
        """Returns the whole value; see `OwnedValues.read`."""
        return self._shards.values.read(self)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)


def _is_outside_of_steps() -> bool:
    """Whether this thread runs neither a replica's function nor a trace."""
    in_step = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return tf.executing_eagerly() and not in_step


class OwnedValues:
    """Reads slots and sharded weights, each kept by one worker, outside of a step.

    A gathered value is kept in a temporary file, and is valid until a step runs that changes it.

    Args:
        strategy: A strategy with one replica for each worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = weakref.ref(strategy)
        # By the number of a variable: how often it had changed when its value was kept, and where
        # that is in the file.
        self._kept_at: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        # By number: why a value could not be written, on this worker.
        self._unwritten: dict[int, OSError] = {}
        # By shape and dtype: where values of variables that no longer exist are in the file.
        self._free: dict[tuple, list[int]] = {}
        # Not in memory, which may be too small for the values of all workers. The file has no name,
        # so that a killed process leaves nothing behind.
        self._file, self._lock = tempfile.TemporaryFile(), threading.Lock()
        # Python warns of a file that only the collector of garbage closes.
        weakref.finalize(self, self._file.close).atexit = False
        self._functions: dict[tuple, Callable] = {}

    def read(self, variable) -> np.ndarray:
        """Returns a variable's whole value.

        Within `collective_reads` it comes from its owner. Otherwise it is this worker's own, or the
        one that `keep` has kept.

        Raises:
            RuntimeError: If the value was not kept, or a step has changed it since.
        """
        if is_gathering():
            join_gathering()
            return self.gathered(variable)
        if not self.is_kept(variable):
            # On the owner too: if only the other workers failed, it would wait for them later.
            raise RuntimeError(
                "A sharded variable can be read only in callbacks.Checkpoint, in ModelCheckpoint, "
                f"and after `fit`, when it has been gathered. Received: a read of {variable.path}, "
                f"which is owned by worker {variable.owner}, at another time. Call "
                "tfmulti.gather_optimizer_state(model) on every worker first."
            )
        if variable.has_whole:
            with keras_compat.held_values():
                return keras.ops.convert_to_numpy(variable.value)
        number = _number_of(variable)
        if number in self._unwritten:
            raise RuntimeError(
                "A sharded variable can be read on a worker that could keep its value in a "
                f"temporary file. Received: a read of {variable.path}, which is owned by worker "
                f"{variable.owner}, after an error: {self._unwritten[number]}. {_MAKE_ROOM}"
            ) from self._unwritten[number]
        with self._lock:
            self._file.seek(self._begins[number])
            # NumPy saves no name of a dtype that it does not know, such as bfloat16.
            return np.load(self._file).view(tf.as_dtype(variable.dtype).as_numpy_dtype)

    def keep(self, variables) -> None:
        """Gathers other workers' variables into a file of this worker; a collective.

        Afterwards a script can save the model on a single worker.
        """
        for variable in variables:
            self.keep_value(variable, self.gathered(variable))

    def keep_again(self, variables) -> None:
        """Keeps the new values of variables that were kept and have changed since; a collective."""
        self.keep([v for v in variables if self.is_kept(v)])

    def keep_value(self, variable, value):
        """Keeps a variable's whole value, which all workers know; returns it.

        A step that is traced counts its runs instead, each of which changes the value. Where the
        file cannot be written, only reading the value later is an error: workers that have written
        theirs would wait for this one, and a run that saves nothing does not need them.
        """
        if tf.executing_eagerly():
            number = _number_of(variable)
            if not variable.has_whole:
                # As the owner's assignment does: `read` takes the file's bytes for this dtype.
                dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
                self._write(variable, number, np.asarray(value, dtype))
            self._kept_at[number] = _num_changes(variable)
        else:
            if variable.own_counter is None:
                variable.own_counter = create_counter()
            variable.own_counter.assign_add(1)
        return value

    def _write(self, variable, number, array):
        """Writes a value, or notes why that is impossible."""
        # Places in the file that variables of this shape can have, when others are deleted.
        free = self._free.setdefault((tuple(variable.shape), variable.dtype), [])
        self._unwritten.pop(number, None)
        is_new = number not in self._begins
        found = [free.pop()] if is_new and free else []
        try:
            with self._lock:
                begin = found[0] if found else self._begins.get(number)
                if begin is None:
                    begin = self._file.seek(0, os.SEEK_END)
                self._file.seek(begin)
                np.save(self._file, array)
                # Else the error would come with whatever uses the file next.
                self._file.flush()
                if is_new:
                    # A place that is not wholly written would end where the next one begins.
                    self._begins[number] = begin
                    # It holds no reference to this object, and takes no lock: it may run any time.
                    weakref.finalize(variable, free.append, begin).atexit = False
        except OSError as error:
            free.extend(found)
            self._unwritten[number] = error
            warnings.warn(
                f"Weights or slots of other workers cannot be kept here: {error}. Training goes "
                f"on; reading or saving them on this worker is an error. {_MAKE_ROOM}",
                stacklevel=2,
            )

    def forget(self, variable) -> None:
        """Forgets a kept value, before steps that may change it."""
        self._kept_at.pop(_number_of(variable), None)

    def is_unwritten(self, variable) -> bool:
        """Whether this worker could not write a value that it should keep."""
        return _number_of(variable) in self._unwritten

    def is_kept(self, variable) -> bool:
        """Whether this worker keeps a variable's whole value, which no step has changed since."""
        return self._kept_at.get(_number_of(variable)) == _num_changes(variable)

    def gathered(self, variable) -> np.ndarray:
        """Returns a variable's whole value from its owner; a collective."""
        own = tf.zeros([0], variable.dtype)
        if variable.is_here:
            with keras_compat.held_values():
                own = tf.convert_to_tensor(variable.value)
        split = getattr(variable, "split", None)
        # A model has many variables of one shape, and a trace takes longer than most gathers.
        alike = tuple(variable.shape), variable.dtype, variable.owner, split
        if alike not in self._functions:
            self._functions[alike] = self._trace_gather(own, variable)
        [value] = self._strategy().experimental_local_results(self._functions[alike](own))
        return np.asarray(value)

    def _trace_gather(self, own, variable):
        """Returns a function of this worker's value, or its part, that gives the whole value."""
        get_strategy, shape, owner = self._strategy, variable.shape, variable.owner
        split = getattr(variable, "split", None)

        def on_replica(own):
            if split is not None:
                return split.join(get_strategy(), own)
            return owners.receive_from(get_strategy(), own, owner, shape)

        run = tf.function(lambda own: get_strategy().run(on_replica, args=(own,)), autograph=False)
        # If called directly, TensorFlow would warn of one function's traces for many shapes.
        return run.get_concrete_function(own)


def is_known(weight: keras.Variable) -> bool:
    """Whether this worker knows the whole value of a weight, sharded or not, outside of a step."""
    return not hasattr(weight, "is_here") or weight.parameters.values.is_kept(weight)


def create_counter() -> tf.Variable:
    """Returns a variable that counts what has run, unlike `iterations`, which files restore."""

    def create():
        with tf.device("CPU:0"):
            return tf.Variable(0, trainable=False, dtype=tf.int64, name="tfmulti_changes")

    # In the strategy's scope it would be a variable of all workers.
    return keras_compat.call_outside_scope(create)


def _num_changes(variable) -> int:
    own = [] if variable.own_counter is None else [variable.own_counter]
    return sum(int(counter.numpy()) for counter in (*variable.counters, *own))


def refuse_other_shape(variable, value) -> None:
    """Raises ValueError for a value of another shape than a variable's, as Keras's `assign` does.

    A worker that holds nothing, or a part, of the variable has no array that would raise it.

    Args:
        variable: A variable.
        value: The whole value that is assigned to it.
    """
    shape = tf.TensorShape(value.shape if hasattr(value, "shape") else np.shape(value))
    if not shape.is_compatible_with(variable.shape):
        raise ValueError(
            "A value that is assigned to a variable must have the shape of the variable. "
            f"Received: a value of shape {shape} for {variable.path}, of shape "
            f"{tuple(variable.shape)}. Load the weights of a model with layers of the same sizes."
        )


def _number_of(variable) -> int:
    """Returns a variable's number; unlike an `id` it is never reused."""
    if marks.NUMBER.get(variable) is None:
        marks.NUMBER.set(variable, next(_numbers))
    return marks.NUMBER.get(variable)


def collective_reads(
    join: Callable[[], None] = lambda: None,
) -> contextlib.AbstractContextManager:
    """Makes reading slots a collective within the context, which every worker must enter.

    Args:
        join: Called once, before the first read; it raises an error if other workers do not enter.
    """
    return _gathers.set_to(functools.cache(join))


def join_gathering() -> None:
    """Waits for all workers before the first collective within `collective_reads`."""
    _gathers.value()


def forget_kept(variable) -> None:
    """Forgets the kept value of a weight or slot that one worker holds; of others none is kept."""
    holder = getattr(variable, "_shards", None) or getattr(variable, "parameters", None)
    if holder is not None:
        holder.values.forget(variable)


def is_gathering() -> bool:
    """Whether all workers read slots now; see `collective_reads`."""
    return _gathers.value is not None


class Watched(list):
    """A list of variables that records the place of the one that a loop has reached."""

    def __init__(self, variables):
        super().__init__(variables)
        self.current = None

    def __iter__(self):
        for place, variable in enumerate(super().__iter__()):
            self.current = place
            yield variable
        self.current = None
