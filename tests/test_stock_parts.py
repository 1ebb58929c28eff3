"""Every public layer, loss and metric of Keras is one device's.

That is so without verification, but for the few that combine rows, which "auto" verifies.
"""

import contextlib
import inspect

import keras
import numpy as np
import pytest
import stock_parts
from replicas import create_strategy

LAYERS = {
    "alone": stock_parts.LAYERS,
    "two inputs": stock_parts.PAIRS,
    "in RNN": stock_parts.CELLS,
    "not trained": stock_parts.UNTRAINED,
}
REDUCTIONS = ("mean_with_sample_weight", "sum_over_batch_size", "sum")
KINDS = {
    "layers": (list(LAYERS.values()), stock_parts.LAYERS_NOT_TRIED),
    "losses": ([stock_parts.LOSSES], stock_parts.LOSSES_NOT_TRIED),
    "metrics": ([stock_parts.METRICS], stock_parts.METRICS_NOT_TRIED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_class_is_tried(kind):
    tables, not_tried = KINDS[kind]
    known = {name for table in tables for name in table}
    known |= {name for names in not_tried.values() for name in names.split()}
    classes = {x for x in vars(getattr(keras, kind)).values() if inspect.isclass(x)}
    # A class may have several names.
    missing = classes - {getattr(getattr(keras, kind), name, None) for name in known}
    assert not missing


def here(table, kind):
    """The names in a table that this version of Keras has."""
    return [name for name in table if hasattr(getattr(keras, kind), name)]


def made(settings):
    return {key: value() if callable(value) else value for key, value in settings.items()}


def alike(names, key):
    """Groups of at most six names that have the same key: `names` of a test."""
    by_key = {}
    for name in names:
        by_key.setdefault(key(name), []).append(name)
    groups = [each[i : i + 6] for each in by_key.values() for i in range(0, len(each), 6)]
    # The first one is a sample of the test.
    groups.sort(key=len)
    return [pytest.param(group, id="-".join(group)) for group in groups]


def model_around(names, table, rows="alike"):
    """A model with an output for each layer amid others, those before it trainable if it can be."""
    kind, _ = table[names[0]]
    inputs, targets = stock_parts.ROWS[rows]
    rows = inputs[kind]
    given = keras.Input(rows.shape[1:], dtype="string" if kind == "texts" else rows.dtype)
    outputs = [output_of(name, table, given) for name in names]
    model = keras.Model(given, outputs)
    more = {"metrics": [["mae"] for _ in outputs]}
    model.compile(keras.optimizers.SGD(0.01, momentum=0.5), ["mse" for _ in outputs], **more)
    return model, rows, [targets["real"][:, :1]] * len(outputs)


def output_of(name, table, given):
    kind, settings = table[name]
    layer = getattr(keras.layers, name)(**made(settings))
    keeps = kind in ("numbers", "texts", "pixels")
    hidden, other = (given if keeps else keras.layers.Dense(4, "tanh")(given) for _ in range(2))
    if table is stock_parts.PAIRS:
        takes_two = name in ("MultiHeadAttention", "GroupQueryAttention")
        hidden = layer(hidden, other) if takes_two else layer([hidden, other])
    elif table is stock_parts.CELLS:
        hidden = keras.layers.RNN(layer)(hidden)
    else:
        hidden = layer(hidden)
    hidden = keras.layers.Flatten()(keras.layers.Rescaling(0.01 if kind == "pixels" else 1)(hidden))
    return keras.layers.Dense(1, name=f"of_{name}")(hidden)


def model_of_outputs(activation, targets, losses, more, rows):
    """A model with an output, and its targets, for each loss."""
    given = keras.Input((6,))
    hidden = keras.layers.Dense(5, "tanh")(given)
    outputs = [keras.layers.Dense(3, activation)(hidden) for _ in losses]
    if losses[0].__class__.__name__ == "Circle":
        outputs = [keras.layers.UnitNormalization()(each) for each in outputs]
    model = keras.Model(given, outputs)
    model.compile(keras.optimizers.SGD(0.001), losses, **more)
    inputs, all_targets = stock_parts.ROWS[rows]
    return model, inputs["flat"], [all_targets[targets]] * len(losses)


def train(num_replicas, make, weighted=False, is_untrained=False, verify="never"):
    """Weights, logs, evaluation and predictions; without training where that draws numbers."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    scope = contextlib.nullcontext()
    if num_replicas > 1:
        settings = {"verify": verify, "on_difference": "replicate"}
        scope = create_strategy(num_replicas, **settings).scope()
    with scope:
        model, x, y = make()
    weights = np.linspace(0, 2, len(x)).astype("float32") if weighted else None
    logs = {}
    if not is_untrained:
        settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        logs = model.fit(x, y, sample_weight=weights, **settings).history
    some = keras.tree.map_structure(lambda values: values[:13], y)
    logs["evaluated"] = model.evaluate(x[:13], some, batch_size=8, verbose=0)
    logs["predicted"] = model.predict(x[:13], batch_size=8, verbose=0)
    seen = {f"{i} {each.path}": each.numpy() for i, each in enumerate(model.weights)}
    return logs | {name: value for name, value in seen.items() if "seed" not in name}


def assert_as_one_device(make, **more):
    expected, found = train(1, make, **more), train(3, make, **more)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


def groups_of_layers(apart=()):
    for how, table in LAYERS.items():
        inputs = {name: table[name][0] for name in here(table, "layers") if name not in apart}
        for each in alike(inputs, inputs.get):
            yield pytest.param(how, *each.values, id=each.id)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how, names", groups_of_layers())
def test_layers(how, names):
    assert_as_one_device(
        lambda: model_around(names, LAYERS[how]), is_untrained=how == "not trained"
    )


@pytest.mark.slow
@pytest.mark.parametrize("how, names", groups_of_layers(apart=["GroupNormalization"]))
def test_layers_of_rows_that_are_unlike(how, names):
    def make():
        return model_around(names, LAYERS[how], "unlike")

    assert_as_one_device(make, is_untrained=how == "not trained", verify="auto")


@pytest.mark.slow
def test_groups_that_vary_little():
    def make():
        # They amplify rounding: by 4e-5 in float32, 2e-15 in float64.
        keras.mixed_precision.set_global_policy("float64")
        return model_around(["GroupNormalization"], LAYERS["alone"], "unlike")

    assert_as_one_device(make, verify="auto")


@pytest.mark.slow
def test_images_are_equalized_by_the_histogram_of_the_whole_batch():
    def make():
        # In float32 the layer has no effect: a functional model takes its input for its output.
        keras.mixed_precision.set_global_policy("float64")
        return model_around(["Equalization"], LAYERS["alone"], "unlike")

    assert_as_one_device(make, verify="auto")


@pytest.mark.slow
def test_texts_are_as_long_as_the_longest_of_the_whole_batch():
    def make():
        given = keras.Input((1,), dtype="string")
        hidden = keras.layers.TextVectorization(vocabulary=["a", "b"])(given)
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(4, 3)(hidden))
        model = keras.Model(given, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        inputs, targets = stock_parts.ROWS["unlike"]
        return model, inputs["texts"], targets["real"][:, :1]

    assert_as_one_device(make, verify="auto")


# Keras refuses weights of rows where a loss is no mean over rows, and for these metrics.
UNWEIGHTED = ("Circle", "Dice", "Tversky", "BinaryIoU", "IoU", "MeanIoU")


def groups_of_outputs(table, kind):
    return alike(here(table, kind), lambda name: (table[name][:2], name in UNWEIGHTED))


@pytest.mark.slow
@pytest.mark.parametrize("rows", stock_parts.ROWS)
@pytest.mark.parametrize("names", groups_of_outputs(stock_parts.LOSSES, "losses"))
def test_losses(names, rows):
    targets, activation = stock_parts.LOSSES[names[0]]

    def make():
        # Some have values, or gradients, of hundreds: their rounding would not be small.
        keras.mixed_precision.set_global_policy("float64")
        losses = [
            getattr(keras.losses, name)(reduction=reduction, dtype="float64")
            for name in names
            for reduction in REDUCTIONS
        ]
        return model_of_outputs(activation, targets, losses, {}, rows)

    assert_as_one_device(make, weighted=names[0] not in UNWEIGHTED)


@pytest.mark.slow
@pytest.mark.parametrize("rows", stock_parts.ROWS)
@pytest.mark.parametrize("names", groups_of_outputs(stock_parts.METRICS, "metrics"))
def test_metrics(names, rows):
    targets, activation, _ = stock_parts.METRICS[names[0]]
    weighted = names[0] not in UNWEIGHTED
    settings = {name: stock_parts.METRICS[name][2] for name in names}

    def make():
        metrics = {"metrics": [getattr(keras.metrics, x)(**settings[x]) for x in names]}
        if weighted:
            metrics["weighted_metrics"] = [
                getattr(keras.metrics, x)(**settings[x], name=f"weighted_{x}") for x in names
            ]
        loss = "sparse_categorical_crossentropy" if targets == "class" else "mse"
        return model_of_outputs(activation, targets, [loss], metrics, rows)

    assert_as_one_device(make, weighted=weighted)
