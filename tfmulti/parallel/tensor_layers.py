"""How a layer computes with a worker's part of its weight, on the rows of the worker's group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.choices import SPLITS
from tfmulti.parallel.group_rows import Group, with_dummy_row
from tfmulti.runtime.scoped import Scoped
from tfmulti.step import parameters, sparse_gradients
from tfmulti.step.rows import current_replica_batch, in_branch
from tfmulti.step.split_weights import Split, SplitParameter, compute_with

COLUMN, ROW, VOCABULARY = KINDS = SPLITS

_WEIGHTS = {
    keras.layers.Dense: "kernel",
    keras.layers.EinsumDense: "kernel",
    keras.layers.Embedding: "embeddings",
}
_ELEMENTWISE = (
    "celu",
    "elu",
    "exponential",
    "gelu",
    "hard_sigmoid",
    "hard_silu",
    "leaky_relu",
    "linear",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softsign",
    "tanh",
)
_calling = Scoped(None)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axis along which a weight is split.

    Attributes:
        of_weight: Its number in the weight.
        of_rows: Its number, counted from the end, in the layer's outputs if the weight is split by
            columns, in its inputs if by rows.
    """

    of_weight: int
    of_rows: int


def weight_of(layer: keras.layers.Layer) -> keras.Variable | None:
    """Returns the weight of a layer that can be split, or None."""
    name = _WEIGHTS.get(type(layer))
    found = [each for each in keras_compat.own_weights(layer) if each.name == name]
    return found[0] if found else None


def axes_of(layer: keras.layers.Layer, kind: str) -> Axes | None:
    """Returns the axis along which a layer's weight is split, or None if it cannot be split so.

    >>> axes_of(keras.layers.EinsumDense("abc,cde->abde", (None, 2, 3)), "column")
    Axes(of_weight=1, of_rows=-2)
    >>> axes_of(keras.layers.Dense(3), "row")
    Axes(of_weight=0, of_rows=-1)
    """
    if isinstance(layer, keras.layers.Embedding):
        return {COLUMN: Axes(1, -1), VOCABULARY: Axes(0, 0)}.get(kind)
    if isinstance(layer, keras.layers.Dense):
        return {COLUMN: Axes(1, -1), ROW: Axes(0, -1)}.get(kind)
    inputs, rest = layer.equation.replace(" ", "").split(",")
    weight, outputs = rest.split("->")
    if kind == VOCABULARY or inputs[0] != outputs[0] or inputs[0] in weight:
        return None
    rows, other = (outputs, inputs) if kind == COLUMN else (inputs, outputs)
    found = [label for label in weight if label in rows and label not in other]
    if not found:
        return None
    number = rows.index(found[0])
    if "..." in rows[number:]:
        # It stands for any number of axes, which also the count from the end would need.
        return None
    return Axes(weight.index(found[0]), number - len(rows))


class Pair:
    """A layer split by columns, and one split by rows that alone takes the first one's outputs.

    These outputs stay split: the workers exchange the inputs of the first layer and the outputs of
    the second, but not the wide features between them.

    Args:
        model: The model whose graph contains both.
        column: The first layer.
        row: The second layer.
    """

    def __init__(self, model: keras.Model, column: keras.layers.Layer, row: keras.layers.Layer):
        self._model, self._layers = model, (column, row)
        self._in_model = keras_compat.layers_of_nodes(model)
        self._calls: tuple = ()
        # The number of rows of each worker, and the inputs, of the latest call of the first layer.
        self._entered: tuple | None = None
        # The second layer takes a part of its inputs.
        row.input_spec = keras.layers.InputSpec(min_ndim=2)
        if column.bias is not None:
            marks.OF_GROUP.set(column.bias, True)

    def set_calls(self) -> None:
        """Records the layers' calls: if either is wrapped or replaced later, this is no pair."""
        self._calls = tuple(layer.call for layer in self._layers)

    def is_open(self) -> bool:
        """Whether the model itself is calling both layers, with their calls as recorded."""
        calls = tuple(layer.call for layer in self._layers)
        if _calling.value is not self._model or calls != self._calls:
            return False
        # `Sequential.add` and `pop` may have put another layer between the two.
        is_same = keras_compat.layers_of_nodes(self._model) == self._in_model
        return is_same and _is_elementwise(self._layers[0])

    def column(self, layer, group, inputs):
        """Returns this worker's part of the first layer's outputs, for the rows of its group."""
        rows, counts = group.all_gather(current_replica_batch().real_rows(inputs))
        self._entered = (counts, inputs)
        return own_columns(layer, rows)

    def row(self, layer, group, part):
        """Returns the second layer's outputs for this worker's rows, given a part of the inputs."""
        counts, inputs = self._entered
        return sum_of_parts(layer, group, part, counts, inputs)


def own_columns(layer: keras.layers.Layer, rows: tf.Tensor) -> tf.Tensor:
    """Returns this worker's part of the outputs of a layer that is split by columns.

    Args:
        layer: A `Dense`, or an `EinsumDense` whose first axis of the bias is the one of the split.
        rows: The inputs of the workers of the group.
    """
    outputs = _product(layer, rows, compute_with(weight_of(layer)))
    if layer.bias is not None:
        bias = _whole_bias(layer)
        outputs += tf.cast(bias[slice(*weight_of(layer).split.bounds())], outputs.dtype)
    return outputs if layer.activation is None else layer.activation(outputs)


def sum_of_parts(
    layer: keras.layers.Layer, group: Group, part: tf.Tensor, counts: tf.Tensor, like: tf.Tensor
) -> tf.Tensor:
    """Returns the outputs of a layer that is split by rows, for this worker's rows.

    Args:
        layer: The layer.
        group: The workers that have the parts.
        part: This worker's part of the inputs, for the rows of the group.
        counts: How many rows each worker has.
        like: A tensor with this worker's rows, and its padding.
    """
    outputs = _product(layer, part, compute_with(weight_of(layer)))
    return _add_bias(layer, with_dummy_row(group.reduce_scatter(outputs, counts), like))


def pairs_of(model: keras.Model, chosen) -> list[tuple[Pair, list[keras.layers.Layer]]]:
    """Finds layers split by columns whose outputs only a layer split by rows takes.

    Args:
        model: A model.
        chosen: Pairs of a layer and how it is split.

    Returns:
        Each `Pair` with its two layers.
    """
    nodes, kinds = keras_compat.nodes_of(model), {id(x): kind for x, kind in chosen}
    # Of a model in checkpointed parts, one part may end between the layers and run again alone. A
    # call of the model's own need not follow the graph.
    own_call = not keras_compat.is_stock(model.call)
    if nodes is None or own_call or marks.CHECKPOINTED.get(model):
        return []
    called = list(zip(keras_compat.layers_of_nodes(model), nodes))
    taken = [id(x) for _, (inputs, _) in called for x in inputs] + [id(x) for x in model.outputs]
    pairs = []
    for layer, (_, outputs) in called:
        takers = [each for each, (inputs, _) in called if inputs and inputs[0] is outputs[0]]
        both = [layer, *takers]
        if (
            len(takers) == 1
            and taken.count(id(outputs[0])) == 1
            and [kinds.get(id(each)) for each in both] == [COLUMN, ROW]
            and all(type(each) is keras.layers.Dense for each in both)
            and all([each is x for each, _ in called].count(True) == 1 for x in both)
            and _is_elementwise(layer)
        ):
            pairs.append((Pair(model, *both), both))
    if pairs:
        model.call = _noting_model(model, model.call)
    return pairs


def _noting_model(model, call):
    """Returns the model's call, during which `_calling` is the model."""

    @functools.wraps(call)
    def run(*args, **kwargs):
        with _calling.set_to(model):
            return call(*args, **kwargs)

    return run


def _is_elementwise(layer):
    """Whether a layer's activation is elementwise, and no penalty reads the activations."""
    # An activation may be a layer, which has no such name.
    name = "linear" if layer.activation is None else getattr(layer.activation, "__name__", "")
    stock = layer.activation is None or keras_compat.is_stock(layer.activation)
    return stock and name in _ELEMENTWISE and layer.activity_regularizer is None


def split_call(
    layer: keras.layers.Layer, kind: str, group: Group, pair: Pair | None = None
) -> Callable:
    """Returns a call that computes with this worker's part within a step; elsewhere the layer's.

    Args:
        layer: A layer whose weight is split.
        kind: How it is split.
        group: The workers that have the parts.
        pair: The pair that contains the layer, or None.
    """
    call, axes = layer.call, axes_of(layer, kind)
    compute = {COLUMN: _column, ROW: _row, VOCABULARY: _vocabulary}[kind]

    @functools.wraps(call)
    def run(inputs, *args, **kwargs):
        is_step = parameters.in_replica() and current_replica_batch() is not None
        if not is_step or keras_compat.is_symbolic(inputs):
            return call(inputs, *args, **kwargs)
        refuse_other_weights(layer)
        if not isinstance(inputs, tf.Tensor):
            raise ValueError(
                f"A split layer accepts only dense tensors. Received: a {type(inputs).__name__} "
                f"for {layer.name}. Convert it to a dense tensor in the dataset, or leave the "
                "layer out of `layout`."
            )
        if in_branch():
            return _with_whole_weight(layer, call, inputs)
        if pair is not None and pair.is_open():
            return getattr(pair, kind)(layer, group, inputs)
        if isinstance(layer, keras.layers.Embedding):
            if _are_positions(layer, inputs):
                return call(inputs, *args, **kwargs)
            inputs = _positive(layer, inputs)
        rows = compute(layer, axes, group, current_replica_batch().real_rows(inputs))
        return _add_bias(layer, with_dummy_row(rows, inputs))

    return run


def _with_whole_weight(layer, call, inputs):
    """Returns a layer's outputs in a branch or a loop, which not all workers may execute.

    They gather the weight before it, and exchange nothing within it.
    """
    if isinstance(layer, keras.layers.Embedding):
        return call(inputs)
    weight = tf.convert_to_tensor(weight_of(layer))
    return _add_bias(layer, _product(layer, inputs, weight))


def refuse_other_weights(layer: keras.layers.Layer) -> None:
    """Raises ValueError if a layer computes with more than its own weight; at any time."""
    reasons = {
        "LoRA": getattr(layer, "lora_enabled", False),
        "quantization": getattr(layer, "quantization_mode", None),
    }
    found = [name for name, has in reasons.items() if has]
    if found:
        raise ValueError(
            "`tensor_parallel` cannot split a layer with LoRA or quantization. Received: "
            f"{weight_of(layer).path}, with {found[0]}. Remove it from `layout`; "
            "shard='parameters' will shard it instead."
        )


def _column(layer, axes, group, own):
    split = weight_of(layer).split
    rows, counts = group.all_gather(own)
    part = _product(layer, rows, compute_with(weight_of(layer)))
    axis = part.shape.rank + axes.of_rows
    return group.features_to_rows(part, counts, _sizes(split), axis)


def _row(layer, axes, group, own):
    sizes = _sizes(weight_of(layer).split)
    rows, counts = group.rows_to_features(own, sizes, own.shape.rank + axes.of_rows)
    part = _product(layer, rows, compute_with(weight_of(layer)))
    return group.reduce_scatter(part, counts)


def _vocabulary(layer, axes, group, own):
    begin, end = weight_of(layer).split.bounds()
    # Each worker looks up the ids whose rows it has, and contributes zeros for the others.
    ids, counts = group.all_gather(own)
    is_here = (ids >= begin) & (ids < end)
    rows = _product(layer, tf.boolean_mask(ids - begin, is_here), compute_with(weight_of(layer)))
    shape = tf.concat([tf.shape(ids), [layer.output_dim]], 0)
    outputs = tf.scatter_nd(tf.where(is_here), rows, tf.cast(shape, tf.int64))
    outputs = tf.ensure_shape(outputs, [*ids.shape, layer.output_dim])
    return group.reduce_scatter(outputs, counts)


def _product(layer, rows, part):
    """Returns a layer's outputs for some rows from a part of its weight, without the bias."""
    if isinstance(layer, keras.layers.Embedding):
        return tf.cast(tf.gather(part, rows), layer.compute_dtype)
    # To the dtype of the rows, which may be whole numbers, weights would lose their fractions.
    part = tf.cast(part, layer.compute_dtype)
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(rows, part)
    return keras.ops.einsum(layer.equation, rows, part)


def _add_bias(layer, outputs):
    """Adds the bias, of which every worker has a copy, and applies the activation."""
    if getattr(layer, "bias", None) is not None:
        bias = tf.convert_to_tensor(layer.bias)
        if marks.OF_GROUP.get(layer.bias):
            bias = parameters.with_gradient_of_rows(bias)
        outputs = keras.ops.add(outputs, bias)
    activation = getattr(layer, "activation", None)
    return outputs if activation is None else activation(outputs)


def _are_positions(layer, inputs):
    """Whether ids are positions; each worker then reads the whole table, as without a split."""
    if not tf.executing_eagerly():
        return sparse_gradients.are_positions(inputs)
    noted = marks.TABLE_READS.get(current_replica_batch().model) or {}
    return noted.get(id(weight_of(layer))) == sparse_gradients.POSITIONS


def _whole_bias(layer):
    """Returns the bias with the gradient of the group's rows, even on a worker without rows."""
    if not isinstance(layer.bias, parameters.ShardedParameter):
        return tf.convert_to_tensor(layer.bias)
    parameters.note_read(layer.bias)
    return parameters.gather(layer.bias, layer.bias.held(), for_stages=True)


def _positive(layer, inputs):
    """Returns ids of a table's rows, with negative ones counted from its end, and checks them."""
    inputs = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    inputs = tf.where(inputs < 0, inputs + layer.input_dim, inputs)
    message = f"{layer.name} has {layer.input_dim} rows"
    check = tf.debugging.Assert(
        tf.reduce_all((inputs >= 0) & (inputs < layer.input_dim)), [message, inputs]
    )
    # Eagerly an assertion returns nothing.
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(inputs)


def _sizes(split: Split) -> list[int]:
    bounds = [split.bounds(part) for part in range(split.parts)]
    return [end - begin for begin, end in bounds]


def is_split(layer: keras.layers.Layer) -> bool:
    """Whether a layer's weight is split."""
    return isinstance(weight_of(layer), SplitParameter)
