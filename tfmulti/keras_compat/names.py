"""Private names that are read, or used on one object."""

from __future__ import annotations

import functools
import inspect

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as keras_optimizer
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms

STEP_KINDS = {"train_step": "train", "test_step": "test"}


def variant_tensor(dataset: tf.data.Dataset) -> tf.Tensor:
    """The handle that a `tf.data.Dataset` subclass hands to its parent class.

    Without it a dataset of our own is no `tf.data.Dataset`, and `fit` answers "Unrecognized
    data type".
    """
    return dataset._variant_tensor


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset was batched, and only mapped, shuffled, prefetched and the like since.

    Cures training with batches of batches, which layers that take any rank do without a word.
    """
    name = type(dataset).__name__
    if name.endswith("BatchDataset"):
        return True
    if name.endswith("ZipDataset"):
        return all(is_batched(each) for each in dataset._inputs())
    is_map = name.endswith("MapDataset") and "Flat" not in name
    keeps = isinstance(dataset, dataset_ops.UnaryUnchangedStructureDataset)
    return (is_map or keeps) and is_batched(dataset._inputs()[0])


def step_of(fn) -> tuple[str | None, keras.Model | None]:
    """Tells whether Keras's trainer is the caller of `strategy.run`, and for which step.

    Keras passes the model's bound `train_step` or `test_step`, and for `predict` a closure of
    its own module.

    Returns:
        `"train"`, `"test"`, `"predict"` or None, and the model where it can be known.
    """
    fn = inspect.unwrap(fn)
    model = getattr(fn, "__self__", None)
    if isinstance(model, keras.Model):
        return STEP_KINDS.get(fn.__name__), model
    if getattr(fn, "__module__", None) == keras_trainer.__name__:
        return "predict", None
    return None, None


def synchronized_variables(model: keras.Model) -> set[str]:
    """Paths of the layer states that all replicas compute alike, from global statistics.

    `Model.layers` does not reach layers inside layers.
    """
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "synchronized", False)]
    return {variable.path for layer in layers for variable in layer.non_trainable_variables}


def local_statistics(model: keras.Model) -> list[keras.Variable]:
    """Moving statistics that batch normalization keeps on each replica by itself."""
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization)]
    layers = [layer for layer in layers if layer.built and not layer.synchronized]
    return [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]


def output_loss_trackers(model: keras.Model) -> list[keras.metrics.Mean]:
    """The running means of each output's own loss; there are some where outputs are several."""
    compile_loss = getattr(model, "_compile_loss", None)
    return [metric for metric in getattr(compile_loss, "metrics", []) if metric is not None]


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of a model with those inside of them; `Model.layers` has the outer ones only."""
    return list(model._flatten_layers(include_self=False))


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """The losses that `compile` made of what it was given, once the model has been trained."""
    entries = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None)
    return [entry.loss for entry in entries or [] if entry.loss is not None]


def own_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """The losses that a model holds itself, for a `train_step` of its own."""
    compiled = getattr(model, "_compile_loss", None)
    held = [value for value in vars(model).values() if isinstance(value, keras.losses.Loss)]
    return [loss for loss in held if loss is not compiled]


def update_replicas_alike(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes what follows the reduction of gradients local to each replica.

    Cures "RuntimeError: `merge_call` called while defining a new graph" under
    `gradient_accumulation_steps` and `ema_overwrite_frequency`, and the second all-reduce of
    gradients that are reduced already. What an optimizer's own class does around these methods,
    as Nadam and Muon do, stays.
    """
    for name in (
        "_backend_update_step",
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
    ):
        distributed = getattr(keras_optimizer.TFOptimizer, name)
        if not hasattr(distributed, "__wrapped__"):
            plain = getattr(base_optimizer.BaseOptimizer, name)
            setattr(keras_optimizer.TFOptimizer, name, _plain_if_marked(distributed, plain))
    object.__setattr__(optimizer, "tfmulti_updates_alike", True)


def _plain_if_marked(distributed, plain):
    @functools.wraps(distributed)
    def method(self, *args, **kwargs):
        marked = getattr(self, "tfmulti_updates_alike", False)
        return (plain if marked else distributed)(self, *args, **kwargs)

    return method


class LocalCPUs(mwms.CollectiveAllReduceExtended):
    """Several logical CPUs in each worker.

    `MultiWorkerMirroredStrategy` takes every GPU of a worker and, where there is none, one CPU
    only. This takes `num_cpus` of them.
    """

    def __init__(self, strategy, cluster_resolver, communication_options, num_cpus):
        self._num_cpus = num_cpus
        super().__init__(
            strategy,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
        )

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        devices = [f"{worker_device}/device:CPU:{i}" for i in range(self._num_cpus)]
        return tuple(devices), "CPU"


class AddedElsewhere(mwms.CollectiveAllReduceExtended):
    """Adds what replicas reduce by another way than TensorFlow's collectives.

    `MultiWorkerMirroredStrategy` takes its own alone, which cost 6 times a copy of the bytes on
    CPUs. Sparse gradients, and what is reduced outside of replicas, still go its way.

    Attributes:
        add: Function of a list of tensors that returns their sums over all workers.
    """

    add = None

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values = [value for value, _ in value_destination_pairs]
        if self.add is None or not all(isinstance(value, tf.Tensor) for value in values):
            return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)
        sums = self.add(values)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [part / tf.cast(self._num_replicas_in_sync, part.dtype) for part in sums]
        return sums


def global_seed_state() -> list[int]:
    """The state from which random operations without a seed draw."""
    return seed_generator.global_seed_generator().state.numpy().tolist()


def set_global_seed_state(state: list[int]) -> None:
    """Puts back what `global_seed_state` returned."""
    seed_generator.global_seed_generator().state.assign(state)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Makes the `fit` that has just begun start at an epoch; as `BackupAndRestore` does."""
    model._initial_epoch = epoch


def random_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers that draw random numbers in training."""
    return [layer for layer in model._flatten_layers() if layer._seed_generators]
