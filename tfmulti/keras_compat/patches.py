"""What is replaced in Keras, once a process; it acts under strategies that repair Keras only."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import cross_device_utils

# What makes the seeds of two replicas differ: the golden ratio of 2**32, as hashes use it.
_SEED_STEP = 0x9E3779B1
# Keys of collectives are 32 bits: which gather, and its rows.
_MAX_ROWS, _MAX_GATHERS = 2**20, 2**10


def install(first_local_value, before_pass, once_built) -> None:
    """Applies the cures that no public method reaches. Calling it again changes nothing.

    They act only under a strategy with the attribute `repairs_keras`.

    Args:
        first_local_value: Function that takes a nested structure of distributed values to
            the first local replica's.
        before_pass: Function of a strategy and Keras's iterator over the batches of `fit` or
            `evaluate`, called before a pass is begun.
        once_built: Function of a strategy, a model that is built, and some of its rows.
    """
    launcher = cross_device_utils.CollectiveReplicaLauncher
    launcher._prefer_unique_instance_key = False
    if not hasattr(launcher._all_gather, "__wrapped__"):
        launcher._all_gather = _gather_by_shape(launcher._all_gather)
    trainer = keras_trainer.TensorFlowTrainer
    if not hasattr(trainer._maybe_symbolic_build, "__wrapped__"):
        functions = (first_local_value, before_pass, once_built)
        trainer._maybe_symbolic_build = _build_from_one_share(
            trainer._maybe_symbolic_build, *functions
        )


def end_with_their_reader() -> None:
    """Lets datasets that a strategy adds for its devices end when nobody reads them any more.

    Cures `fit` and `evaluate` that return seconds after their last step: each such dataset has a
    thread that tunes it, and whoever destroys it waits for that thread's next look.
    """
    create = multi_device_iterator_ops._create_device_dataset
    if not hasattr(create, "__wrapped__"):

        @functools.wraps(create)
        def create_untuned(*args, **kwargs):
            return without_tuning(create(*args, **kwargs))

        multi_device_iterator_ops._create_device_dataset = create_untuned


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without tf.data's tuning thread, unless its author has asked for it.

    Parallel maps that are left to it then take a thread for each core.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _gather_by_shape(original):
    """Gives the gathers of workers a key for each number of rows.

    Cures "Shape mismatch in the collective instance" where sparse gradients have other numbers
    of rows from one step to the next: a key stands for one shape, and keys that are new at each
    call do not reach into Keras's nested functions.
    """

    @functools.wraps(original)
    def all_gather(self, input_tensor, options):
        number = self._next_instance_key()
        with tf.device("CPU:0"):
            rows = tf.shape(input_tensor)[0] % _MAX_ROWS
            key = (tf.cast(number, tf.int32) % _MAX_GATHERS + 1) * _MAX_ROWS + rows
        self._next_instance_key = lambda: key
        try:
            return original(self, input_tensor, options)
        finally:
            del self._next_instance_key

    return all_gather


def _build_from_one_share(original, first_local_value, before_pass, once_built):
    """Builds a model from one replica's share instead of from the mean over replicas.

    Cures "Attempt to convert a value (PerReplica...)" under MultiWorkerMirroredStrategy,
    "AddN ... Inputs must have same size" where the first batch does not divide by the
    replicas, "'RaggedTensor' object has no attribute 'device'", and "Unable to automatically
    build the model" for a model without `call()`. A Python generator loses no batch to it.
    """

    @functools.wraps(original)
    def build(model, iterator=None, data_batch=None):
        strategy = model._distribute_strategy
        if not getattr(strategy, "repairs_keras", False):
            return original(model, iterator=iterator, data_batch=data_batch)
        if iterator is not None:
            before_pass(strategy, iterator)
        if lacks_call(model):
            _build_optimizer(model, strategy)
            return None
        if iterator is not None:
            data_batch = first_local_value(strategy, _look(iterator))
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)
        once_built(strategy, model, data_batch)
        return None

    return build


def _look(epoch_iterator):
    """Returns a batch to build from; a Python generator's first one, which Keras keeps."""
    first_batches = getattr(epoch_iterator.data_adapter, "_first_batches", None)
    if first_batches:
        return first_batches[0]
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
        total, squares, count = context.all_reduce("SUM", sums)
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


def vary_seeds_by_replica() -> None:
    """Gives each replica a random stream of its own.

    Cures masks of dropout and augmentation that are the same on all replicas and workers. The
    state stays the same everywhere, so that what is saved is what one device would save.
    """
    generator = keras.random.SeedGenerator
    if hasattr(generator.next, "__wrapped__"):
        return

    def draw(original, self, *args, **kwargs):
        seed = original(self, *args, **kwargs)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        if not getattr(context.strategy, "repairs_keras", False):
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        step = tf.cast(tf.constant(_SEED_STEP, tf.int64), seed.dtype)
        return seed + tf.stack([replica * step, tf.zeros_like(replica)])

    generator.next = _around(generator.next, draw)
