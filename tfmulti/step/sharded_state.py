"""Sharded optimizer state: each worker keeps the slots of the variables that it owns.

A worker updates the variables that it owns, and sends their new values to the others. It updates
whole variables, so that any optimizer computes what it computes on one device. A variable that
would make the workers' shares uneven is divided: each worker updates some of its rows, if the
optimizer is element-wise. Between CPUs, gradients that only the update reads are added for the
owner only. These are stages 1 and 2 of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).

Moving averages of weights and accumulated gradients are not sharded: Keras computes them from
values that every worker has.
"""

from __future__ import annotations

import warnings

import keras
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, marks, topology
from tfmulti.runtime.scoped import with_attributes
from tfmulti.step import clipping, model_contents, owners, parameters, slots, split_weights
from tfmulti.step.refused_updates import refusing_shared_state

_WHOLE = {"average": "use_ema", "gradient_accumulator": "gradient_accumulation_steps"}


def shard_state(optimizer: keras.optimizers.Optimizer, shard: str) -> None:
    """Makes an optimizer keep on each worker only the slots of the variables that the worker owns.

    Args:
        optimizer: The optimizer.
        shard: `"state"`, or `"parameters"` to keep large weights only on their owners as well.

    Raises:
        ValueError: If the optimizer already has its slots, its class replaces what Keras does with
            gradients that are sharded, or a worker has several replicas.
    """
    if marks.SHARDS.get(optimizer) is not None:
        return
    strategy = keras_compat.strategy_of(optimizer)
    if strategy.num_replicas_in_sync == 1 or not keras_compat.is_ours(strategy):
        return
    if optimizer.built:
        raise ValueError(
            "An optimizer must be wrapped with `shard` before it is built. Received: "
            f"{optimizer.name}, which is already built. Call "
            "tfmulti.DistributedOptimizer(optimizer, shard='state') before compile. For a model "
            "from a file: compile a new model with that optimizer, call "
            "optimizer.build(model.trainable_variables), then model.load_weights."
        )
    parameters.refuse_several_replicas(strategy)
    shards_parameters = shard == "parameters"
    if shards_parameters:
        split_weights.refuse_own_parts(optimizer)
    shards = Shards(optimizer, strategy, shards_parameters)
    marks.SHARDS.set(optimizer, shards)
    # `apply` is that of the distributed optimizer, or of the one for loss scaling around it.
    methods = {"build": _build, "update_step": _update_step}
    methods |= {"finalize_variable_values": _finalize} if shards_parameters else {}
    for name, method in methods.items():
        keras_compat.set_method(optimizer, name, method)
    keras_compat.after_updates(optimizer, shards.send_updates)
    if shards.has_owned_gradients and not keras_compat.own_parts_of_apply(optimizer):
        clipping.clip_sharded(optimizer, shards)


def _build(self, variables):
    marks.SHARDS.get(self).build(variables)


def _update_step(self, gradient, variable, learning_rate):
    shards = marks.SHARDS.get(self)
    if shards.owns(variable):
        with refusing_shared_state(self, variable):
            update = keras_compat.method_below(self, "update_step")
            update(*shards.own_rows(gradient, variable), learning_rate)


def _finalize(self, var_list):
    variables = list(var_list)
    with keras_compat.held_values():
        keras_compat.method_below(self, "finalize_variable_values")(variables)
    # A script may have gathered what they were.
    if tf.executing_eagerly():
        keep_swapped(self, variables)


def held_gradients(optimizer, gradients, variables=None) -> list:
    """Returns the gradients of an update; empty ones for weights that other workers hold.

    Args:
        optimizer: An optimizer, which may be a `LossScaleOptimizer`.
        gradients: Its gradients.
        variables: Their variables; None for those that it was built for.
    """
    shards = marks.SHARDS.get(keras_compat.inner_optimizer(optimizer))
    if shards is None or not shards.shards_parameters:
        return list(gradients)
    variables = keras_compat.updated_variables(optimizer) if variables is None else variables
    return [split_weights.held_gradient(g, v) for g, v in zip(gradients, variables)]


def owners_of_gradients(model, variables) -> list[int] | None:
    """Returns, for each variable, the only worker that needs its gradient; None if all need all.

    All workers need it if something other than an update reads it: a custom step or optimizer,
    accumulation, or loss scaling.

    Args:
        model: The model that is trained, or None.
        variables: Some of its variables.
    """
    optimizer = getattr(model, "optimizer", None)
    shards = marks.SHARDS.get(optimizer)
    if shards is None or optimizer.gradient_accumulation_steps:
        return None
    if not parameters.only_update_reads_gradients(model):
        return None
    return shards.owners_of(variables)


def gather_optimizer_state(model: keras.Model) -> None:
    """Gathers sharded optimizer state on each worker, so that a single worker can save it.

    Every worker must call it. It also gathers sharded parameters. It is needed after
    `train_on_batch` and after an interrupted `fit`; a `fit` that ends normally does it itself.
    Without sharded state it has no effect.

    Args:
        model: The model.

    Example:
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> gather_optimizer_state(model)
    """
    optimizers = model_contents.optimizers_of(model, nested=True)
    shards = [each for each in map(marks.SHARDS.get, optimizers) if each is not None]
    weights = [v for v in model.variables if isinstance(v, parameters.ShardedParameter)]
    if shards or weights:
        model.distribute_strategy.reach_together("a call of gather_optimizer_state()")
    for each in shards:
        each.values.keep(each.slots)
    if weights:
        weights[0].parameters.values.keep(weights)


def keep_swapped(optimizer: keras.optimizers.Optimizer, variables) -> None:
    """Keeps the values of weights and slots that a callback has changed between two updates.

    Args:
        optimizer: An optimizer with sharded state.
        variables: Its weights and slots that were changed, on every worker.
    """
    marks.SHARDS.get(optimizer).values.keep_again(
        [variable for variable in variables if isinstance(variable, slots.SlotVariable)]
    )
    for variable in variables:
        if isinstance(variable, parameters.ShardedParameter):
            variable.parameters.values.keep_again([variable])


class Shards:
    """The sharded state of an optimizer: which worker keeps which slots, and how updates are sent.

    Args:
        optimizer: The optimizer.
        strategy: Its strategy, with one replica for each worker.
        shards_parameters: Whether large weights are kept only on their owners as well.

    Attributes:
        worker: The number of this worker.
        slots: The slots of all workers, in the order of `optimizer.variables`.
        shards_parameters: The argument.
        values: Reads slots outside of a step.
        updates: Counts the updates that have run.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, strategy, shards_parameters: bool):
        self._optimizer, self._strategy = optimizer, strategy
        self.worker = topology.worker_index(strategy)
        self.slots: list[slots.SlotVariable] = []
        self._owners: list[int | None] = []
        # By their places, the variables whose rows are divided over all workers.
        self._splits: dict[int, split_weights.Split] = {}
        self.shards_parameters, self.updates = shards_parameters, slots.create_counter()
        self.values = slots.OwnedValues(strategy)
        self._reduces_to_owners = getattr(strategy.extended, "reduce_to_owners", None) is not None

    @property
    def has_owned_gradients(self) -> bool:
        """Whether there are gradients that only their owners have."""
        return self._reduces_to_owners or self.shards_parameters

    def build(self, variables) -> None:
        """Creates the slots that this worker keeps, and placeholders for the others.

        In the strategy's scope, creating a variable is a collective that gives every worker the
        chief's value, so the slots are created outside of it.

        Args:
            variables: The variables that the optimizer will update.
        """
        # As Keras's own: around an optimizer that was used before, `compile` may put a new
        # `LossScaleOptimizer`, which builds it for the variables that are trained now.
        if self._optimizer.built:
            return
        variables = list(variables)
        split_weights.refuse_other_updates(self._optimizer, variables)
        number = topology.num_workers(self._strategy)
        self._owners = split_weights.owners_of_updates(
            self._optimizer, variables, number, by_rows=not self.shards_parameters
        )
        self._splits = {
            place: split_weights.Split(tuple(variables[place].shape), 0, number, self.worker)
            for place, owner in enumerate(self._owners)
            if owner is None
        }
        if self.shards_parameters:
            sharded = parameters.of_strategy(self._strategy)
            for variable, owner in zip(variables, self._owners):
                sharded.shard(variable, owner, keep=True)
                if isinstance(variable, parameters.ShardedParameter):
                    variable.counters.append(self.updates)
        self._is_here = [
            getattr(variable, "is_here", owner in (None, self.worker))
            for variable, owner in zip(variables, self._owners)
        ]
        keras_compat.call_outside_scope(lambda: self._build(variables))
        self._report_shares(variables)

    def _build(self, variables):
        optimizer = self._optimizer
        before = {id(variable) for variable in optimizer.variables}
        places = {id(variable): place for place, variable in enumerate(variables)}
        watched = slots.Watched(variables)

        def add_variable_from_reference(reference_variable, name=None, initializer="zeros"):
            path = keras_compat.path_of(reference_variable)
            full_name = f"{path.replace('/', '_').replace(':', '_')}_{name or 'var'}"
            # Without the setting, a slot of that name is one of the optimizer's own.
            whole = getattr(optimizer, _WHOLE.get(name, ""), None)
            is_held = isinstance(reference_variable, parameters.ShardedParameter)
            place = places.get(id(reference_variable)) if is_held or not whole else None
            shape, dtype = reference_variable.shape, reference_variable.dtype
            split = getattr(reference_variable, "split", self._splits.get(place))
            return self._add(place, shape, initializer, dtype, full_name, bool(whole), split)

        # Without a reference, a slot belongs to the variable that the loop of `build` has reached.
        def add_variable(
            shape, initializer="zeros", dtype=None, aggregation="none", layout=None, name=None
        ):
            return self._add(watched.current, shape, initializer, dtype, name)

        def assign(variable, value):
            if getattr(variable, "is_here", True):
                type(optimizer).assign(optimizer, variable, value)

        own = {
            "assign": assign,
            "add_variable": add_variable,
            "add_variable_from_reference": add_variable_from_reference,
        }
        # Outside of the scope nothing else puts the slots on the worker's device.
        device = tf.device(self._strategy.extended.worker_devices[0])
        with with_attributes(optimizer, **own), device, keras_compat.held_values():
            keras_compat.method_below(optimizer, "build")(watched)
        for variable in optimizer.variables:
            if id(variable) not in before:
                marks.IS_SHARDED.set(variable, True)

    def _add(self, place, shape, initializer, dtype, name, with_weight=False, split=None):
        optimizer = self._optimizer
        if place is None:
            return type(optimizer).add_variable(
                optimizer, shape=shape, initializer=initializer, dtype=dtype, name=name
            )
        with keras.name_scope(optimizer.name):
            owner, is_here = self._owners[place], self._is_here[place]
            slot = (
                slots.SlotVariable(
                    self, owner, is_here, shape, initializer, dtype, name, with_weight
                )
                if split is None
                else split_weights.SplitSlot(self, split, initializer, dtype, name)
            )
        keras_compat.track_variable(optimizer, slot)
        self.slots.append(slot)
        return slot

    def _report_shares(self, variables):
        """Logs how many bytes this worker updates, and warns if the workers' shares are uneven."""
        num_workers = topology.num_workers(self._strategy)
        held = owners.bytes_of_each(variables, num_workers, self._owners)
        most, mean = max(held), sum(held) / len(held)
        logging.info(
            "Sharded state of %s: this worker updates %.1f of %.1f MB of weights.",
            self._optimizer.name,
            held[self.worker] / 1e6,
            sum(held) / 1e6,
        )
        if owners.is_uneven(held):
            largest = max(variables, key=owners.bytes_of)
            path = keras_compat.path_of(largest)
            advice = (
                "A sharded weight has one owner; tfmulti.tensor_parallel (over MPI) splits tables."
                if self.shards_parameters
                else f"{type(self._optimizer).__name__} updates it whole; with an element-wise "
                "optimizer, such as Adam, each worker updates some of its rows."
            )
            warnings.warn(
                f"Sharding is uneven: one worker keeps {most / 1e6:.1f} MB of weights or their "
                f"slots, the mean is {mean / 1e6:.1f} MB; {path} alone has "
                f"{owners.bytes_of(largest) / 1e6:.1f} MB. {advice}",
                stacklevel=2,
            )

    def owns(self, variable) -> bool:
        """Whether this worker updates a variable."""
        return self._is_here[keras_compat.variable_index(self._optimizer, variable)]

    def owners_of(self, variables) -> list[int] | None:
        """Returns owners, None for split variables; None if sums cannot be made for owners only."""
        # A variable that the optimizer does not update has no owner.
        known = {id(variable) for variable in keras_compat.updated_variables(self._optimizer)}
        if not self._reduces_to_owners or any(id(variable) not in known for variable in variables):
            return None
        return [None if hasattr(v, "split") else self._owner(v) for v in variables]

    def reduce_scalars(self, function, gradients, variables) -> tf.Tensor:
        """Returns on all workers one number for each gradient, computed where the gradient is.

        Args:
            function: Function of a gradient that returns a scalar; it must be additive over parts.
            gradients: Gradients, which may be zeros on workers that do not own the variable.
            variables: Their variables; None for those that the optimizer was built for.
        """
        if variables is None:
            variables = keras_compat.updated_variables(self._optimizer)
        # A norm of float64 gradients that is rounded to float32 would clip to another length.
        exact = any(g is not None and g.dtype == tf.float64 for g in gradients)
        dtype = tf.float64 if exact else tf.float32
        own = [
            tf.cast(function(g) if self._counts(v) else 0.0, dtype)
            for g, v in zip(gradients, variables)
        ]
        return owners.add_parts(self._strategy, tf.stack(own))

    def count(self, condition: tf.Tensor) -> tf.Tensor:
        """Returns on how many workers a bool is true."""
        return owners.add_parts(self._strategy, tf.cast(condition, tf.float32))

    def _counts(self, variable) -> bool:
        """Whether this worker contributes its part of a gradient: each part counts once."""
        split = getattr(variable, "split", None)
        if split is not None:
            # All groups have the same gradients; those of the first one count.
            return self.worker < split.parts
        # All workers have the whole gradient of a variable whose rows are divided.
        return (self._owner(variable) or 0) == self.worker

    def _owner(self, variable) -> int | None:
        return self._owners[keras_compat.variable_index(self._optimizer, variable)]

    def _split_of(self, variable) -> split_weights.Split | None:
        return self._splits.get(keras_compat.variable_index(self._optimizer, variable))

    def own_rows(self, gradient, variable) -> tuple:
        """Returns the gradient and the variable of an update, or this worker's rows of both."""
        split = self._split_of(variable)
        if split is None:
            return gradient, variable
        return split.take(gradient), self._rows(variable, split)

    def _rows(self, variable, split, part=None):
        return keras_compat.UpdatedRows(self._optimizer, variable, *split.bounds(part))

    def send_updates(self, gradients, variables) -> None:
        """Sends the new values of variables from their owners to all workers, after an update.

        Args:
            gradients: The gradients of the update.
            variables: The variables of an update, in the same order on every worker.
        """
        sent = []
        for variable in variables:
            split = self._split_of(variable)
            if split is not None:
                sent += [(self._rows(variable, split, i), i) for i in range(split.parts)]
            elif not isinstance(variable, parameters.ShardedParameter):
                sent.append((variable, self._owner(variable)))
        computed = [g for g in tf.nest.flatten(gradients, expand_composites=True) if g is not None]
        # A step that fails does so before any worker waits: MPI would match that with a later call.
        with tf.control_dependencies(computed):
            values = [tf.identity(tf.convert_to_tensor(each)) for each, _ in sent]
        rows = {i for i, (x, _) in enumerate(sent) if isinstance(x, keras_compat.UpdatedRows)}
        owned_by = [owner for _, owner in sent]
        for place, value in owners.from_owners(self._strategy, values, owned_by, rows):
            self._optimizer.assign(sent[place][0], value)
