"""Tensor parallelism: splits wide layers over the workers of a group."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping

import keras

from tfmulti import keras_compat, topology
from tfmulti.parallel import tensor_attention, tensor_layers
from tfmulti.parallel.group_rows import Group
from tfmulti.settings import check_type
from tfmulti.step import parameters, split_weights


def tensor_parallel(
    model: keras.Model, layout: Mapping[str, str], group: int | None = None
) -> keras.Model:
    """Splits wide layers over the workers of each group, which compute their parts together.

    Each worker of a group holds a part of a layer's weight, with its gradient and slots. It
    computes its part of the layer for the rows of the whole group; the workers then exchange their
    results, and each continues with its own rows. Between groups, and in all other layers, training
    is data parallel. Losses, gradients and metrics are those of one device, and files those of the
    unsplit model. With one replica in total it has no effect.

    Args:
        model: A built model, created in the strategy's scope.
        layout: How each weight is split, by a regular expression that is searched in the weights'
            paths, as in `keras.distribution.LayoutMap`. `"column"` splits the outputs of a `Dense`
            or `EinsumDense` (also those within attention), or the columns of an `Embedding`;
            `"row"` the inputs of a `Dense` or `EinsumDense`; `"vocabulary"` the rows of an
            `Embedding`. Biases stay whole.
        group: The number of workers in a group, which must divide the number of workers; None for
            all workers.

    Returns:
        The same model.

    Raises:
        ValueError: If a pattern matches no weight that can be split that way, two patterns match
            one weight, or a weight is too small; if the model is not built or has been compiled; if
            `group` does not divide the number of workers, or workers have several replicas or no
            MPI.

    Example:
        >>> import tfmulti
        >>> strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
        >>> with strategy.scope():
        ...     wide = keras.layers.Dense(64, name="wide")
        ...     out = keras.layers.Dense(4, name="out")
        ...     model = keras.Sequential([keras.Input((8,)), wide, out])
        ...     layout = {"wide/kernel": "column", "out/kernel": "row"}
        ...     model = tfmulti.tensor_parallel(model, layout)

    Sources: Shoeybi et al., 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
    Using Model Parallelism"; Korthikanti et al., 2022, "Reducing Activation Recomputation in Large
    Transformer Models".
    """
    check_type("model", model, keras.Model, "a Keras model", "Pass a built model.")
    _refuse_model(model)
    chosen = _chosen(model, layout)
    strategy = model.distribute_strategy
    topology.refuse_servers(
        strategy,
        "tensor_parallel",
        "Large embeddings are divided over the servers without it.",
    )
    if strategy.num_replicas_in_sync == 1:
        return model
    number = _number_in_group(strategy, group)
    workers = Group(strategy, number)
    for layer, kind in chosen:
        _refuse_narrow(layer, kind, number)
    for layer, kind in chosen:
        axis = tensor_layers.axes_of(layer, kind).of_weight
        split_weights.split(tensor_layers.weight_of(layer), strategy, axis, number)
    pairs = tensor_layers.pairs_of(model, chosen)
    heads = tensor_attention.heads_of(keras_compat.all_layers(model), chosen, workers)
    pair_of = {id(layer): pair for pair, both in pairs for layer in both}
    pair_of |= {id(layer): each for each in heads for layer in each.layers}
    for layer, kind in chosen:
        layer.call = tensor_layers.split_call(layer, kind, workers, pair_of.get(id(layer)))
    for pair, _ in pairs:
        pair.set_calls()
    for each in heads:
        each.set_calls()
    return model


def _chosen(model, layout) -> list[tuple[keras.layers.Layer, str]]:
    """Returns the layers that a layout names, and how each is split."""
    if not isinstance(layout, Mapping) or not layout:
        raise ValueError(
            "`layout` must be a dict from patterns of paths to kinds of splits. Received: "
            f"layout={layout!r}. Use for example {{'dense/kernel': 'column'}}."
        )
    layers = [x for x in keras_compat.all_layers(model) if tensor_layers.weight_of(x) is not None]
    chosen: dict[int, tuple] = {}
    for pattern, kind in layout.items():
        if kind not in tensor_layers.KINDS:
            raise ValueError(
                f"`layout` must name one of {', '.join(tensor_layers.KINDS)}. "
                f"Received: layout={{{pattern!r}: {kind!r}}}. Use 'column' for a layer's outputs, "
                "'row' for its inputs, 'vocabulary' for the rows of a table."
            )
        _refuse_pattern(pattern)
        matches = [x for x in layers if re.search(pattern, tensor_layers.weight_of(x).path)]
        if not matches:
            raise ValueError(_no_match(model, pattern, layers))
        for layer in matches:
            if id(layer) in chosen:
                path, other = tensor_layers.weight_of(layer).path, chosen[id(layer)][2]
                raise ValueError(
                    "Patterns of `layout` must match different weights. Received: "
                    f"{other!r} and {pattern!r}, which both match {path}. Make one more specific."
                )
            _refuse_layer(model, layer, kind)
            chosen[id(layer)] = (layer, kind, pattern)
    return [(layer, kind) for layer, kind, _ in chosen.values()]


def _refuse_pattern(pattern):
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            "Each pattern of `layout` must be a regular expression. "
            f"Received: {pattern!r}: {error}. Use for example 'dense/kernel'."
        ) from error


def _no_match(model, pattern, layers) -> str:
    others = [weight.path for weight in model.weights if re.search(pattern, weight.path)]
    matched = f"which matches {', '.join(others[:3])}" if others else "which matches nothing"
    paths = [tensor_layers.weight_of(layer).path for layer in layers]
    return (
        "Each pattern of `layout` must match a kernel of Dense or EinsumDense, or the table of an "
        f"Embedding. Received: {pattern!r}, {matched}. These can be split: "
        f"{', '.join(paths[:12]) or 'none'}. Other weights can be sharded: shard='parameters'."
    )


def _refuse_layer(model, layer, kind):
    path = tensor_layers.weight_of(layer).path
    tensor_layers.refuse_other_weights(layer)
    if tensor_layers.axes_of(layer, kind) is None:
        raise ValueError(
            "`layout` must split a Dense or EinsumDense by 'column' or 'row', and an Embedding by "
            f"'column' or 'vocabulary'. Received: {kind!r} for {path}, of a {type(layer).__name__}"
            f"{' ' + layer.equation if hasattr(layer, 'equation') else ''}. Use another kind."
        )
    loops = (keras.layers.RNN, keras.layers.Wrapper)
    within = [
        each.name
        for each in keras_compat.all_layers(model)
        if isinstance(each, loops) and any(x is layer for x in keras_compat.all_layers(each))
    ]
    reasons = {
        "a constraint": tensor_layers.weight_of(layer).constraint,
        f"the layer {within[0] if within else ''} around it": within,
    }
    found = [name for name, has in reasons.items() if has]
    if found:
        raise ValueError(
            "`tensor_parallel` cannot split a layer that has a constraint, or that is within an "
            f"RNN or a Wrapper. Received: {path}, with {found[0]}. Remove it from `layout`; "
            "shard='parameters' will shard it instead."
        )


def _refuse_narrow(layer, kind, number):
    weight = tensor_layers.weight_of(layer)
    size = weight.shape[tensor_layers.axes_of(layer, kind).of_weight]
    if size < number:
        raise ValueError(
            "A weight must have an element for each worker of a `group`. Received: "
            f"{weight.path}, of size {size} along its {kind} axis, and {number} workers. Leave it "
            "out of `layout`, or use smaller groups."
        )


def _refuse_model(model):
    if not model.built or not model.weights:
        raise ValueError(
            "`tensor_parallel` needs a built model, whose weights have paths. "
            f"Received: {model.name!r}, which has {'no weights' if model.built else 'not been'}"
            f"{'' if model.built else ' built'}. Give it an `Input`; call a subclassed model on a "
            "batch of the data."
        )
    if getattr(model, "optimizer", None) is not None:
        raise ValueError(
            "`tensor_parallel` must be called before `compile`. Received: "
            f"{model.name!r}, which is compiled. Call it first."
        )
    layers = [model, *keras_compat.all_layers(model)]
    if any(getattr(weight, "stages", None) for weight in model.weights):
        raise ValueError(
            "`tensor_parallel` cannot split layers of a pipeline. Received: "
            f"{model.name!r}, which tfmulti.pipeline has cut. Use one of the two."
        )
    if any(map(tensor_layers.is_split, layers)):
        raise ValueError(
            "`tensor_parallel` must be called once for a model. Received: "
            f"{model.name!r}, whose weights are split already. Name all weights in one `layout`."
        )


def _number_in_group(strategy, group) -> int:
    workers = topology.num_workers(strategy)
    parameters.refuse_several_replicas(strategy, "tensor_parallel", " --mpi")
    number = workers if group is None else group
    if not isinstance(number, numbers.Integral) or number < 2 or workers % number:
        raise ValueError(
            "`group` must be a whole number of at least 2 that divides the number of workers. "
            f"Received: group={group!r}, {workers} workers. Leave it out for all workers."
        )
    if getattr(strategy.extended, "exchange_among", None) is None:
        raise ValueError(
            "`tensor_parallel` needs MPI, with which workers of a group exchange rows. Received: "
            f"communication {strategy.communication}. Start the workers with python -m "
            "tfmulti.launch --mpi, after pip install 'tfmulti[mpi]'; on GPUs set communication "
            'to "mpi" (--communication mpi).'
        )
    return int(number)
