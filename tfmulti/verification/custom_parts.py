"""Finds the custom parts of a model, and its unsynchronized normalization."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import types

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, marks
from tfmulti.step import model_contents, normalization
from tfmulti.verification.differences import CLOSE

STEP, LOSS, LAYER, METRIC, OPTIMIZER = "step", "loss", "layer", "metric", "optimizer"
_STEPS = {"train": ("train_step",), "test": ("test_step",), "predict": ("predict_step",)}
_LOSSES = ("compute_loss", "_compute_loss", "_aggregate_additional_loss")
_METRICS = ("compute_metrics", "get_metrics_result")
# Operations of `keras.ops` on numbers, one by one, and along axes.
_ELEMENTWISE = frozenset(
    "Absolute Add Cast Clip Cos Divide Elu Equal Exp Expm1 Gelu Greater GreaterEqual HardSigmoid "
    "HardTanh LeakyRelu Less LessEqual Log Log1p LogSigmoid LogicalAnd LogicalNot LogicalOr "
    "Maximum Minimum Mish Multiply Negative NotEqual Power Relu Relu6 Rsqrt Selu Sigmoid Sign "
    "Silu Sin Softplus Softsign Sqrt Square Subtract Tanh TrueDivide Where".split()
)
_ALONG_AXES = frozenset(
    "Concatenate ExpandDims LogSoftmax Max Mean Min Normalize Norm Prod Softmax Squeeze Stack "
    "Std Sum Var".split()
)
# Layers of Keras's own whose rows depend on others of the batch: mixed with one of them, limited by
# the loudest, or changed by the histogram of all.
_MIXING = ("CutMix", "Equalization", "MelSpectrogram", "MixUp")
# Layers of Keras's own that run code of the user's or of another library.
_FOREIGN = ("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper")
# Activity penalties that are sums over rows; any other one may combine them.
_OF_ROWS = (keras.regularizers.L1, keras.regularizers.L1L2, keras.regularizers.L2)


@dataclasses.dataclass(frozen=True)
class CustomPart:
    """A custom part of a model: a step, loss, layer, metric or optimizer that is not Keras's.

    Attributes:
        kind: A constant of this module.
        name: Its name.
        thing: The object; for a function within a layer, the layer.
        source: The object itself, or that function.
    """

    kind: str
    name: str
    thing: object
    source: object

    @property
    def where(self) -> str:
        """File and line; empty if unknown."""
        return where_is(self.source)

    def __str__(self):
        return f"{self.name} ({self.where})" if self.where else self.name


def find_custom_parts(model: keras.Model, kind: str) -> list[CustomPart]:
    """Returns the custom parts of a model, those of its step first.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    found = []
    for part, names in ((STEP, _STEPS[kind]), (LOSS, _LOSSES), (METRIC, _METRICS)):
        found += [_of(part, _method(model, name), name) for name in names if _method(model, name)]
    losses, metrics = _losses_and_metrics(model, kind)
    losses = losses + ([] if kind == "predict" else keras_compat.own_losses(model))
    for part, each in ((LOSS, losses), (METRIC, metrics)):
        found += [_of(part, x) for x in map(_inner, each) if _is_custom(x)]
    for layer in [model, *keras_compat.all_layers(model)]:
        if _is_custom(layer) and (layer is not model or not isinstance(layer, keras.Model)):
            found.append(_of(LAYER, layer, f"{type(layer).__name__} {layer.name!r}"))
        elif layer is model and _method(model, "call"):
            found.append(_of(LAYER, _method(model, "call"), "call", model))
        found += [_of(LAYER, x, holder=layer) for x in _custom_functions(layer)]
        if kind != "predict" and _may_penalize_otherwise(layer):
            found.append(_of(LAYER, layer, f"{type(layer).__name__} {layer.name!r}"))
    if kind == "train":
        found += [
            _of(OPTIMIZER, x)
            for x in model_contents.optimizers_of(model, nested=True)
            if _is_custom(x)
        ]
    return found


def _losses_and_metrics(model, kind) -> tuple[list, list]:
    """Returns those of `compile`, and metrics of layers."""
    if kind == "predict":
        return [], []
    losses, metrics = keras_compat.given_to_compile(model)
    return (
        keras_compat.compiled_losses(model) + losses,
        keras_compat.all_metrics(model) + metrics,
    )


def where_is(thing) -> str:
    """Returns the file and line where a class or a function is defined, or ""."""
    thing = keras_compat.users_function(thing) if callable(thing) else thing
    if not isinstance(thing, (type, types.FunctionType, types.MethodType)):
        thing = type(thing)
    try:
        path, (_, line) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return ""
    path = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return f"{path}:{line}"


def _of(kind, thing, name=None, holder=None) -> CustomPart:
    name = name or getattr(thing, "__name__", type(thing).__name__)
    return CustomPart(kind, name, holder or thing, thing)


def _method(model, name):
    """Returns a method if it is not Keras's own, else None."""
    method = getattr(model, name, None)
    return method if method is not None and _is_custom(method) else None


def _is_custom(thing) -> bool:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return not keras_compat.is_stock(thing, "tfmulti") or named.__qualname__ in _FOREIGN


def _inner(thing):
    """Returns the function within Keras's wrapper, or the object itself."""
    if _is_custom(type(thing)):
        # A class of the user's own may change what Keras's function within it returns.
        return thing
    for name in ("fn", "_fn"):
        function = getattr(thing, name, None)
        if callable(function):
            return function
    return thing


def _custom_functions(layer) -> list:
    """Returns custom functions and objects in a Keras layer: activations, regularizers."""
    names = ("activation", "function", "activity_regularizer", "kernel_regularizer")
    names += ("bias_regularizer", "kernel_constraint", "recurrent_activation")
    held = [getattr(layer, name, None) for name in names]
    # Keras's functions too may combine rows, with some arguments or with any.
    is_any = isinstance(layer, keras.layers.Lambda)
    return [thing for thing in held if callable(thing) and (is_any or _is_custom(thing))]


def _may_penalize_otherwise(layer) -> bool:
    """Whether Keras's own activity penalty of a layer may be no mean over rows."""
    penalty = getattr(layer, "activity_regularizer", None)
    if penalty is None or _is_custom(penalty):
        return False
    return not isinstance(penalty, _OF_ROWS) or keras_compat.sums_activity_penalty(layer)


def neutral_layers(model: keras.Model) -> contextlib.AbstractContextManager:
    """Makes all batch normalization of a model that of one device within the context.

    Unsynchronized normalization uses local statistics, and differs from one device by the user's
    choice. With it synchronized, the rest of the model can be compared. In a pipeline a layer never
    has the rows of all micro-batches, or of all copies: there it uses its moving statistics.
    """
    layers = local_normalization(model)
    is_staged = any(map(marks.MICRO_BATCHES.get, [model, *keras_compat.all_layers(model)]))
    if layers:
        names = ", ".join(layer.name for layer in layers)
        how = "used their moving statistics" if is_staged else "were synchronized"
        logging.info("Verified as if they %s: %s.", how, names)
    if is_staged:
        return normalization.as_in_inference(layers)
    return normalization.synchronized(layers, True)


def local_normalization(model: keras.Model) -> list:
    """Returns the layers that normalize with the statistics of one replica's rows."""
    return [
        layer
        for layer in keras_compat.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not layer.synchronized
        # In a pipeline one worker can have the rows of all.
        and not marks.SEES_BATCH.get(layer)
    ]


def num_micro_batches(model: keras.Model) -> int:
    """Returns in how many parts one replica computes its rows, where stages are on its devices."""
    layers = [model, *keras_compat.all_layers(model)]
    return max(1, *map(marks.MICRO_BATCHES_ON_DEVICES.get, layers))


def advice_for_stages(model: keras.Model) -> str:
    """Returns what to do so that a layer has all rows of a batch; empty if no stages divide it."""
    layers = [model, *keras_compat.all_layers(model)]
    if not any(map(marks.MICRO_BATCHES.get, layers)) or any(map(marks.SEES_BATCH.get, layers)):
        return ""
    if not any(map(marks.MICRO_BATCHES_ON_DEVICES.get, layers)):
        return "use tfmulti.pipeline(..., micro_batches=1) and one stage for each worker"
    return "use tfmulti.pipeline(..., micro_batches=1)" if num_micro_batches(model) > 1 else ""


def has_stock_step(model: keras.Model, kind: str) -> bool:
    """Whether every part of a model's step is Keras's own.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    if not keras_compat.is_stock(model) or find_custom_parts(model, kind):
        return False
    graphs = [each for x in [model, *keras_compat.all_layers(model)] for each in _operations(x)]
    if not all(isinstance(each, keras.Layer) or _keeps_rows(each, a) for each, a in graphs):
        return False
    # Float8 layers keep the maximum over the local rows of each replica.
    layers = keras_compat.all_layers(model)
    if any(getattr(layer, "quantization_mode", None) is not None for layer in layers):
        return False
    # Keras's losses and metrics are along the last axis, which is that of the rows then.
    outputs = tf.nest.flatten(getattr(model, "outputs", []))
    if any(len(output.shape) < 2 for output in outputs):
        return False
    losses, metrics = _losses_and_metrics(model, kind)
    return not any(map(_may_combine_rows, [*layers, *losses, *metrics]))


def _may_combine_rows(part) -> bool:
    """Whether a layer, a loss or a metric mixes rows, or is along what may be their axis."""
    if type(part).__name__ in _MIXING or _pads_to_longest(part):
        return True
    axes = tf.nest.flatten(keras_compat.axes_of(part))
    return any(isinstance(axis, int) and (axis == 0 or axis < -1) for axis in axes)


def _pads_to_longest(part) -> bool:
    """Whether a layer makes each text as long as the longest one of its rows."""
    if not isinstance(part, keras.layers.TextVectorization):
        return False
    given = part.get_config()
    lengths = given["output_mode"], given["output_sequence_length"], given["ragged"]
    return lengths == ("int", None, False)


def _operations(layer) -> list:
    """Returns what is called in a Functional model, and with which arguments."""
    is_model = isinstance(layer, keras.Model)
    return (keras_compat.arguments_of_nodes(layer) or []) if is_model else []


def _keeps_rows(operation, arguments) -> bool:
    """Whether each row of an operation's result is made of the same row of what it is given.

    That is known of common operations only; ops.mean over the first axis combines rows.
    """
    name = type(operation).__name__
    given = [each for each in arguments if not isinstance(each, (list, tuple))]
    given += [part for each in arguments if isinstance(each, (list, tuple)) for part in each]
    tensors = [each for each in given if isinstance(each, keras.KerasTensor)]
    ranks = {len(each.shape) for each in tensors}
    if (
        _is_custom(type(operation))
        or len(ranks) != 1
        or any(each.shape[:1] != (None,) for each in tensors)
    ):
        return False
    [rank] = ranks
    if name == "GetItem":
        return _takes_all_rows(arguments[1], rank)
    if name in _ALONG_AXES:
        axes = operation.axis if isinstance(operation.axis, (list, tuple)) else [operation.axis]
        rank += name in ("Stack", "ExpandDims")
        return all(isinstance(axis, int) and axis % rank for axis in axes)
    constants = [each for each in given if not isinstance(each, keras.KerasTensor)]
    return name in _ELEMENTWISE and all(np.ndim(each) < rank for each in constants)


def _takes_all_rows(key, rank) -> bool:
    first, *others = key if isinstance(key, tuple) else (key,)
    simple = all(isinstance(each, (int, slice)) for each in others)
    if first is Ellipsis:
        return simple and len(others) < rank
    return simple and isinstance(first, slice) and first == slice(None)


def coarsest_dtype(model: keras.Model) -> str:
    """Returns the coarsest dtype in which a part of a model computes or sends gradients."""
    layers = [model, *keras_compat.all_layers(model)]
    optimizers = model_contents.optimizers_of(model, nested=True)
    sent = {marks.COMPRESSION.get(each) for each in optimizers}
    found = ({layer.compute_dtype for layer in layers} | sent) & set(CLOSE)
    return max(found or {"float32"}, key=CLOSE.get)
