"""The workloads: models with synthetic data from a fixed seed, or the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfmulti.bench.config import BenchConfig
from tfmulti.data.datasets import load_dataset
from tfmulti.train.models import create_model

CLASSES = 10
_STEPS_OF_DATA = 40


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        train: The data, as `load_dataset` gives a split.
        create: Creates the model, compiled or not.
        optimizer: The name of the optimizer of a model that is not compiled.
        is_own: Whether the model is the user's, of whose class nothing is known.
    """

    train: Any
    create: Callable[[], keras.Model]
    optimizer: str = "sgd"
    is_own: bool = False


def create_workload(name: str, config: BenchConfig, replicas: int) -> Workload:
    """Creates a workload.

    Args:
        name: One of `config.WORKLOADS`.
        config: The bench.
        replicas: Replicas that share the data.
    """
    if name == "own":
        train, _ = load_dataset(config.dataset)
        create = lambda: create_model(config.model, train)
        return Workload(train, create, optimizer="adam", is_own=True)
    examples = config.resolve_batch_size(name) * replicas * _STEPS_OF_DATA
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, examples)
    if name == "transformer":
        x = random.integers(0, config.vocabulary, (examples, config.length), dtype="int32")
        return Workload((x, labels), lambda: create_transformer(config))
    shape, create = {
        "compute": ((28, 28, 1), create_compute),
        "communication": ((2048,), create_communication),
        "resnet50": ((config.image_size, config.image_size, 3), lambda: create_resnet50(config)),
    }[name]
    return Workload((random.random((examples, *shape), dtype="float32"), labels), create)


def create_compute() -> keras.Model:
    """Creates the two-convolution network of the field's tutorials; 0.1 MB of gradients."""
    layers = keras.layers
    model = [keras.Input((28, 28, 1))]
    for filters in (16, 32):
        model += [layers.Conv2D(filters, 5, padding="same"), layers.BatchNormalization()]
        model += [layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*model, layers.Flatten(), layers.Dense(CLASSES)], name="compute")


def create_communication() -> keras.Model:
    """Creates four dense layers of 2048 units and one of 10; 67 MB of gradients."""
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(4)]
    layers = [keras.Input((2048,)), *hidden, keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers, name="communication")


def create_resnet50(config: BenchConfig) -> keras.Model:
    """Creates ResNet-50 without pretrained weights."""
    return keras.applications.ResNet50(
        weights=None,
        input_shape=(config.image_size, config.image_size, 3),
        classes=CLASSES,
        classifier_activation=None,
    )


def create_transformer(config: BenchConfig) -> keras.Model:
    """Creates a small encoder: tokens, blocks of attention, and a classifier."""
    layers = keras.layers
    tokens = keras.Input((config.length,), dtype="int32")
    x = layers.Embedding(config.vocabulary, config.width)(tokens)
    for _ in range(config.layers):
        attention = layers.MultiHeadAttention(config.heads, max(1, config.width // config.heads))
        x = layers.LayerNormalization()(x + attention(x, x))
        wide = layers.Dense(4 * config.width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(config.width)(wide))
    logits = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, logits, name="transformer")
