"""Sharded parameters: each worker holds the large weights that it owns, and gathers the others.

Reading such a weight in a step returns its whole value, which its owner sends. The gradient is
added over all workers, for the owner. This is stage 3 of ZeRO (Rajbhandari et al., 2020,
https://arxiv.org/abs/1910.02054). A weight has one owner, so that any optimizer computes what it
computes on one device. `tfmulti.parallel.sharded_parameters` makes layers gather their weights only
during their calls.
"""

from __future__ import annotations

import contextlib
import weakref

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.runtime.scoped import Scoped
from tfmulti.step import apply, assignments, owners, slots
from tfmulti.step.rows import current_replica_batch, in_graph_of_step

LARGE_BYTES = 2**14
"""Smaller weights stay on every worker: sending them would cost time and save little memory."""
# Sums for owners, `owners.reduce_to`, are of at least 32 bits.
_FLOATS = (tf.float32, tf.float64)
_in_stage = Scoped(False)


class ShardedParameter(keras_compat.HeldVariable):
    """A weight that only its owner holds.

    Attributes:
        owner: The number of the worker that holds it.
        counters: The variables that count the updates of the optimizers that update it. The
            optimizers themselves, with their slots, would stay in memory as long as the weight.
        own_counter: What counts the runs of steps that assign it by themselves, or None.
        assigned_in: The graphs of branches that assign it, or None.
        reads: A weak reference to the latest step that reads it, and how often that step does.
        unreduced: Whether its latest gradient is still to be added over workers.
        stages: The number of stages of the pipeline that contains it, or None. Only its stage
            computes with it. With several copies of the stages each copy has an owner; `owner` is
            that of the first copy.
    """

    reads, unreduced, stages, own_counter, assigned_in = (None, 0), False, None, None, None

    @property
    def has_whole(self) -> bool:
        """Whether this worker holds the whole value."""
        return self.is_here

    def whole(self) -> tf.Tensor:
        """Returns the whole value; in a step a collective, with a gradient."""
        if is_stage():
            raise RuntimeError(
                "A pipeline stage can read only the weights of its own layers. Received: a read of "
                f"{self.path}, held by worker {self.owner}, in the call of a layer in another "
                "stage. Choose `stages` so that both layers are in one stage, or share the layer "
                "instead of its weight."
            )
        if in_replica():
            note_read(self)
            assignments.refuse_stale_read(self)
            with in_graph_of_step():
                return gather(self, self.held())
        if not tf.executing_eagerly():
            raise RuntimeError(
                "A sharded weight cannot be used in a graph outside a training, evaluation or "
                f"prediction step. Received: {self.path}, which worker {self.owner} holds. To "
                "export the model, call model.save on the chief after `fit`, load that file with "
                "keras.models.load_model outside the strategy's scope, and export the loaded model."
            )
        return tf.convert_to_tensor(self.numpy())

    def assign(self, value):
        """Assigns the whole value on the owner; the other workers keep it in a file."""
        if not keras_compat.are_held_values():
            value = assignments.value_to_assign(value)
            assignments.note_assigned(self)
        if self.is_here or keras_compat.in_stateless_scope():
            super().assign(value)
        elif not keras_compat.are_held_values():
            slots.refuse_other_shape(self, value)
        if not (keras_compat.are_held_values() or keras_compat.in_stateless_scope()):
            self.parameters.values.keep_value(self, value)
        return value

    def numpy(self):
        """Returns the whole value; see `slots.OwnedValues.read`."""
        return self.parameters.values.read(self)

    __array__ = slots.SlotVariable.__array__


class Parameters:
    """The sharded parameters of a strategy.

    Args:
        strategy: A strategy with one replica for each worker.

    Attributes:
        values: Reads them outside of a step.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = weakref.ref(strategy)
        self.worker = topology.worker_index(strategy)
        # The bytes that each worker holds. Those of deleted models count too: each worker deletes
        # them at a time of its own, and all must choose the same owners.
        self._held = [0] * topology.num_workers(strategy)
        self.values = slots.OwnedValues(strategy)

    def shard(
        self, variable: keras.Variable, owner: int | None = None, *, keep: bool = False
    ) -> None:
        """Shards a variable, if it is large and not sharded yet.

        Args:
            variable: A weight.
            owner: The worker that will hold it; None for the one that holds the fewest bytes.
            keep: Whether the other workers keep the value that they have of it in a file. `fit`
                compares these values: a program may have loaded it on one worker only.
        """
        if isinstance(variable, ShardedParameter) or not isinstance(variable, keras.Variable):
            return
        if not keras_compat.is_initialized(variable) or not is_large(variable):
            return
        owner = owners.with_fewest(self._held) if owner is None else owner
        keep = keep and tf.executing_eagerly()
        value = keras.ops.convert_to_numpy(variable) if keep else None
        self._hold(variable, owner, owner == self.worker)
        if keep:
            self.values.keep_value(variable, value)

    def place(self, variable: keras.Variable, stage: int, stages: int) -> None:
        """Gives a variable of any size to a stage of a pipeline; a collective.

        Args:
            variable: A weight, which another worker may hold.
            stage: The number of the stage.
            stages: The number of stages. Worker i has stage `i % stages`.
        """
        is_here = self.worker % stages == stage
        if not isinstance(variable, ShardedParameter):
            self._hold(variable, stage, is_here)
        # With several copies of the stages, workers beside its owner need the value too.
        elif variable.owner != stage or stages < len(self._held):
            value = self.values.gathered(variable)
            keras_compat.move_held(variable, self._strategy(), value if is_here else None)
            self._held[variable.owner] -= owners.bytes_of(variable)
            self._held[stage] += owners.bytes_of(variable)
            variable.owner = stage
        variable.stages = stages

    def give_up(self, variable: ShardedParameter) -> tf.Tensor:
        """Returns a variable's value on all workers, before it becomes a `SplitParameter`."""
        self._held[variable.owner] -= owners.bytes_of(variable)
        return tf.convert_to_tensor(self.values.gathered(variable))

    def _hold(self, variable, owner, is_here):
        self._held[owner] += owners.bytes_of(variable)
        keras_compat.hold(variable, ShardedParameter, self._strategy(), is_here)
        variable.owner, variable.parameters = owner, self
        variable.counters = []


def in_replica() -> bool:
    """Whether this thread runs or traces a replica's function, where collectives can be called."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def refuse_several_replicas(
    strategy: tf.distribute.Strategy, name: str = "shard", options: str = ""
) -> None:
    """Raises ValueError if a worker has several replicas, which would share its shards.

    Args:
        strategy: The strategy.
        name: What the user has asked for.
        options: What else the launcher needs for it.
    """
    if topology.num_local_replicas(strategy) > 1:
        raise ValueError(
            f"`{name}` needs workers with one replica each. Received: "
            f"{topology.num_local_replicas(strategy)} replicas in this process. "
            f"Start one worker for each device: python -m tfmulti.launch --num_workers N{options}."
        )


def is_large(variable: keras.Variable) -> bool:
    """Whether a variable is worth sharding: at least 16 KiB of float32 or float64."""
    dtype = tf.as_dtype(keras.backend.standardize_dtype(variable.dtype))
    return dtype in _FLOATS and owners.bytes_of(variable) >= LARGE_BYTES


def has_sharded(model: keras.Model) -> bool:
    """Whether a model has sharded weights that are trained."""
    return any(isinstance(variable, ShardedParameter) for variable in model.trainable_variables)


def has_copies(variable: keras.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Whether several workers hold a variable, for copies of a stage of a pipeline."""
    return getattr(variable, "stages", None) not in (None, topology.num_workers(strategy))


def is_state(variable: keras.Variable, layer: keras.layers.Layer) -> bool:
    """Whether a layer may change a variable in its calls, as batch normalization does.

    Neither `layer.trainable` nor `variable.trainable` counts: users freeze and unfreeze layers
    after their weights have been placed.
    """
    changes = not keras_compat.is_stock(type(layer))
    changes = changes or isinstance(
        layer, (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
    )
    return changes and any(variable is each for each in keras_compat.own_state(layer))


def of_strategy(strategy: tf.distribute.Strategy) -> Parameters:
    """Returns the sharded parameters of a strategy."""
    found = marks.PARAMETERS.get(strategy)
    if found is None:
        found = Parameters(strategy)
        marks.PARAMETERS.set(strategy, found)
    return found


def stage() -> contextlib.AbstractContextManager:
    """Marks the context in which a stage of a pipeline runs, with weights that are given to it."""
    return _in_stage.set_to(True)


def is_stage() -> bool:
    """Whether a stage of a pipeline runs; see `stage`."""
    return _in_stage.value


def note_read(parameter: ShardedParameter) -> None:
    """Counts a read of a parameter in the forward pass of a step."""
    step = current_replica_batch() or tf.compat.v1.get_default_graph()
    # The parameter lives longer than the graph of a step, and must not keep it in memory.
    parameter.reads = (weakref.ref(step), num_reads(parameter) + 1)


def num_reads(parameter: ShardedParameter) -> int:
    """Returns how often the step that is traced has read a parameter; see `note_read`."""
    step = current_replica_batch() or tf.compat.v1.get_default_graph()
    known, count = parameter.reads
    return count if known is not None and known() is step else 0


def receive(parameter: ShardedParameter, held: tf.Tensor) -> tf.Tensor:
    """Returns a parameter's whole value, without a gradient; see `gather`.

    Raises:
        RuntimeError: In a vectorized loop, which workers run once for each of their rows.
    """
    if keras_compat.in_vectorized_loop():
        raise RuntimeError(
            "A sharded weight cannot be gathered within `tf.vectorized_map` or an eager "
            "`tape.jacobian`, which run once for each row of a worker, and workers may have "
            f"different numbers of them. Received: {parameter.path}. Call the layer on all rows at "
            "once and without run_eagerly, or compile with shard='state', which keeps them whole."
        )
    strategy = tf.distribute.get_strategy()
    return owners.receive_from(strategy, held, parameter.owner, parameter.shape)


def gather(
    parameter: ShardedParameter,
    held: tf.Tensor,
    for_stages: bool = False,
    whole: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns a parameter's whole value, with a gradient that is added for its owner.

    The gradient stays unreduced, and is added once those of all reads are known, if a step reads
    the parameter more than once, if it is a sparse gradient of a table, if code other than Keras's
    own may use it, or over the ring, which adds those of all owners together; see `is_unreduced`.

    Call it in a replica, on every worker.

    Args:
        parameter: The parameter.
        held: The value that this worker holds: the parameter's, or an empty tensor.
        for_stages: Whether stages of a pipeline or parts of a split layer use it. Then every
            worker, even one without rows, has a part of the gradient of all workers' rows.
        whole: The result of `receive`; None to receive it now.
    """
    strategy, dtype = tf.distribute.get_strategy(), held.dtype
    shape, owner, is_here = parameter.shape, parameter.owner, parameter.is_here
    together = owners.adds_together(strategy)

    @tf.custom_gradient
    def add_gradient(value, *received):
        def gradient(upstream):
            is_sparse, several = isinstance(upstream, tf.IndexedSlices), parameter.reads[1] > 1
            only_update = only_update_reads()
            parameter.unreduced = is_sparse or several or not only_update or together
            if parameter.stages and current_replica_batch() is not None:
                # It is added to the gradient of the parameter's own stage, which is of all rows.
                parameter.unreduced = False
            if parameter.unreduced:
                return upstream, *nothing
            upstream = tf.ensure_shape(tf.convert_to_tensor(upstream), shape)
            upstream = upstream if for_stages else zero_without_rows(upstream)
            # Other copies of the stage, or the user's own step, need the sum beside the owner.
            if has_copies(parameter, strategy) or not only_update:
                added = owners.all_reduce(strategy, upstream)
            else:
                added = owners.reduce_to(strategy, upstream, owner)
            # Where the variable has no elements, Keras's update gets a gradient without elements.
            added = added if is_here or not only_update else tf.zeros([0], dtype)
            return added, *nothing

        nothing = [None for _ in received]
        return received[0] if received else receive(parameter, value), gradient

    return add_gradient(held, *([] if whole is None else [whole]))


def only_update_reads() -> bool:
    """Whether only Keras's own update uses the gradients of the step that is traced."""
    model = getattr(current_replica_batch(), "model", None)
    return model is not None and only_update_reads_gradients(model)


def only_update_reads_gradients(model: keras.Model) -> bool:
    """Whether Keras's own step hands what is differentiated now to an optimizer of Keras's own."""
    optimizer = getattr(model, "optimizer", None)
    # Keras's own step ends its tape before it differentiates. What a loss takes is recorded.
    if optimizer is None or keras_compat.is_taping():
        return False
    # A step, logs or an optimizer of the user's own may read the gradients, as for their norm.
    if keras_compat.has_custom_step(model, "train"):
        return False
    both = optimizer, keras_compat.inner_optimizer(optimizer)
    parts = [type(model).compute_metrics, *map(type, both)]
    return all(keras_compat.is_stock(part, "tfmulti") for part in parts) and all(
        map(apply.is_stock, both)
    )


def is_unreduced(variable) -> bool:
    """Whether the gradient of a variable that a tape has returned is still to be added."""
    return not isinstance(variable, ShardedParameter) or variable.unreduced


def may_have_dummy_row(variable) -> bool:
    """Whether a variable's gradient is still to be added and covers only this worker's rows.

    The gradient of a split weight, or of its layer's bias, covers the rows of a group, without
    a dummy row.
    """
    of_group = getattr(variable, "split", None) or marks.OF_GROUP.get(variable)
    return is_unreduced(variable) and not of_group


def with_gradient_of_rows(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose gradient is zeros for a replica batch without rows."""

    @tf.custom_gradient
    def receive(value):
        return tf.identity(value), zero_without_rows

    return receive(value)


def zero_without_rows(gradient):
    """Returns a gradient, but zeros for a replica batch without rows, where it may be NaN."""
    replica_batch = current_replica_batch()
    if replica_batch is None or not replica_batch.may_be_empty:
        return gradient
    return replica_batch.zero_if_empty(gradient)
