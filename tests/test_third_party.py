"""Models of other libraries come to one device's weights and logs, and none is refused."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from replicas import create_strategy

NEEDS_HUB = "needs keras-hub: pip install 'tfmulti[libraries]'"
BATCH = 8
# Batches of 8, 8 and 5, none of which divides evenly among 3 replicas, nor the last among 2.
COUNT = 21
LENGTH = 7


def hub():
    return pytest.importorskip("keras_hub", reason=NEEDS_HUB)


def sequences(seed=0):
    """Tokens of texts that end at different places, and which of them are there."""
    rng = np.random.RandomState(seed)
    tokens = rng.randint(1, 40, (COUNT, LENGTH + 1))
    lengths = rng.randint(2, LENGTH + 1, COUNT)
    return tokens, (np.arange(LENGTH) < lengths[:, None]).astype("int32")


def text_classifier(optimizer):
    backbone = hub().models.BertBackbone(
        vocabulary_size=40,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0,
        max_sequence_length=LENGTH,
    )
    model = hub().models.BertTextClassifier(backbone, num_classes=3, dropout=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def texts():
    tokens, there = sequences()
    segments = np.zeros_like(there)
    inputs = {"token_ids": tokens[:, :-1], "segment_ids": segments, "padding_mask": there}
    return {"x": inputs, "y": tokens[:, 0] % 3}


def language_model(optimizer):
    backbone = hub().models.GPT2Backbone(
        vocabulary_size=40,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0,
        max_sequence_length=LENGTH,
    )
    model = hub().models.GPT2CausalLM(backbone)
    perplexity = hub().metrics.Perplexity(from_logits=True, mask_token_id=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=[perplexity], weighted_metrics=["accuracy"])
    return model


def texts_to_go_on():
    tokens, there = sequences(1)
    following = np.where(there, tokens[:, 1:], 0)
    inputs = {"token_ids": tokens[:, :-1], "padding_mask": there}
    return {"x": inputs, "y": following, "sample_weight": there.astype("float32")}


def image_classifier(optimizer):
    backbone = hub().models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    )
    model = hub().models.ViTImageClassifier(backbone, num_classes=3, pooling="token")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def images():
    rng = np.random.RandomState(2)
    return {"x": rng.rand(COUNT, 8, 8, 3).astype("float32"), "y": rng.randint(0, 3, COUNT)}


MODELS = {
    "BERT": (text_classifier, texts),
    "GPT-2": (language_model, texts_to_go_on),
    "ViT": (image_classifier, images),
}


def sgd():
    # Adam makes steps of full size of what is rounding alone, as the gradients of keys' biases.
    return keras.optimizers.SGD(0.01, momentum=0.9)


def train(make, data, weights, optimizer=sgd, num_replicas=None):
    """Returns weights, logs and predictions; None for `num_replicas` is plain Keras."""
    strategy = create_strategy(num_replicas) if num_replicas else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make(optimizer())
    model.set_weights(weights)
    options = dict(batch_size=BATCH, verbose=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not verified")
        trained = model.fit(**data, shuffle=False, **options).history
        tested = model.evaluate(**data, return_dict=True, **options)
        predicted = model.predict(data["x"], **options)
    assert strategy is None or strategy.seconds_verified > 0
    values = {variable.path: variable.numpy() for variable in model.weights}
    tested = {f"test {name}": value for name, value in tested.items()}
    return {**values, **trained, **tested, "predicted": predicted}


def difference(actual, expected):
    """Returns max |a - b| / max(1, |b|)."""
    actual, expected = np.float64(actual), np.float64(expected)
    assert actual.shape == expected.shape
    return (np.abs(actual - expected) / np.maximum(1, np.abs(expected))).max()


def assert_same(actual, expected, tolerance=1e-6):
    assert set(actual) == set(expected)
    apart = {name: difference(actual[name], expected[name]) for name in expected}
    assert max(apart.values()) <= tolerance, {k: v for k, v in apart.items() if v > tolerance}


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_keras_hub(name, num_replicas):
    make, create_data = MODELS[name]
    data, weights = create_data(), make(sgd()).get_weights()
    expected = train(make, data, weights)
    actual = train(make, data, weights, num_replicas=num_replicas)
    assert_same(actual, expected)
    # It has learned something.
    assert max(map(difference, list(expected.values())[: len(weights)], weights)) > 1e-4


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def regression(hp):
    first, second = (keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
    units = hp.Choice("units", [3, 5, 8])
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units, "tanh", kernel_initializer=first),
            keras.layers.Dense(1, kernel_initializer=second),
        ]
    )
    model.compile(keras.optimizers.Adam(hp.Choice("rate", [0.1, 0.01])), own_loss, metrics=["mae"])
    return model


def search(directory, num_replicas=None, **arguments):
    """Returns what two trials scored, and the best one's weights."""
    tuner_lib = pytest.importorskip(
        "keras_tuner", reason="needs keras-tuner: pip install 'tfmulti[libraries]'"
    )
    strategy = create_strategy(num_replicas) if num_replicas else None
    tuner = tuner_lib.RandomSearch(
        regression,
        objective=tuner_lib.Objective("val_mae", "min"),
        max_trials=2,
        seed=3,
        directory=directory,
        project_name=str(num_replicas),
        distribution_strategy=strategy,
        **arguments,
    )
    rng = np.random.RandomState(3)
    rows, targets = rng.randn(COUNT, 4).astype("float32"), rng.randn(COUNT, 1).astype("float32")
    options = dict(batch_size=BATCH, shuffle=False, verbose=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not verified")
        tuner.search(rows, targets, epochs=1, validation_data=(rows, targets), **options)
    assert strategy is None or strategy.seconds_verified > 0
    trials = sorted(tuner.oracle.trials.values(), key=lambda trial: trial.trial_id)
    found = {}
    for trial in trials:
        for name in trial.metrics.metrics:
            key = f"{trial.trial_id} {sorted(trial.hyperparameters.values.items())} {name}"
            found[key] = trial.metrics.get_best_value(name)
    best = tuner.get_best_models()[0]
    assert strategy is None or best.distribute_strategy is strategy
    for place, value in enumerate(best.get_weights()):
        found[f"weight {place}"] = value
    return found


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("optimizer", [None, lambda: keras.optimizers.SGD(0.05, momentum=0.9)])
def test_keras_tuner(num_replicas, optimizer, tmp_path):
    arguments = {} if optimizer is None else {"optimizer": optimizer()}
    expected = search(tmp_path, **arguments)
    assert len([name for name in expected if name.endswith("val_mae")]) == 2
    assert_same(search(tmp_path, num_replicas, **arguments), expected)
