"""The only module that uses private names of Keras and TensorFlow.

Each entry says which message or wrong result it cures and on which versions it was tried
(Keras 3.12 to 3.15, TensorFlow 2.20 and 2.21). `tests/test_keras_compat.py` has a canary
for each: it fails when upstream no longer needs the cure.
"""

from __future__ import annotations

import functools
import inspect
import types

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss
from keras.src.optimizers import base_optimizer
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms
from tensorflow.python.distribute import cross_device_utils

STEP_KINDS = {"train_step": "train", "test_step": "test"}


def variant_tensor(dataset: tf.data.Dataset) -> tf.Tensor:
    """The handle that a `tf.data.Dataset` subclass hands to its parent class.

    Without it a dataset of our own is no `tf.data.Dataset`, and `fit` answers "Unrecognized
    data type".
    """
    return dataset._variant_tensor


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


def output_loss_trackers(model: keras.Model) -> list[keras.metrics.Mean]:
    """The running means of each output's own loss; there are some where outputs are several."""
    compile_loss = getattr(model, "_compile_loss", None)
    return [metric for metric in getattr(compile_loss, "metrics", []) if metric is not None]


def update_replicas_alike(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes what follows the reduction of gradients local to each replica.

    Cures "RuntimeError: `merge_call` called while defining a new graph" under
    `gradient_accumulation_steps` and `ema_overwrite_frequency`, and the second all-reduce of
    gradients that are reduced already.
    """
    for name in (
        "_backend_update_step",
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
    ):
        plain = getattr(base_optimizer.BaseOptimizer, name)
        object.__setattr__(optimizer, name, types.MethodType(plain, optimizer))


def install(first_local_value) -> None:
    """Applies the cures that no public method reaches. Calling it again changes nothing.

    They act only under a strategy with the attribute `repairs_keras`.

    Args:
        first_local_value: Function that takes a nested structure of distributed values to
            the first local replica's.
    """
    cross_device_utils.CollectiveReplicaLauncher._prefer_unique_instance_key = False
    trainer = keras_trainer.TensorFlowTrainer
    if not hasattr(trainer._maybe_symbolic_build, "__wrapped__"):
        trainer._maybe_symbolic_build = _build_from_one_share(
            trainer._maybe_symbolic_build, first_local_value
        )


def _build_from_one_share(original, first_local_value):
    """Builds a model from one replica's share instead of from the mean over replicas.

    Cures "Attempt to convert a value (PerReplica...)" under MultiWorkerMirroredStrategy,
    "AddN ... Inputs must have same size" where the first batch does not divide by the
    replicas, "'RaggedTensor' object has no attribute 'device'", and "Unable to automatically
    build the model" for a model without `call()`.
    """

    @functools.wraps(original)
    def build(model, iterator=None, data_batch=None):
        strategy = model._distribute_strategy
        if not getattr(strategy, "repairs_keras", False):
            return original(model, iterator=iterator, data_batch=data_batch)
        if lacks_call(model):
            _build_optimizer(model, strategy)
            return None
        if iterator is not None:
            data_batch = first_local_value(strategy, _look(iterator))
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)
        return None

    return build


def _look(epoch_iterator):
    for _, _, iterator in epoch_iterator:
        look = getattr(iterator, "look", None)
        return look() if look else next(iterator)
    raise ValueError(
        "A dataset must hold at least one batch. Received: an empty dataset. "
        "Check the split and its filters."
    )


def lacks_call(model: keras.Model) -> bool:
    """Whether a model is a container with its own `train_step` only, as the usual GAN."""
    return type(model).call is keras.Model.call


def _build_optimizer(model, strategy):
    model.built = True
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        with strategy.scope():
            optimizer.build(model.trainable_variables)


def count_shares_in_moments(current_share) -> None:
    """Leaves an empty replica's filler row out of synchronized batch statistics.

    Args:
        current_share: Function that returns the share of the replica that is being traced,
            or None.
    """
    original = keras_nn._compute_moments_sync
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def moments(x, axes, keepdims):
        share = current_share()
        context = tf.distribute.get_replica_context()
        if share is None or not share.may_be_empty or context is None:
            return original(x, axes, keepdims)
        counted = share.num_real > 0
        keep = functools.partial(tf.reduce_sum, axis=axes, keepdims=True)
        sums = [keep(x), keep(tf.square(x)), keep(tf.ones_like(x))]
        sums = [tf.where(counted, value, tf.zeros_like(value)) for value in sums]
        total, squares, count = (context.all_reduce("SUM", value) for value in sums)
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    keras_nn._compute_moments_sync = moments


def reduce_losses_by(reduce_loss, keeps_means) -> None:
    """Has losses reduced with the whole batch's denominator, and not divided by the replicas.

    Cures gradients that are too big by the number of replicas where a loss gives one number
    or a `train_step` averages by itself, and wrong ones under masks, with `reduction="sum"`
    and with `"mean_with_sample_weight"`.

    Args:
        reduce_loss: Function of Keras's own reduction and that one's arguments.
        keeps_means: Function that tells whether losses are averaged over replicas later.
    """
    if hasattr(keras_loss.reduce_weighted_values, "__wrapped__"):
        return
    keras_loss.reduce_weighted_values = _around(keras_loss.reduce_weighted_values, reduce_loss)
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):

        def scale(original, value):
            return value if keeps_means() else original(value)

        setattr(keras_loss, name, _around(getattr(keras_loss, name), scale))


def _around(original, function):
    @functools.wraps(original)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call


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
