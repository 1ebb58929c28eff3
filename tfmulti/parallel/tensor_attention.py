"""Attention that is split by its heads: each worker computes its heads for the rows of its group.

The workers exchange the layer's inputs and its outputs, and not the heads between them, as in
Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053, section 3).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.parallel import tensor_layers
from tfmulti.parallel.group_rows import Group
from tfmulti.runtime.scoped import Scoped
from tfmulti.step import parameters
from tfmulti.step.rows import current_replica_batch, in_branch

_KINDS = {
    "query": tensor_layers.COLUMN,
    "key": tensor_layers.COLUMN,
    "value": tensor_layers.COLUMN,
    "attention_output": tensor_layers.ROW,
}
# The rank of inputs, `(B, T, features)`, and the axis of heads in the scores, `(B, heads, T, S)`.
_RANK, _AXIS_OF_HEADS = 3, 1
# The arguments of the layer that have rows.
_ROWS = ("query", "key", "value", "query_mask", "key_mask", "value_mask", "attention_mask")


class Heads:
    """An attention layer whose four inner layers are split by heads, which stay split in its call.

    Attributes:
        layers: The inner layers.

    Args:
        attention: The layer.
        layers: Its inner layers.
        group: The workers that have the parts.
    """

    def __init__(self, attention: keras.layers.Layer, layers: list, group: Group):
        self.layers = layers
        self._attention, self._group = attention, group
        self._calls: tuple = ()
        # Within a call: how many rows each worker has, and this worker's queries.
        self._called = Scoped(None)
        for layer in layers:
            if _KINDS[layer.name] == tensor_layers.COLUMN and layer.bias is not None:
                marks.OF_GROUP.set(layer.bias, True)

    def set_calls(self) -> None:
        """Replaces the attention layer's call, and records those of its inner layers."""
        self._calls = self._current_calls()
        self._attention.call = self._split_call(self._attention.call)

    def is_open(self) -> bool:
        """Whether the attention layer is calling its inner layers with the rows of the group."""
        return self._called.value is not None

    def column(self, layer, group, rows):
        """Returns this worker's heads of queries, keys or values, for the rows of its group."""
        return tensor_layers.own_columns(layer, rows)

    def row(self, layer, group, part):
        """Returns the layer's outputs for this worker's rows, given its heads."""
        counts, queries = self._called.value
        return tensor_layers.sum_of_parts(layer, group, part, counts, queries)

    def _current_calls(self):
        return tuple(layer.call for layer in self.layers)

    def _split_call(self, call) -> Callable:
        signature = inspect.signature(call)

        @functools.wraps(call)
        def run(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            # What draws for all heads, in verification, is compared with what draws for some.
            with keras_compat.same_draws_along(_AXIS_OF_HEADS):
                if self._stays_split(given):
                    return self._with_rows_of_group(call, given)
                return call(*args, **kwargs)

        return run

    def _with_rows_of_group(self, call, given):
        """Returns the layer's outputs for this worker's rows, with its mask."""
        own_mask = keras_compat.mask_of(given["query"])
        rows, counts = self._gather(given)
        with self._called.set_to((counts, given["query"])):
            outputs = call(**given | rows)
        for name in rows:
            # Keras takes the masks off the inputs of some of these layers.
            had_mask = keras_compat.mask_of(given[name]) is not None
            if had_mask and keras_compat.mask_of(rows[name]) is None:
                keras_compat.remove_mask(given[name])
        if keras_compat.mask_of(outputs) is not None:
            keras_compat.set_mask(outputs, own_mask)
        return outputs

    def _stays_split(self, given) -> bool:
        """Whether a call of dense tensors in a step, and in no branch, returns no scores."""
        is_step = parameters.in_replica() and current_replica_batch() is not None
        tensors = [given[name] for name in ("query", "key", "value") if given.get(name) is not None]
        mask = tf.TensorShape(getattr(given.get("attention_mask"), "shape", ()))
        return (
            is_step
            and not in_branch()
            and all(isinstance(each, tf.Tensor) for each in tensors)
            and all(each.shape.rank == _RANK for each in tensors)
            # A mask may differ between heads.
            and (mask.rank <= _RANK or mask[_AXIS_OF_HEADS] == 1)
            and not given.get("return_attention_scores")
            and self._current_calls() == self._calls
            and not any(layer.activity_regularizer for layer in self.layers)
        )

    def _gather(self, given) -> tuple[dict, tf.Tensor]:
        """Returns the arguments that have rows, with those of the group, and each worker's number.

        Queries, keys and values are often one tensor, which is exchanged once.
        """
        mask = given.get("attention_mask")
        if mask is not None:
            given = given | {"attention_mask": _for_each_row(mask, given["query"])}
        known: dict[int, tf.Tensor] = {}
        _, counts = self._gather_one(given["query"], known)
        rows = {}
        for name in _ROWS:
            own = given.get(name)
            if own is None or (name == "attention_mask" and own.shape.rank < _RANK):
                continue
            rows[name] = self._gather_one(own, known)[0]
            mask = keras_compat.mask_of(own)
            if mask is not None:
                keras_compat.set_mask(rows[name], self._gather_one(mask, known)[0])
        return rows, counts

    def _gather_one(self, own, known) -> tuple[tf.Tensor, tf.Tensor]:
        if id(own) not in known:
            tensor = tf.convert_to_tensor(own)
            known[id(own)] = self._group.all_gather(current_replica_batch().real_rows(tensor))
        return known[id(own)]


def _for_each_row(mask, query) -> tf.Tensor:
    """Returns a mask `(B, T, S)`, or `(1, T, S)` for all rows, with a row for each query.

    A single row may be the mask of this worker's only row, which is for no other worker's rows. A
    mask `(T, S)` has no rows.
    """
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank < _RANK:
        return mask
    return tf.broadcast_to(mask, tf.concat([tf.shape(query)[:1], tf.shape(mask)[1:]], 0))


def heads_of(layers: list, chosen: list, group: Group) -> list[Heads]:
    """Finds attention layers of Keras's own whose four inner layers are split by heads.

    Args:
        layers: All layers of a model.
        chosen: Pairs of a layer and how it is split.
        group: The workers that have the parts.
    """
    kinds = {id(layer): kind for layer, kind in chosen}
    found = []
    for each in layers:
        if type(each) in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention):
            dense = [
                x for x in keras_compat.all_layers(each) if tensor_layers.weight_of(x) is not None
            ]
            is_split = {layer.name: kinds.get(id(layer)) for layer in dense} == _KINDS
            if is_split and _is_even(each, group.parts):
                found.append(Heads(each, dense, group))
    return found


def _is_even(attention, parts) -> bool:
    """Whether each worker's queries find their keys and values there."""
    if isinstance(attention, keras.layers.MultiHeadAttention):
        return True
    heads = (attention.num_query_heads, attention.num_key_value_heads)
    return all(number % parts == 0 for number in heads)
