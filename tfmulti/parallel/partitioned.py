"""Embeddings on parameter servers: each server looks up its own rows; large tables are cut.

With Keras's own layer every worker would receive the whole table in each step. Here only the rows
that a step looks up travel, and their gradients.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.sharding import replica_slice
from tfmulti.step import clipping, split_weights

SMALLEST_PART_BYTES = 256 * 1024
"""The smallest part into which a table is cut, as TensorFlow's `MinSizePartitioner` has it."""

_DRAWN_WHOLE_BYTES = 2**30
_PIECE_BYTES = 2**24
# Initializers whose values do not depend on the shape, so that a table can be drawn in pieces.
_DRAWN_IN_PIECES = (
    keras.initializers.Constant,
    keras.initializers.Ones,
    keras.initializers.RandomNormal,
    keras.initializers.RandomUniform,
    keras.initializers.TruncatedNormal,
    keras.initializers.Zeros,
)

# Penalties that are sums over elements.
_ADDED_UP = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_ONE_SERVER = "one server (--num_ps 1), which does not partition tables"


def build(original, layer: keras.layers.Embedding, input_shape=None) -> None:
    """Builds an embedding whose rows are looked up on the servers.

    Args:
        original: Keras's own `build`.
        layer: The layer.
        input_shape: The argument of `build`.
    """
    if layer.built:
        return
    plain = type(layer) is keras.layers.Embedding
    if not plain or layer.lora_rank or layer.quantization_mode:
        original(layer, input_shape)
        return
    parts = _number_of_parts(layer) if _may_be_cut(layer) else 1
    if parts == 1:
        original(layer, input_shape)
        tables = [layer.embeddings]
    else:
        tables = _create_parts(layer, parts)
        layer.built = True
        table = PartitionedTable(tables)
        keras_compat.replace_table(layer, table)
        object.__setattr__(layer, "save_own_variables", lambda store: _save(table, store))
        object.__setattr__(layer, "load_own_variables", lambda store: _load(table, store))
        # As from a layer whose table is whole: `get_weights()[0]` would be the first part alone.
        object.__setattr__(layer, "get_weights", lambda: [table.numpy()])
        object.__setattr__(layer, "set_weights", lambda weights: _set(layer, table, weights))
        object.__setattr__(layer, "enable_lora", lambda *_, **__: _refuse_lora(layer, parts))
    object.__setattr__(layer, "call", lambda inputs: _call(layer, tables, inputs))


class PartitionedTable:
    """The whole table of a layer, `layer.embeddings`, whose parts are on several servers.

    Attributes:
        parts: The variables with its rows, in order.
    """

    def __init__(self, parts: list[keras.Variable]):
        self.parts = parts

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole table."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def dtype(self) -> str:
        """The dtype of its values."""
        return self.parts[0].dtype

    @property
    def trainable(self) -> bool:
        """Whether optimizers update it."""
        return self.parts[0].trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        for part in self.parts:
            part.trainable = value

    @property
    def value(self) -> tf.Tensor:
        """The whole table as a tensor."""
        return tf.concat([tf.convert_to_tensor(part) for part in self.parts], 0)

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        """Returns the whole table to code that computes with it, as tied output layers do."""
        return tf.convert_to_tensor(self.value, dtype, name=name)

    def numpy(self) -> np.ndarray:
        """Returns the whole table."""
        return np.concatenate([keras.ops.convert_to_numpy(part) for part in self.parts])

    def assign(self, values) -> None:
        """Sets all rows.

        Raises:
            ValueError: If they are not as many, or have another length.
        """
        if tuple(np.shape(values)) != self.shape:
            raise ValueError(
                f"A layer expects a table of {self.shape}. Received: values of "
                f"{tuple(np.shape(values))}. Create the layer with their input_dim and output_dim."
            )
        for part, (start, stop) in zip(self.parts, _ranges_of(self.parts)):
            part.assign(values[start:stop])


def prepare_optimizer(model: keras.Model) -> None:
    """Makes a model's optimizer update tables that are cut as if they were whole.

    Raises:
        ValueError: If it reads whole variables, which it cannot do of a table that is cut.
    """
    optimizer = keras_compat.inner_optimizer(model.optimizer)
    tables = [getattr(layer, "embeddings", None) for layer in keras_compat.all_layers(model)]
    cut = [table for table in tables if isinstance(table, PartitionedTable)]
    if not cut:
        return
    _refuse_whole_updates(optimizer, cut[0])
    if keras_compat.has_custom_step(model, "train"):
        warnings.warn(
            "A custom `train_step` gets a gradient for each partition of a large table: "
            f"{_where(cut[0])}. If it computes from a variable's whole gradient, as "
            "tf.clip_by_norm does, the result differs from that of the unpartitioned table. Use "
            f"{_ONE_SERVER}, or the optimizer's `clipnorm`.",
            stacklevel=5,
        )
    clipping.clip_together(optimizer, [table.parts for table in cut])
    keras_compat.exclude_parts(optimizer, {table: table.parts for table in cut})


def tables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the tables of a model's embeddings, of those that are cut the parts."""
    layers = keras_compat.all_layers(model)
    layers = [x for x in layers if isinstance(x, keras.layers.Embedding) and x.built]
    tables = [layer.embeddings for layer in layers if not layer.lora_enabled]
    return [v for x in tables for v in (x.parts if isinstance(x, PartitionedTable) else [x])]


def _refuse_whole_updates(optimizer, table):
    """Raises ValueError for an optimizer of Keras's that reads whole variables; warns of others."""
    if split_weights.updates_elements(optimizer):
        return
    name = type(optimizer).__name__
    if keras_compat.is_stock(type(optimizer)):
        raise ValueError(
            "Large embedding tables are partitioned over the servers, so the optimizer must be "
            f"element-wise. Received: {name}, for {_where(table)}. Use for example Adam or SGD, or "
            f"{_ONE_SERVER}."
        )
    warnings.warn(
        f"{name} updates each partition of a large table separately: {_where(table)}. If the "
        "update of one element depends on others, the result differs from that of the "
        f"unpartitioned table. In that case use {_ONE_SERVER}.",
        stacklevel=6,
    )


def _where(table) -> str:
    return f"{table.parts[0].path}, which is partitioned into {len(table.parts)} parts"


def _may_be_cut(layer) -> bool:
    """Whether a constraint or a penalty of the whole table is that of its parts together."""
    penalty = layer.embeddings_regularizer
    return layer.embeddings_constraint is None and (penalty is None or type(penalty) in _ADDED_UP)


def _ranges_of(parts):
    ends = np.cumsum([part.shape[0] for part in parts]).tolist()
    return list(zip([0, *ends], ends))


def _number_of_parts(layer) -> int:
    strategy = tf.distribute.get_strategy()
    size = layer.input_dim * layer.output_dim * tf.as_dtype(layer.variable_dtype).size
    return max(1, min(strategy.num_servers, layer.input_dim, size // SMALLEST_PART_BYTES))


def _create_parts(layer, parts) -> list[keras.Variable]:
    shape = (layer.input_dim, layer.output_dim)
    dtype = layer.variable_dtype
    size = np.prod(shape, dtype=np.int64) * tf.as_dtype(dtype).size
    pieces = tf.distribute.get_strategy().pieces
    # Drawn at once, as on one device. A larger table may not fit in memory: each part is drawn.
    whole = _DrawnWhole(layer, shape, dtype, parts) if size <= _DRAWN_WHOLE_BYTES else None
    tables = []
    for number in range(parts):
        start, stop = replica_slice(layer.input_dim, parts, number)
        initializer = layer.embeddings_initializer
        if whole is not None:
            initializer = whole.rows(start, stop)
        elif type(initializer) in _DRAWN_IN_PIECES:
            initializer = pieces.initializer(initializer, number)
        elif isinstance(initializer, keras.initializers.Initializer):
            initializer = initializer.clone()
        tables.append(
            layer.add_weight(
                shape=(stop - start, layer.output_dim),
                initializer=initializer,
                name=f"embeddings_{number}",
                regularizer=layer.embeddings_regularizer,
                trainable=True,
            )
        )
    return tables


class _DrawnWhole:
    """The initial values of a whole table, kept until all parts have theirs."""

    def __init__(self, layer, shape, dtype, parts):
        self._draw = lambda: layer.embeddings_initializer(shape, dtype=dtype)
        self._values, self._parts_left = None, parts

    def rows(self, start, stop):
        """Returns an initializer of some rows."""

        def draw(shape, dtype=None):
            # Keras may build a layer within a graph, and create its variables later.
            with tf.init_scope():
                if self._values is None:
                    self._values = self._draw()
                values = self._values[start:stop]
            self._parts_left -= 1
            if not self._parts_left:
                self._values = None
            return values

        return draw


class Pieces:
    """Draws the initial values of the parts of large tables piece by piece, on their servers.

    TensorFlow would first draw all values of a part into a temporary tensor, for which a server may
    have no memory.
    """

    def __init__(self):
        self._waiting = None

    def initializer(self, initializer, part: int):
        """Returns an initializer of a part: zeros, which `fill` then replaces."""

        def draw_zeros(shape, dtype=None):
            self._waiting = initializer, part
            return tf.zeros(shape, dtype)

        return draw_zeros

    def fill(self, variable: tf.Variable) -> None:
        """Fills a new variable with its initial values, if it is such a part."""
        if self._waiting is None:
            return
        (initializer, part), self._waiting = self._waiting, None
        rows, columns = variable.shape
        step = max(1, _PIECE_BYTES // (columns * variable.dtype.size))
        with tf.init_scope(), tf.device(variable.device):
            for number, start in enumerate(range(0, rows, step)):
                stop = min(start + step, rows)
                draw = _initializer_of_piece(initializer, part, number)
                values = draw((stop - start, columns), dtype=variable.dtype.name)
                variable.scatter_update(tf.IndexedSlices(values, tf.range(start, stop)))


def _initializer_of_piece(initializer, part, number):
    """Returns the initializer with a seed of the piece's own: one seed would repeat its values."""
    config = initializer.get_config()
    if "seed" in config:
        seed = initializer.seed
        seeds = [seed] if isinstance(seed, int) else np.asarray(seed.next()).tolist()
        [drawn] = np.random.SeedSequence([*seeds, part, number]).generate_state(1)
        config["seed"] = int(drawn >> 1)
    return type(initializer).from_config(config)


def _call(layer, tables, inputs):
    if layer.lora_enabled:
        # Keras adds the product of two matrices to the table.
        return type(layer).call(layer, inputs)
    if keras.backend.is_keras_tensor(inputs):
        return keras.ops.cast(keras.ops.take(tables[0], inputs, axis=0), layer.compute_dtype)
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    ids = tf.where(ids < 0, ids + layer.input_dim, ids)
    rows = look_up([table.value for table in tables], ids)
    return tf.cast(rows, layer.compute_dtype)


def look_up(tables, ids: tf.Tensor) -> tf.Tensor:
    """Looks up rows of a table that is cut into parts.

    Args:
        tables: The parts: variables or tensors.
        ids: Numbers of rows, of any shape.

    Returns:
        The rows, of shape `(*ids.shape, columns)`.
    """
    # A GPU, or a look-up in parts, would give zeros without an error.
    size = sum(int(table.shape[0]) for table in tables)
    inside = tf.debugging.Assert(
        tf.reduce_all((ids >= 0) & (ids < size)),
        ["`inputs` of an Embedding must be from -input_dim to input_dim - 1.", size, ids],
    )
    # Eagerly an assertion returns nothing.
    with tf.control_dependencies([inside] if inside is not None else []):
        ids = tf.identity(ids)
    if len(tables) == 1:
        return tf.gather(tables[0], ids)
    flat = tf.reshape(ids, [-1])
    places, parts = [], []
    for table, (start, stop) in zip(tables, _ranges_of(tables)):
        indices = tf.where((flat >= start) & (flat < stop))[:, 0]
        places.append(tf.cast(indices, tf.int32))
        parts.append(tf.gather(table, tf.gather(flat, indices) - start))
    rows = tf.dynamic_stitch(places, parts)
    return tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))


def _save(table, store):
    store["0"] = table.numpy()


def _load(table, store):
    table.assign(np.asarray(store["0"]))


def _set(layer, table, weights):
    """Sets the whole table by one array, as `Embedding(weights=...)` does, or each part by its own.

    Keras would expect as many arrays as there are parts.
    """
    if len(weights) == 1 and tuple(np.shape(weights[0])) == table.shape:
        table.assign(weights[0])
    else:
        type(layer).set_weights(layer, weights)


def _refuse_lora(layer, parts):
    raise ValueError(
        "`enable_lora` needs the whole table on one server, so it must not be partitioned over the "
        f"servers. Received: {layer.name}, which is partitioned into {parts} parts. Use one server "
        "(--num_ps 1), which does not partition tables, or leave enable_lora out."
    )
