"""Local steps: each worker takes k steps by itself, and then all average their weights (local SGD).

In a local step a worker computes what one device would compute from the worker's own rows:
gradients, batch statistics and the divisors of losses are not reduced. Only the logs are those of
all workers. After k steps all weights, the slots of optimizers and the moving statistics of layers
are averaged over the workers (Stich, 2019, https://arxiv.org/abs/1805.09767). They are also
averaged before anything outside of training steps uses them: at the end of an epoch, in `evaluate`
and `predict`, and in checkpoints.

A worker whose replica batch is empty does not change its weights in that step.

All workers share one loss scale: if the scaled gradients of one worker overflow, all workers skip
the step and halve the scale, so that the scale and the counts of steps are the same everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.runtime.scoped import Scoped, with_attributes
from tfmulti.step import apply, averaged, model_contents, owners
from tfmulti.step.rows import ReplicaBatch, as_current, current_replica_batch

# How much is averaged at once, which needs as much additional memory.
_ROUND_BYTES = 64 * 2**20
_FLOATS = ("float32", "float64")
# The operations of the updates in the step that is traced, as `keras_compat.operations_within` has
# them.
_updates = Scoped(None)
_numbers = itertools.count()
# A model's variables are not looked through where nobody takes local steps.
_all_averages: weakref.WeakSet[Average] = weakref.WeakSet()


def take_local_steps(optimizer: keras.optimizers.Optimizer, synchronize_every: int) -> None:
    """Makes an optimizer's training average weights every `synchronize_every` steps.

    Args:
        optimizer: The optimizer.
        synchronize_every: The steps between two averages, at least 2.

    Raises:
        ValueError: If a worker has several replicas.
    """
    strategy = keras_compat.strategy_of(optimizer)
    if strategy.num_replicas_in_sync == 1 or not keras_compat.is_ours(strategy):
        return
    if topology.num_local_replicas(strategy) > 1:
        raise ValueError(
            "`synchronize_every` needs workers with one replica each. Received: "
            f"synchronize_every={synchronize_every}, {topology.num_local_replicas(strategy)} "
            "replicas in this process. Use synchronize_every=1, or start one worker for each "
            "device: python -m tfmulti.launch --num_workers N."
        )
    marks.SYNCHRONIZE_EVERY.set(optimizer, synchronize_every)


def steps_of(model: keras.Model | None) -> int:
    """Returns the steps between two averages of a model's weights; 1 without local steps.

    It is 1 within verification, which compares steps that reduce gradients with one device.

    Args:
        model: The model that is trained, or None.

    Raises:
        ValueError: If the optimizers of the model differ in it.
    """
    if model is None or keras_compat.in_separate_traces():
        return 1
    optimizers = model_contents.optimizers_in_use(model)
    inner = [keras_compat.inner_optimizer(optimizer) for optimizer in optimizers]
    numbers = [marks.SYNCHRONIZE_EVERY.get(each) for each in inner]
    if len(set(numbers)) > 1:
        received = [f"{type(each).__name__} with {n}" for each, n in zip(inner, numbers)]
        raise ValueError(
            "`synchronize_every` must be the same for all optimizers of a model, whose weights "
            f"are averaged together. Received: {', '.join(received)}. "
            "Wrap each with tfmulti.DistributedOptimizer(optimizer, synchronize_every=...). If one "
            "is that of an inner model that the step does not update, set its trainable = False."
        )
    return max(numbers, default=1)


def on_local_rows(fn, strategy):
    """Returns a step that computes what one device computes from the rows of this replica.

    Args:
        fn: The step, a function of one batch.
        strategy: A strategy with one replica for each worker.
    """

    def step(data):
        local = with_attributes(strategy, takes_local_step=True)
        with keras_compat.as_one_device(strategy), local:
            return fn(data)

    return step


@contextlib.contextmanager
def over_all_workers():
    """Suspends a local step for a metric, which sees the rows of all workers, as the logs do."""
    batch, strategy = current_replica_batch(), tf.distribute.get_strategy()
    if batch is None or not in_local_step():
        yield
        return
    # The local step may have counted its own rows.
    batch = dataclasses.replace(batch, num_global=None)
    with keras_compat.among_all_replicas(strategy), as_current(batch):
        yield


def in_local_step() -> bool:
    """Whether this thread traces a step that a worker takes by itself."""
    return getattr(tf.distribute.get_strategy(), "takes_local_step", False)


@contextlib.contextmanager
def keeping_weights(batch: ReplicaBatch) -> Iterator[None]:
    """Undoes what a local step without rows assigns, besides the updates of optimizers.

    Such are weights and averages that a step computes by itself, and states of layers that a dummy
    row would change.

    Args:
        batch: The worker's rows.
    """
    if not batch.may_be_empty:
        yield
        return
    apart = {id(variable) for variable in averaged.accumulating(batch.model)}
    known = [*averaged.variables_of(batch.model), *averaged.if_assigned(batch.model)]
    known = [variable for variable in known if id(variable) not in apart]
    before = {id(variable): variable.value.read_value() for variable in known}
    with _updates.set_to([]) as updates:
        yield
        assigned = keras_compat.variables_assigned(known, apart=updates)

    def put_back():
        for variable in assigned:
            variable.value.assign(before[id(variable)])
        return tf.constant(True)

    if assigned:
        tf.cond(batch.num_real > 0, lambda: tf.constant(False), put_back)


def update(optimizer: keras.optimizers.Optimizer, grads, variables) -> None:
    """Applies the update of an optimizer; a local step without rows only counts it.

    The gradients of an empty replica batch are 0. They may be accumulated, but in an update
    momentum and weight decay would change the weights.

    Args:
        optimizer: The optimizer.
        grads: The gradients.
        variables: Their variables, or None for those that it was built for.
    """

    def update_weights():
        apply.original(optimizer)(grads, variables)
        return tf.constant(True)

    def count():
        optimizer.iterations.assign_add(1)
        return tf.constant(True)

    every, is_local = marks.SYNCHRONIZE_EVERY.get(optimizer), in_local_step()
    if every > 1 and not is_local and not keras_compat.in_separate_traces():
        _refuse_own_loop(every)
    batch, accumulates = current_replica_batch(), optimizer.gradient_accumulation_steps
    first = keras_compat.next_op()
    if not is_local or batch is None or not batch.may_be_empty or accumulates:
        update_weights()
    else:
        # Slots cannot be created within a branch.
        if not optimizer.built and variables is not None:
            optimizer.build(variables)
        tf.cond(batch.num_real > 0, update_weights, count)
    if _updates.value is not None and not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        _updates.value.append((graph, first, keras_compat.next_op()))


def _refuse_own_loop(every):
    raise ValueError(
        "`synchronize_every` needs model.fit or model.train_on_batch, which count the steps of a "
        f"model. Received: synchronize_every={every}, and an update in a custom training loop. "
        "Train with fit, or leave synchronize_every out."
    )


def is_on_any(condition: tf.Tensor) -> tf.Tensor:
    """Returns, for each bool of a vector, whether it is true on any worker, in a local step."""
    if not in_local_step():
        return condition
    strategy = tf.distribute.get_strategy()
    return owners.all_reduce(strategy, tf.cast(condition, tf.float32)) > 0


def count_step(model: keras.Model) -> None:
    """Counts a local step of a model, and averages after every k-th; called after each step."""
    average_of(model).count_step(steps_of(model))


def average_of(model: keras.Model) -> Average:
    """Returns the `Average` of a model, which is created at the first local step."""
    found = marks.AVERAGE.get(model)
    if found is None:
        found = Average(model)
        marks.AVERAGE.set(model, found)
    return found


def average_weights(model: keras.Model) -> None:
    """Averages weights and slots over workers, if local steps were taken since the last average.

    `fit`, `evaluate`, `predict` and `callbacks.Checkpoint` do this themselves. Call it on every
    worker after `train_on_batch`, before one worker saves the model. Without local steps it has no
    effect.

    Args:
        model: The model.

    Example:
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> average_weights(model)
    """
    for average in _averages_of(model):
        average.settle()


def num_pending(model: keras.Model) -> int:
    """Returns the local steps since the last average; 0 if all workers hold the same weights."""
    return max((int(average.pending.numpy()) for average in _averages_of(model)), default=0)


def _averages_of(model) -> list[Average]:
    """Returns the averages of all models that share weights with a model, in their order."""
    if not len(_all_averages):
        return []
    averages = {each for variable in model.variables for each in marks.AVERAGES.get(variable)}
    return sorted(averages, key=lambda average: average.number)


class Average:
    """Averages a model over workers, and counts the local steps since the last average.

    Args:
        model: The model.

    Attributes:
        number: How many were created before, the same on all workers.
        pending: The local steps since the last average, the same on all workers.
    """

    def __init__(self, model: keras.Model):
        self._model, self._strategy = model, model.distribute_strategy
        self._settle, self._known = None, []
        # What steps of a function of the model change; a later `compile` may freeze some of it.
        self._changed: list[keras.Variable] = []
        self._function = None
        # Frozen weights that a step assigns by itself, such as a teacher's moving averages.
        self._assigned: list[keras.Variable] = []
        self.number = next(_numbers)
        _all_averages.add(self)
        # It is created while the first step is traced, and must outlive that graph.
        with tf.init_scope(), tf.device("CPU:0"):
            self.pending = tf.Variable(0, trainable=False, dtype=tf.int32, name="tfmulti_pending")

    def count_step(self, every: int) -> None:
        """Counts a step, and averages after every `every` steps; in cross-replica context."""
        self._note_changed()
        pending = self.pending.assign_add(1)
        # All workers have the same count, so either all of them reduce or none.
        tf.cond(pending >= every, self._average, lambda: tf.constant(False))

    def settle(self) -> None:
        """Averages if steps are pending on any worker; a collective outside of steps."""
        variables = self._variables()
        # Traced again for other variables, on all workers alike. The list keeps the variables
        # alive, because a new one could get the id of a deleted one.
        if self._settle is None or list(map(id, variables)) != list(map(id, self._known)):
            self._settle = tf.function(self._settle_pending, autograph=False)
            self._known = variables
        self._settle()
        # A step that was traced before layers were frozen still changes them.
        if self._model.train_function is not self._function:
            self._changed = averaged.variables_of(self._model)

    def _variables(self):
        """Returns what is averaged now, and what steps since the last average may have changed."""
        some = [*self._changed, *self._assigned, *averaged.variables_of(self._model)]
        return list({id(variable): variable for variable in some}.values())

    def _note_changed(self):
        """Notes what the step that is being traced changes, on the variables too."""
        # Later, the traced steps run again without this.
        assigned = keras_compat.variables_assigned(averaged.if_assigned(self._model))
        known = {id(variable): variable for variable in (*self._assigned, *assigned)}
        self._assigned = list(known.values())
        self._changed, self._function = self._variables(), self._model.train_function
        for variable in self._changed:
            known = marks.AVERAGES.get(variable)
            if self not in known:
                marks.AVERAGES.set(variable, (*known, self))

    def _settle_pending(self):
        def count():
            own = tf.cast(self.pending.read_value(), tf.float32)
            return owners.all_reduce(self._strategy, own)

        pending = self._strategy.run(count)
        pending = self._strategy.experimental_local_results(pending)[0]
        tf.cond(pending > 0, self._average, lambda: tf.constant(False))

    def _average(self):
        exact = {id(state) for state in averaged.states_of(self._model)}
        some = [(v, _sent_as(v, id(v) in exact)) for v in self._variables()]
        self._strategy.run(functools.partial(_average_here, some, self._strategy))
        self.pending.assign(0)
        return tf.constant(True)


def _average_here(variables, strategy):
    """Averages in a replica, some megabytes at a time.

    Args:
        variables: Variables, each with the dtype in which it is added.
        strategy: The strategy.
    """
    before = []
    for some, dtype in _rounds(variables):
        with tf.control_dependencies(before):
            # A read of a variable has no device, but a reduction needs one for its sum.
            values = [tf.identity(tf.cast(variable.value, dtype)) for variable in some]
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
        before = list(sums)
        for variable, total in zip(some, sums):
            mean = total / tf.cast(strategy.num_replicas_in_sync, total.dtype)
            variable.assign(tf.cast(mean, variable.dtype))


def _sent_as(variable, is_state) -> str:
    """Returns the dtype in which a variable is added.

    Scalars and states of layers are small and often equal on all workers. They are added in
    float64, because in float32 the mean of three equal numbers can differ from them.
    """
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if is_state or not variable.shape:
        return "float64"
    return dtype if dtype in _FLOATS else "float32"


def _rounds(variables) -> Iterator[tuple[list, str]]:
    """Yields lists of variables of one dtype and some megabytes, in their order."""
    for dtype in dict.fromkeys(dtype for _, dtype in variables):
        some = [variable for variable, sent_as in variables if sent_as == dtype]
        for places in owners.rounds([owners.bytes_of(each) for each in some], _ROUND_BYTES):
            yield [some[place] for place in places], dtype
