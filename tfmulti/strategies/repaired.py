"""`tf.distribute` strategies with three public methods repaired for Keras 3."""

from __future__ import annotations

import warnings

import tensorflow as tf

from tfmulti import devices as devices_lib
from tfmulti import iterators, keras_compat, optimizers, shares


def first_local_value(strategy: tf.distribute.Strategy, values):
    """Takes each distributed value in a nested structure to the first local replica's.

    A share without a row gets a filler row: what a model is built from must have some.
    """

    def first(value):
        if isinstance(value, tf.distribute.DistributedValues):
            return strategy.experimental_local_results(value)[0]
        return value

    values = tf.nest.map_structure(first, values, expand_composites=False)
    return shares.fill_if_empty(values)


class _ForKeras:
    """Repairs what Keras 3 asks of a strategy. Nothing changes for other callers."""

    repairs_keras = True
    # What was chosen, on which devices, and why; for people.
    why = ""
    # Set by the data pipeline when it marks filler rows in the sample weights.
    marks_padding = False

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on every replica; Keras's own steps also where a share has no row."""
        kind, model = keras_compat.step_of(fn)
        several = self.num_replicas_in_sync > 1
        if several and kind == "train":
            _refuse_jit_compile(model, self.num_replicas_in_sync)
            _refuse_made_outside(model)
            optimizers.take_over_from_inner(model.optimizer)
        if kind and len(args) == 1 and (several or self.marks_padding):
            averages = model is not None and _has_distributed_optimizer(model)
            if several and kind == "train" and not averages:
                self._warn_of_bare_optimizer(model)
            fill = several and (kind != "train" or averages)
            fn = shares.guard(
                fn, kind, model, fill=fill, padded=self.marks_padding, averages=averages
            )
            num_local_replicas = iterators.num_local_replicas(self)
            if kind != "predict" and num_local_replicas > 1 and not _is_distributed(args[0]):
                fn = shares.share_whole_batch(fn, num_local_replicas)
        else:
            args = tuple(shares.without_count(value) for value in args)
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def _warn_of_bare_optimizer(self, model):
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or getattr(optimizer, "tfmulti_warned", False):
            return
        object.__setattr__(optimizer, "tfmulti_warned", True)
        warnings.warn(
            f"{type(optimizer).__name__} is not distributed, on {self.num_replicas_in_sync} "
            f"replicas: {_first_fault(optimizer)} Use tfmulti.DistributedOptimizer(optimizer).",
            stacklevel=2,
        )

    def reduce(self, reduce_op, value, axis):
        """Reduces as usual; scalars with `axis=0`, as Keras asks for logs, locally.

        Keras reduces every batch log so, which under several workers raises an error in
        stock TensorFlow. The answer is the mean or sum over this worker's replicas: batch
        logs are local, epoch logs are global.
        """
        if axis == 0 and _is_scalar(value):
            local = tf.stack(self.experimental_local_results(value))
            mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
            return tf.reduce_mean(local) if mean else tf.reduce_sum(local)
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a dataset; those of `tfmulti.data` know themselves how."""
        distribute_to = getattr(dataset, "distribute_to", None)
        if distribute_to is not None:
            return distribute_to(self)
        dataset = keras_compat.without_tuning(dataset)
        specs = tf.nest.flatten(dataset.element_spec)
        uneven = any(isinstance(s, (tf.RaggedTensorSpec, tf.SparseTensorSpec)) for s in specs)
        if uneven and self.num_replicas_in_sync > 1:
            return iterators.WholeBatches(dataset, self)
        return super().experimental_distribute_dataset(dataset, options)


def _first_fault(optimizer) -> str:
    """Returns what goes wrong first with a bare optimizer, given its settings."""
    if hasattr(optimizer, "inner_optimizer"):
        return "a replica that overflows makes the weights NaN or the workers wait for ever."
    for name in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(optimizer, name, None):
            return f"`{name}` ends with an error about merge_call."
    for name in ("clipnorm", "global_clipnorm", "clipvalue"):
        if getattr(optimizer, name, None):
            return f"`{name}` clips each replica's gradient before they are added."
    return "examples of a batch that does not divide by the replicas weigh unequally."


def _refuse_jit_compile(model, num_replicas):
    if model.jit_compile is True:
        raise ValueError(
            "`jit_compile` must be False on several replicas: XLA compiles for one device. "
            f"Received: jit_compile=True, num_replicas={num_replicas}. "
            "Use model.compile(..., jit_compile=False)."
        )


def _refuse_made_outside(model):
    """Several replicas would each update a variable that is not theirs."""
    optimizer = getattr(model, "optimizer", None)
    owned = [*model.trainable_variables, *model.metrics_variables]
    owned += optimizer.variables if optimizer is not None else []
    strange = [v for v in owned if not isinstance(v.value, tf.distribute.DistributedValues)]
    if strange:
        raise ValueError(
            "Layers, optimizers and metrics must be created in the strategy's scope. "
            f"Received: the variable {strange[0].path}, created outside of it. "
            "Create them within `with strategy.scope():`, or name them by strings in compile."
        )


def _is_distributed(data) -> bool:
    parts = tf.nest.flatten(data, expand_composites=False)
    return any(isinstance(part, tf.distribute.DistributedValues) for part in parts)


def _is_scalar(value) -> bool:
    if isinstance(value, tf.distribute.DistributedValues):
        return all(getattr(v, "shape", None) == () for v in getattr(value, "values", [None]))
    # Eager steps of older versions give numbers.
    return tf.TensorShape(getattr(value, "shape", ())).rank == 0


def _has_distributed_optimizer(model) -> bool:
    owned = [*vars(model).values(), getattr(model, "optimizer", None)]
    return any(getattr(value, "tfmulti_distributed", False) for value in owned)


class OneDeviceStrategy(_ForKeras, tf.distribute.OneDeviceStrategy):
    """All variables and computation on one device."""


class MirroredStrategy(_ForKeras, tf.distribute.MirroredStrategy):
    """One replica on each of several local devices."""


class MultiWorkerMirroredStrategy(_ForKeras, tf.distribute.MultiWorkerMirroredStrategy):
    """One or more replicas on each worker of a cluster."""

    compares_acts = False

    def __init__(self, cluster_resolver, communication_options, num_cpus=1, elsewhere=False):
        setting = (self, cluster_resolver, communication_options)
        if elsewhere:
            extended = keras_compat.AddedElsewhere(*setting)
        elif num_cpus > 1 and not devices_lib.has_gpu():
            extended = keras_compat.LocalCPUs(*setting, num_cpus)
        else:
            super().__init__(*setting[1:])
            return
        tf.distribute.Strategy.__init__(self, extended)


class TPUStrategy(_ForKeras, tf.distribute.TPUStrategy):
    """One replica on each TPU core. Not tried: no TPU was at hand."""
