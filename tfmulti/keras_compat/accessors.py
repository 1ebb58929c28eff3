"""Accessors: what private names of Keras and TensorFlow tell, or change, of one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import losses as keras_losses
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss
from tensorflow.python.data.ops import dataset_ops

from tfmulti import marks
from tfmulti.keras_compat.held import HeldVariable
from tfmulti.keras_compat.stock import is_stock

_STEP_KINDS = {"train_step": "train", "test_step": "test"}
HAS_AVERAGES = "_ema_weights_in_model"
"""The attribute of `SwapEMAWeights` that tells whether the model has the averages now."""
COUNTERS = (
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
    "_global_train_batch",
    "_global_test_batch",
)
"""The attributes in which `ModelCheckpoint` and `TensorBoard` count the steps of a run."""


def variant_tensor(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the handle that a subclass of `tf.data.Dataset` passes to its parent class.

    Our own dataset must be such a subclass: `fit` refuses others with "Unrecognized data type".
    """
    return dataset._variant_tensor


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset was batched, and since then only mapped, shuffled, prefetched and the like.

    Batching it again would give batches of batches, which layers for any rank silently accept.
    """
    name = type(dataset).__name__
    # No attribute of a dataset tells it, and the classes for batches, zips and maps are private.
    if name.endswith("BatchDataset") or hasattr(dataset, "distribute_to"):
        return True
    if name.endswith("ZipDataset"):
        return all(is_batched(each) for each in dataset._inputs())
    # A flat map can take batches apart.
    is_map = name.endswith("MapDataset") and "Flat" not in name
    keeps = isinstance(dataset, dataset_ops.UnaryUnchangedStructureDataset)
    return (is_map or keeps) and is_batched(dataset._inputs()[0])


def step_of(fn) -> tuple[str | None, keras.Model | None]:
    """Finds out whether a function that is passed to `strategy.run` is a step of Keras.

    `mark_steps` marks the functions of training and evaluation steps. A user who overrides
    `make_train_function` passes the model's bound method. The step of `predict` is a closure in
    Keras's module.

    Returns:
        `"train"`, `"test"`, `"predict"` or None, and the model if it is known.
    """
    # Keras wraps the step of `predict` in a function that converts optional inputs.
    fn = inspect.unwrap(fn)
    marked = marks.STEP.get(fn)
    if marked is not None:
        return marked
    model = getattr(fn, "__self__", None)
    if isinstance(model, keras.Model):
        return _STEP_KINDS.get(getattr(fn, "__name__", None)), model
    if getattr(fn, "__module__", None) == keras_trainer.__name__:
        held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
        models = [each for each in held if isinstance(each, keras.Model)]
        return "predict", models[0] if models else None
    return None, None


def states_from_rows(
    model: keras.Model, every: bool = False, synchronized: bool = False
) -> list[keras.Variable]:
    """Returns the floating-point states that layers compute on each replica from its own rows.

    Of Keras's own layers only batch normalization has such states, unless it is frozen.

    Args:
        model: The model.
        every: Whether to include the states of all of Keras's layers, which a dummy row changes
            on a replica without rows.
        synchronized: Whether to include those of synchronized batch normalization.
    """
    states = []
    for layer in model._flatten_layers():
        normalizes = isinstance(layer, keras.layers.BatchNormalization)
        apart = synchronized or not getattr(layer, "synchronized", False)
        if not apart or (normalizes and not layer.trainable):
            continue
        if normalizes or not is_stock(layer) or every:
            states += layer._non_trainable_variables
    unique = {id(variable): variable for variable in states}.values()
    is_float = keras.backend.is_float_dtype
    # With any other aggregation TensorFlow makes one value of what the replicas assign. What one
    # worker holds for all, as the statistics of an adapted `Normalization`, no call may assign.
    return [
        v
        for v in unique
        if v.aggregation == "none" and is_float(v.dtype) and not isinstance(v, HeldVariable)
    ]


def stateful_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the recurrent layers that keep a state for each row from one batch to the next."""
    return [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]


def local_statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns the moving statistics of batch normalization that is not synchronized."""
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization)]
    layers = [layer for layer in layers if layer.built and not layer.synchronized]
    return [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]


def output_loss_trackers(model: keras.Model) -> list[keras.metrics.Mean]:
    """Returns the running means of the outputs' own losses, of a model with several outputs.

    Without those of a loss that is not reduced: they count each row by itself.
    """
    metrics = getattr(getattr(model, "_compile_loss", None), "metrics", [])
    # Keras creates both lists at once, in the same order.
    pairs = zip(metrics, compiled_losses(model))
    return [
        metric for metric, loss in pairs if getattr(loss, "reduction", "") not in (None, "none")
    ]


def runs_eagerly(model: keras.Model) -> bool:
    """Whether the steps of a model run eagerly, by its own setting or by TensorFlow's."""
    return model.run_eagerly or tf.config.functions_run_eagerly()


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers of a model at any depth; `Model.layers` has only the outermost ones."""
    return list(model._flatten_layers(include_self=False))


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns all metrics of a model; Keras keeps those of `compile` within a single one."""
    return [metric for each in model.metrics for metric in getattr(each, "metrics", None) or [each]]


def metric_variables(model: keras.Model) -> list:
    """Returns the variables of a model's metrics, and of those of compiled models within it.

    Keras leaves these out, but a step may call the `train_step` of an inner model.
    """
    inner = [m for m in model._flatten_layers(include_self=False) if isinstance(m, keras.Model)]
    # A layer of an inner model is one of the outer model too.
    return list({id(v): v for each in (model, *inner) for v in each.metrics_variables}.values())


def adopt_optimizer(optimizer, strategy: tf.distribute.Strategy) -> None:
    """Makes an optimizer that was created outside of its model's scope create its slots there.

    Keras creates slots in the scope of the optimizer. If a model is compiled again outside of its
    scope, that fails with "Mixing different tf.distribute.Strategy objects".

    Args:
        optimizer: A Keras optimizer, or one that has an inner one.
        strategy: The model's strategy, with one replica.
    """
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(each, keras.optimizers.Optimizer):
            # The default strategy has one replica, too. An optimizer of several stays an error.
            if each._distribution_strategy.num_replicas_in_sync == 1:
                each._distribution_strategy = strategy


def inner_optimizer(optimizer):
    """Returns the optimizer that a `LossScaleOptimizer` wraps, else the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the losses that `compile` has created; they exist once the model has been trained."""
    entries = getattr(getattr(model, "_compile_loss", None), "_flat_losses", None)
    return [entry.loss for entry in entries or [] if entry.loss is not None]


def given_to_compile(model: keras.Model) -> tuple[list, list]:
    """Returns the losses and the metrics given to `compile` that Keras has not created yet."""
    loss, metric = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    losses = [] if loss is None or loss.built else [loss._user_loss]
    if metric is not None and not metric.built:
        metrics = [metric._user_metrics, metric._user_weighted_metrics]
    else:
        metrics = []
    # Names are of Keras's own.
    return tuple(
        [each for each in keras.tree.flatten(given) if callable(each)]
        for given in (losses, metrics)
    )


def own_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the losses in a model's attributes, which its own `train_step` may use."""
    compiled = getattr(model, "_compile_loss", None)
    held = [value for value in vars(model).values() if isinstance(value, keras.losses.Loss)]
    return [loss for loss in held if loss is not compiled]


def axes_of(part) -> list:
    """Returns the axes along which a layer, a loss or a metric computes, as they were given."""
    # A loss or a metric that wraps a function keeps the function's settings apart.
    settings = {**getattr(part, "_fn_kwargs", {}), **vars(part)}
    return [settings[name] for name in ("axis", "axes") if name in settings]


def sums_activity_penalty(layer: keras.layers.Layer) -> bool:
    """Whether a layer's activity penalty is a sum over rows, as in Keras before 3.14."""
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    return version < (3, 14) and getattr(layer, "activity_regularizer", None) is not None


def loss_of(fn) -> keras.losses.Loss:
    """Creates a loss from a function, as `compile` does."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return keras_losses.LossFunctionWrapper(fn, name=name)


def mask_of(tensor):
    """Returns the mask that a layer has attached to its output, or None."""
    return keras_backend.get_keras_mask(tensor)


def masked_weights(sample_weight, mask, dtype: str):
    """Returns the weights of values, as a loss or a metric of rows masks them; None for neither."""
    # A reduction to a mean would also divide the weights by the share of valid values.
    return keras_loss.apply_mask(sample_weight, mask, dtype=dtype, reduction="sum")


def set_mask(tensor, mask) -> None:
    """Attaches a mask to a tensor, where layers, losses and metrics find it."""
    if mask is not None:
        keras_backend.set_keras_mask(tensor, mask)


def remove_mask(tensor) -> None:
    """Removes the mask that `set_mask` or a layer has attached to a tensor."""
    keras_backend.set_keras_mask(tensor, None)


_ACTIVATIONS = {"Sigmoid": tf.nn.sigmoid, "Softmax": tf.nn.softmax}


def noted_logits(tensor) -> tf.Tensor | None:
    """Returns the logits that an activation of Keras has attached to its output, or None.

    Keras computes cross-entropy from them, since probabilities are rounded.
    """
    return getattr(tensor, "_keras_logits", None) if isinstance(tensor, tf.Tensor) else None


def activation_of(tensor) -> Callable | None:
    """Returns the sigmoid or softmax function that computes a tensor in a graph, or None."""
    symbolic = isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy")
    activation = _ACTIVATIONS.get(tensor.op.type) if symbolic else None
    noted = noted_logits(tensor)
    # Keras prefers noted logits to the input of the operation.
    return activation if noted is None or activation and noted is tensor.op.inputs[0] else None


def activated(activation: Callable, logits: tf.Tensor) -> tf.Tensor:
    """Returns the activation of logits, with these attached as Keras's own layers do."""
    output = activation(logits)
    output._keras_logits = logits
    return output


class WithLogits:
    """A tensor that leaves a function or a replica together with its logits.

    Args:
        tensor: The tensor.

    Attributes:
        tensors: The tensors to pass on: the tensor, and its logits if it has any.
    """

    def __init__(self, tensor):
        logits = noted_logits(tensor)
        if logits is None and activation_of(tensor) is not None:
            # Keras takes the logits from the operation.
            logits = tensor.op.inputs[0]
        self.tensors = [tensor] if logits is None else [tensor, logits]

    def restored(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        """Returns the tensor with its logits, from the values of `tensors` on the other side."""
        if len(tensors) > 1:
            tensors[0]._keras_logits = tensors[1]
        return tensors[0]


def keep_on_each_replica(variables) -> None:
    """Makes each replica keep its own copy of a metric's variables; outside, the first is read.

    All replicas must update them alike. `Metric.add_variable` creates variables that are sums over
    replicas, and a metric takes no option for it.
    """
    for variable in variables:
        variable._aggregation = "only_first_replica"
        # TensorFlow's variable has an aggregation of its own, by which it is read and assigned.
        if isinstance(variable._value, tf.distribute.DistributedValues):
            variable._value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def replace_table(layer: keras.layers.Embedding, table) -> None:
    """Makes an object the table of an embedding, `layer.embeddings`, in place of a variable."""
    object.__setattr__(layer, "_embeddings", table)
    # By which an optimizer knows what it leaves out of weight decay; see `exclude_parts`.
    table._unique_id = f"tfmulti_table_{id(table)}"


def exclude_parts(optimizer: keras.optimizers.Optimizer, parts_of: dict) -> None:
    """Excludes the parts of tables from weight decay that were excluded as a whole."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", set())
    for table, parts in parts_of.items():
        if optimizer._var_key(table) in excluded:
            excluded.update(map(optimizer._var_key, parts))


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Makes the `fit` that has just begun start at an epoch, as `BackupAndRestore` does."""
    model._initial_epoch = epoch


def take_initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that a callback has set when training began, and resets it."""
    epoch, model._initial_epoch = model._initial_epoch, None
    return epoch


def build_model(model: keras.Model, batch) -> None:
    """Creates the variables of a model, its metrics and its optimizer, as `fit` does.

    Args:
        model: A compiled model.
        batch: A batch `(x, y)` or `(x, y, sample_weight)`, or the specs of its tensors.
    """
    model._symbolic_build(data_batch=batch)


def random_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that draw random numbers in training."""
    return [layer for layer in model._flatten_layers() if layer._seed_generators]


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of an optimizer except its count of steps and its learning rate."""
    apart = [optimizer._iterations, getattr(optimizer, "_learning_rate", None)]
    return [v for v in optimizer.variables if not any(v is each for each in apart)]


def averages_and_sums(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns an optimizer's moving averages of weights, and its accumulated gradients."""
    names = "_model_variables_moving_average", "_accumulated_gradients"
    return [variable for name in names for variable in getattr(optimizer, name, None) or ()]


def updated_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables for which an optimizer was built."""
    return list(optimizer._trainable_variables)


def variable_index(optimizer, variable) -> int:
    """Returns the place of a variable among those that an optimizer was built for.

    Raises:
        ValueError: If it was not built for it.
    """
    try:
        return optimizer._get_variable_index(variable)
    except KeyError:
        raise ValueError(
            "An optimizer updates only the variables that it was built for. Received: "
            f"{path_of(variable)}, which {optimizer.name} does not know. After layers are "
            "unfrozen, compile with a new optimizer: type(optimizer).from_config("
            "optimizer.get_config())."
        ) from None


def path_of(variable) -> str:
    """Returns the path of a variable of Keras, or the name of one of TensorFlow."""
    return getattr(variable, "path", variable.name)
