"""Private names that are read, or used on one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import losses as keras_losses
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms

from tfmulti import marks

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

    `mark_steps` has marked what Keras makes its functions for training and evaluation of. Whoever
    overrides `make_train_function` passes the model's bound method; `predict` is a closure of
    Keras's module.

    Returns:
        `"train"`, `"test"`, `"predict"` or None, and the model where it can be known.
    """
    fn = inspect.unwrap(fn)
    marked = marks.STEP.get(fn)
    if marked is not None:
        return marked
    model = getattr(fn, "__self__", None)
    if isinstance(model, keras.Model):
        return STEP_KINDS.get(getattr(fn, "__name__", None)), model
    if getattr(fn, "__module__", None) == keras_trainer.__name__:
        return "predict", None
    return None, None


def states_from_rows(
    model: keras.Model, every: bool = False, synchronized: bool = False
) -> list[keras.Variable]:
    """Returns floating states that layers keep on each replica by themselves.

    Those of Keras's own layers are left out, but for batch normalization: they say nothing of
    rows. Weights of layers that are frozen are no states.

    Args:
        model: The model.
        every: Whether to take in those of all of Keras's layers, which a replica without a row
            cannot compute by itself.
        synchronized: Whether to take in those of synchronized batch normalization.
    """
    found = []
    for layer in model._flatten_layers():
        stock = type(layer).__module__.startswith("keras.")
        normalizes = isinstance(layer, keras.layers.BatchNormalization)
        apart = synchronized or not getattr(layer, "synchronized", False)
        if not apart or (normalizes and not layer.trainable):
            continue
        if normalizes or not stock or every:
            found += layer._non_trainable_variables
    found = [v for v in found if v.aggregation == "none" and keras.backend.is_float_dtype(v.dtype)]
    return list({id(variable): variable for variable in found}.values())


def stateful_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The recurrent layers that keep a state for each row from one batch to the next."""
    return [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]


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


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model with those that `compile` was given, which Keras keeps in one."""
    return [metric for each in model.metrics for metric in getattr(each, "metrics", None) or [each]]


def adopt_optimizer(optimizer, strategy: tf.distribute.Strategy) -> None:
    """Has an optimizer that was created outside of its model's scope make its slots there.

    Cures "Mixing different tf.distribute.Strategy objects" where a model is compiled again outside
    of its scope: Keras makes slots in the scope in which the optimizer was created.

    Args:
        optimizer: A Keras optimizer, or one that has an inner one.
        strategy: The model's strategy, with one replica.
    """
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(each, keras.optimizers.Optimizer):
            if each._distribution_strategy.num_replicas_in_sync == 1:
                each._distribution_strategy = strategy


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """The losses that `compile` made of what it was given, once the model has been trained."""
    entries = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None)
    return [entry.loss for entry in entries or [] if entry.loss is not None]


def own_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """The losses that a model holds itself, for a `train_step` of its own."""
    compiled = getattr(model, "_compile_loss", None)
    held = [value for value in vars(model).values() if isinstance(value, keras.losses.Loss)]
    return [loss for loss in held if loss is not compiled]


def is_stock(thing) -> bool:
    """Whether a class, a function or an object is Keras's own."""
    kind = thing if hasattr(thing, "__module__") else type(thing)
    return str(kind.__module__).startswith("keras.")


def sums_activity_penalty(layer: keras.layers.Layer) -> bool:
    """Whether a layer adds a penalty that is a sum over rows, as Keras has it before 3.14."""
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    return version < (3, 14) and getattr(layer, "activity_regularizer", None) is not None


def loss_of(fn) -> keras.losses.Loss:
    """Makes a loss of a function, as `compile` does."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return keras_losses.LossFunctionWrapper(fn, name=name)


def mask_of(tensor):
    """Returns the mask that a layer has put on its output, or None."""
    return keras_backend.get_keras_mask(tensor)


def set_mask(tensor, mask) -> None:
    """Puts a mask on a tensor, which losses and metrics look for."""
    if mask is not None:
        keras_backend.set_keras_mask(tensor, mask)


_ACTIVATIONS = {"Sigmoid": tf.nn.sigmoid, "Softmax": tf.nn.softmax}


def noted_logits(tensor) -> tf.Tensor | None:
    """Returns the logits that an activation of Keras has noted on its output, or None.

    Keras computes cross-entropy from them: another number where a probability is rounded.
    """
    return getattr(tensor, "_keras_logits", None) if isinstance(tensor, tf.Tensor) else None


def activation_of(tensor) -> Callable | None:
    """Returns the sigmoid or the softmax that made a tensor of a graph, or None."""
    symbolic = isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy")
    activation = _ACTIVATIONS.get(tensor.op.type) if symbolic else None
    noted = noted_logits(tensor)
    return activation if noted is None or activation and noted is tensor.op.inputs[0] else None


def activated(activation: Callable, logits: tf.Tensor) -> tf.Tensor:
    """Returns an activation of logits, which are noted on it as Keras's own layers do."""
    output = activation(logits)
    output._keras_logits = logits
    return output


class WithLogits:
    """A tensor that leaves a function, or a replica, together with its logits.

    Args:
        tensor: The tensor.

    Attributes:
        tensors: What to hand on: the tensor, and its logits if it has any.
    """

    def __init__(self, tensor):
        logits = noted_logits(tensor)
        if logits is None and activation_of(tensor) is not None:
            # Keras finds these by the operation.
            logits = tensor.op.inputs[0]
        self.tensors = [tensor] if logits is None else [tensor, logits]

    def restored(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        """Returns the tensor, given what came of `tensors`."""
        if len(tensors) > 1:
            tensors[0]._keras_logits = tensors[1]
        return tensors[0]


def keep_on_each_replica(variables) -> None:
    """Makes a metric's variables ones that all replicas update alike, and read as the first's.

    `Metric.add_variable` makes them sums over replicas, and a metric has made them before anybody
    can ask for something else.
    """
    for variable in variables:
        variable._aggregation = "only_first_replica"
        if isinstance(variable._value, tf.distribute.DistributedValues):
            variable._value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


class EachDtype(mwms.CollectiveAllReduceExtended):
    """Creates variables of every dtype of numbers.

    `MultiWorkerMirroredStrategy` sends the chief's initial values through a collective that knows
    six dtypes, and so cannot create a variable of bfloat16, int8 or complex64.
    """

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        create = super()._get_variable_creator_initial_value
        dtype, initial = kwargs.get("dtype"), kwargs["initial_value"]
        carried = _carried_as(dtype) if dtype is not None else None
        if replica_id != 0 or carried is None:
            return create(replica_id, device, primary_var, **kwargs)
        dtype = tf.as_dtype(dtype)

        def encoded():
            value = initial() if callable(initial) else initial
            value = getattr(value, "wrapped_value", value)
            return _converted(tf.convert_to_tensor(value, dtype), carried)

        sent = {**kwargs, "initial_value": encoded, "dtype": carried}
        receive = create(replica_id, device, primary_var, **sent)
        return lambda: _converted(receive(), dtype)


_BROADCAST = (tf.bool, tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)
_CARRIERS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}


def _carried_as(dtype):
    """Returns the dtype as which a value is sent without loss; None if it needs none, or has none.

    Args:
        dtype: The dtype of the value.
    """
    dtype = tf.as_dtype(dtype)
    if dtype in _BROADCAST:
        return None
    if dtype.is_floating:
        return tf.float32
    return _CARRIERS.get(dtype, tf.int32 if dtype.is_integer else None)


def _converted(value, dtype):
    """Returns a value as another dtype, or those bits as another dtype where it has as many."""
    by_bits = dtype in _CARRIERS or value.dtype in _CARRIERS
    return tf.bitcast(value, dtype) if by_bits else tf.cast(value, dtype)


class LocalCPUs(EachDtype):
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


class OwnAllReduce(EachDtype):
    """Adds what replicas reduce by another way than TensorFlow's collectives.

    `MultiWorkerMirroredStrategy` takes its own alone, which cost 6 times a copy of the bytes on
    CPUs. Sparse gradients, and what is reduced outside of replicas, still go its way.

    Attributes:
        add: Function of a list of tensors that returns their sums over all workers.
        receive: Function of a tensor, the number of the worker that has it, and its shape, that
            returns it as that worker has it.
        broadcast: Function of a list of tensors, and of the number of the worker that has each,
            that returns them as that worker has them.
        reduce_to_owners: Function of the same that returns the sums of those that this worker has.
    """

    add = broadcast = receive = reduce_to_owners = None

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values = [value for value, _ in value_destination_pairs]
        if self.add is None or not all(isinstance(value, tf.Tensor) for value in values):
            return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)
        sums = self.add(values)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [part / tf.cast(self._num_replicas_in_sync, part.dtype) for part in sums]
        return sums


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Makes the `fit` that has just begun start at an epoch; as `BackupAndRestore` does."""
    model._initial_epoch = epoch


def random_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers that draw random numbers in training."""
    return [layer for layer in model._flatten_layers() if layer._seed_generators]


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables of an optimizer, but for its count of steps and its learning rate."""
    apart = [optimizer._iterations, getattr(optimizer, "_learning_rate", None)]
    return [v for v in optimizer.variables if not any(v is each for each in apart)]


def updated_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)
