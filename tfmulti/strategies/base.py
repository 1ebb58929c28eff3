"""`tf.distribute` strategies with three public methods repaired for Keras 3."""

from __future__ import annotations

import weakref

import tensorflow as tf

from tfmulti import devices as devices_lib
from tfmulti import keras_compat, marks, topology
from tfmulti.choices import REPLICATE
from tfmulti.step import (
    gradients,
    iterators,
    local_steps,
    losses,
    model_contents,
    replicated,
    rows,
    samples,
    wrapped_step,
)
from tfmulti.strategies import checks, feeds, loop_states, program_order


def first_local_value(strategy: tf.distribute.Strategy, values):
    """Replaces each distributed value in a nested structure by that of the first local replica.

    An empty replica batch gets a dummy row, because a model cannot be built from no rows.
    """

    def first(value):
        if isinstance(value, tf.distribute.DistributedValues):
            return strategy.experimental_local_results(value)[0]
        return value

    values = tf.nest.map_structure(first, values, expand_composites=False)
    return rows.fill_if_empty(values)


class _KerasRepairs:
    """Repairs the strategy methods that Keras 3 calls. Nothing changes for other callers."""

    repairs_keras = True
    # The chosen strategy, its devices, and the reason, for people to read.
    why = ""
    # Whether to verify a step before its first run: "auto", "always" or "never".
    verify = "auto"
    # What to do where verification finds another result: "replicate" or "error".
    on_difference = REPLICATE
    # Whether batches are kept on their way to the replicas, for spot checks.
    keeps_samples = False
    # Seconds that verification has taken so far.
    seconds_verified = 0.0
    # True while every replica computes like one device: in verification and replicated steps.
    counts_one_replica = False
    # True while a local step is traced, in which a worker computes like one device.
    takes_local_step = False
    # Whether unwrapped optimizers are accepted.
    distribute_optimizers = True
    # The generator of random operations without a seed, shared by the threads of all replicas.
    global_seeds = None
    # The model whose `fit`, `evaluate` or `predict` runs.
    in_call_of = None
    # Weak references to the outputs of the latest Keras step.
    _logs = ()

    @property
    def num_replicas_in_sync(self):
        """The number of replicas that run one step together."""
        is_one = keras_compat.computes_like_one_device(self)
        return 1 if is_one else super().num_replicas_in_sync

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on every replica; Keras's own steps also run with empty replica batches.

        There are four ways: as TensorFlow does; a replicated step, on the whole batch; a local
        step, on the worker's rows; and a wrapped step, on each replica's rows.
        """
        if self.counts_one_replica:
            return super().run(fn, args=args, kwargs=kwargs, options=options)
        kind, model = keras_compat.step_of(fn)
        several = self.num_replicas_in_sync > 1
        if several:
            self._refuse(kind, model, args)
        are_undivided = topology.num_local_replicas(self) > 1 and not _is_distributed(args[:1])
        if several and replicated.is_replicated(model, kind):
            whole = replicated.ReplicatedStep(model, kind, fn, are_undivided)
            return self._note_logs(kind, whole.run(super().run, args[0]))
        is_local = kind == "train" and several and local_steps.steps_of(model) > 1
        if is_local:
            fn = local_steps.on_local_rows(fn, self)
        is_padded = any(isinstance(rows.without_count(value), rows.Padded) for value in args)
        if kind and len(args) == 1 and (several or is_padded):
            fn = wrapped_step.wrap_step(fn, kind, model)
            if kind != "predict" and are_undivided:
                fn = wrapped_step.divide_whole_batch(fn)
        else:
            args = tuple(rows.as_user_sees(value) for value in args)
        # The gradients of a single replica are already those of the whole batch.
        fn = gradients.with_step_state(fn, reduced=not several)
        try:
            outputs = super().run(fn, args=args, kwargs=kwargs, options=options)
        except AssertionError as error:
            # TensorFlow says it in one way of tuples, and in another of the lists of `merge_call`.
            if ", len(v0) == " not in str(error):
                raise
            raise _replica_error(error) from error
        if is_local:
            local_steps.count_step(model)
        return self._note_logs(kind, outputs)

    def _note_logs(self, kind, outputs):
        if kind in ("train", "test"):
            self._logs = _weak(outputs)
        if kind is None and self.num_replicas_in_sync > 1 and not tf.executing_eagerly():
            loop_states.warn_of_states(self)
        return outputs

    def _refuse(self, kind, model, args):
        """Raises ValueError for a step that several replicas cannot run."""
        if kind is None and tf.inside_function() and _is_distributed(args):
            self._refuse_unknown_step()
        if kind in ("train", "test"):
            _refuse_jit_compile(model, self.num_replicas_in_sync)
        if kind == "train":
            checks.refuse_outside_scope(model)
            if not self.distribute_optimizers:
                _refuse_bare(model)

    def _refuse_unknown_step(self):
        """Raises ValueError in a custom `make_train_function`, which must run the model's step.

        Nothing would weight the replicas by their rows, and another function would be verified.
        """
        name = marks.CALL.get(self.in_call_of)[0]
        if name in ("fit", "evaluate") and keras_compat.has_own_function(self.in_call_of, name):
            raise keras_compat.own_function_error(name, "a run of another function on a batch")

    def reduce(self, reduce_op, value, axis):
        """Reduces as usual, except a step's logs with `axis=0`, which it reduces locally.

        Keras reduces every batch log with `axis=0`. Under several workers stock TensorFlow then
        raises an error for a scalar, and averages over the elements of a vector. This method
        returns the mean or sum over this worker's replicas, whose logs are global already.
        """
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        if axis is None and _is_state_of_metric(value) and tf.executing_eagerly():
            # Keras reads a metric's result by a sum over all workers.
            self.reach_together("a read of a metric's result outside of a step")
        if not is_mean and axis is None:
            losses.refuse_sums_of_means(self.experimental_local_results(value))
        if axis == 0 and (_is_scalar(value) or any(log() is value for log in self._logs)):
            local = tf.stack(self.experimental_local_results(value))
            return tf.reduce_mean(local, axis=0) if is_mean else tf.reduce_sum(local, axis=0)
        return super().reduce(reduce_op, value, axis)

    def reach_together(self, doing):
        """Waits for all workers before a collective; raises ValueError if one does not come."""
        program_order.reach_together(self, doing)

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a dataset; datasets of `tfmulti.data` distribute themselves."""
        distribute_to = getattr(dataset, "distribute_to", None)
        if distribute_to is not None:
            return distribute_to(self)
        feeds.refuse_behind_others(dataset)
        dataset = keras_compat.without_tuning(dataset)
        if self.num_replicas_in_sync == 1:
            return super().experimental_distribute_dataset(dataset, options)
        sampled = samples.Samples(self.keeps_samples, topology.num_workers(self) > 1)
        distributed = self._distribute(dataset, options, sampled)
        marks.SAMPLE.set(distributed, sampled)
        return distributed

    def _distribute(self, dataset, options, sampled):
        """Distributes a dataset for several replicas, of which some batches are kept as samples."""
        # A generator goes on in the next call, and a callback may change what it yields: no more
        # batches may be drawn ahead than Keras draws on one device.
        on_demand = keras_compat.is_from_python(dataset)
        dataset = feeds.with_none(dataset)
        if feeds.is_shared_by_rows(dataset):
            dataset = sampled.digested(dataset)
        if not feeds.is_in_chunks(dataset):
            return iterators.SplitBatches(sampled.of(dataset), self, on_demand=on_demand)
        specs = [s for s in tf.nest.flatten(dataset.element_spec) if not feeds.is_none(s)]
        if all(isinstance(s, tf.TensorSpec) for s in specs):
            # Replica batches of a batch from Python share its memory, and steps may overwrite it.
            dataset = sampled.of(_copied(dataset))
            if on_demand:
                return iterators.SplitBatches(dataset, self, on_demand=True, in_chunks=True)
        if topology.num_workers(self) > 1:
            dataset = feeds.shared_by_rows(dataset)
        return super().experimental_distribute_dataset(dataset, options)


def _is_state_of_metric(value) -> bool:
    """Whether a value is a variable of which each replica has a part, as that of a metric."""
    how = getattr(value, "synchronization", None)
    return how == tf.VariableSynchronization.ON_READ


def _replica_error(error) -> RuntimeError:
    """Returns the error for replicas that do not call the same collectives."""
    text = " ".join(str(error).split())
    return RuntimeError(
        "All replicas must do the same in a step. Received: replicas that reduce different values "
        f"({text[:80]}...). Look for Python state that one replica changes and the next reads, "
        "such as a counter in `train_step` (use self.optimizer.iterations), and for Python's or "
        "NumPy's random numbers."
    )


def _refuse_jit_compile(model, num_replicas):
    if model.jit_compile is True:
        raise ValueError(
            "`jit_compile` must be False on several replicas: XLA compiles for one device. "
            f"Received: jit_compile=True, num_replicas={num_replicas}. "
            "Use model.compile(..., jit_compile=False)."
        )


def _refuse_bare(model):
    bare = [
        type(optimizer).__name__
        for optimizer in model_contents.optimizers_of(model)
        if not marks.DISTRIBUTED.get(optimizer)
        and not marks.DISTRIBUTED.get(getattr(optimizer, "inner_optimizer", None))
    ]
    if bare:
        raise ValueError(
            "With `distribute_optimizers=False` each optimizer must be wrapped. "
            f"Received: {', '.join(bare)}. Use tfmulti.DistributedOptimizer(optimizer), or leave "
            "the argument out."
        )


def _weak(outputs) -> list:
    values = tf.nest.flatten(outputs, expand_composites=False)
    kinds = (tf.Tensor, tf.distribute.DistributedValues)
    return [weakref.ref(value) for value in values if isinstance(value, kinds)]


def _copied(dataset):
    """Returns a dataset whose batches are copies."""

    def copy(*parts):
        batch = rows.of_arguments(parts, dataset.element_spec)
        copied = lambda part: None if part is None else tf.raw_ops.DeepCopy(x=part)
        return tf.nest.map_structure(copied, batch)

    return dataset.map(copy)


def _is_distributed(data) -> bool:
    parts = tf.nest.flatten(data, expand_composites=False)
    return any(isinstance(part, tf.distribute.DistributedValues) for part in parts)


def _is_scalar(value) -> bool:
    if isinstance(value, tf.distribute.DistributedValues):
        return all(getattr(v, "shape", None) == () for v in getattr(value, "values", [None]))
    # Eager steps of older versions return Python numbers.
    return tf.TensorShape(getattr(value, "shape", ())).rank == 0


class OneDeviceStrategy(_KerasRepairs, tf.distribute.OneDeviceStrategy):
    """All variables and computation on one device."""


class MirroredStrategy(_KerasRepairs, tf.distribute.MirroredStrategy):
    """One replica on each of several local devices."""

    def __init__(self, devices=None, cross_device_ops=None):
        keras_compat.use_own_groups(self)
        super().__init__(devices, cross_device_ops)


class MultiWorkerMirroredStrategy(_KerasRepairs, tf.distribute.MultiWorkerMirroredStrategy):
    """One or more replicas on each worker of a cluster."""

    # Whether workers compare what they do: variables they create, calls of `fit` and the like.
    checks_call_order = False

    def __init__(self, cluster_resolver, communication_options, num_cpus, over_mpi):
        args = (self, cluster_resolver, communication_options)
        if over_mpi:
            extended = keras_compat.CustomAllReduceExtended(*args)
        elif num_cpus > 1 and not devices_lib.has_gpu():
            extended = keras_compat.LogicalCpusExtended(*args, num_cpus)
        else:
            extended = keras_compat.AllDtypesExtended(*args)
        tf.distribute.Strategy.__init__(self, extended)


class TPUStrategy(_KerasRepairs, tf.distribute.TPUStrategy):
    """One replica on each TPU core. Untested: no TPU was available."""
