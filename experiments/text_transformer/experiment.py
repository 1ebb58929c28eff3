"""A transformer that reads a made language of brackets, in sequences of unequal length.

For each token it tells which kind of bracket encloses it most closely. Sequences are padded, and
the padding is masked in attention, loss and metrics. AdamW, with the weight decay left off biases
and norms, gradients clipped by their global norm, warm-up and cosine.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
from keras import layers, ops

import tfmulti
from experiments import common

METRICS = ("loss", "val_loss", "val_accuracy")
COMPARISONS = (common.Comparison("Trained", ("--dtype_policy=float64",)),)
KINDS = 3
# 0 is padding; then opening brackets, closing ones, and a word.
OPEN, CLOSE, WORD = 1, 1 + KINDS, 1 + 2 * KINDS
VOCABULARY = WORD + 1


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    dataset: str = common.flag("brackets", "The made language.", ("brackets",))
    num_examples: int = common.flag(3000, "Sequences; a fifth more are kept for validation.")
    length: int = common.flag(24, "Tokens of the longest sequence.")
    epochs: int = common.flag(3, "Passes over the data.")
    learning_rate: float = common.flag(0.003, "Rate for the base batch size.")
    base_batch_size: int = common.flag(64, "Batch size for which the rate was tuned.")
    warmup_epochs: float = common.flag(1.0, "Epochs of gradual warm-up.")
    weight_decay: float = common.flag(0.01, "Decay of weights at each step, times the rate.")
    clipnorm: float = common.flag(1.0, "Largest norm of all gradients together.")
    dropout: float = common.flag(0.0, "Part of the activations that training drops.")
    width: int = common.flag(64, "Width of the model.")
    depth: int = common.flag(2, "Blocks.")


def make_sequence(random: np.random.RandomState, length: int) -> tuple[list[int], list[int]]:
    """Makes one sequence and, for each token, the kind that encloses it: 0 where none does.

    A bracket counts as within itself.

    >>> make_sequence(np.random.RandomState(3), 8)
    ([7, 3, 6, 2, 2, 3, 6, 5], [0, 3, 3, 2, 2, 3, 3, 2])
    """
    tokens, kinds, stack = [], [], []
    for draw in random.randint(0, 3, length):
        if draw == 0 or (draw == 1 and not stack):
            stack.append(random.randint(KINDS))
            tokens.append(OPEN + stack[-1])
            kinds.append(1 + stack[-1])
        elif draw == 1:
            tokens.append(CLOSE + stack[-1])
            kinds.append(1 + stack.pop())
        else:
            tokens.append(WORD)
            kinds.append(1 + stack[-1] if stack else 0)
    return tokens, kinds


def load(settings: Settings):
    """Returns (train, test): tokens and kinds of shape (examples, length), padded with 0."""
    random = np.random.RandomState(settings.seed)
    count = settings.num_examples + settings.num_examples // 5
    x, y = np.zeros((2, count, settings.length), "int32")
    for row in range(count):
        length = random.randint(settings.length // 4, settings.length + 1)
        x[row, :length], y[row, :length] = make_sequence(random, length)
    n = settings.num_examples
    return (x[:n], y[:n]), (x[n:], y[n:])


@keras.saving.register_keras_serializable(package="text_transformer")
class Embedding(layers.Layer):
    """Tokens and their places; marks padding, so that everything after it can leave it out."""

    def __init__(self, length, width, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.tokens = layers.Embedding(VOCABULARY, width, mask_zero=True)
        self.places = self.add_weight((length, width), "uniform", name="places")

    def call(self, x):
        """Takes (batch, length), gives (batch, length, width)."""
        return self.tokens(x) + ops.cast(self.places, self.compute_dtype)

    def compute_mask(self, x, previous=None):
        """Returns what is no padding."""
        return self.tokens.compute_mask(x)


def block(x, settings: Settings):
    """Attention to what came before, then two dense layers; each normalized first."""
    heads = max(1, settings.width // 16)
    attention = layers.MultiHeadAttention(heads, 16, dropout=settings.dropout)
    normalized = layers.LayerNormalization()(x)
    x = layers.Add()([x, attention(normalized, normalized, use_causal_mask=True)])
    y = layers.Dense(4 * settings.width, activation="gelu")(layers.LayerNormalization()(x))
    y = layers.Dropout(settings.dropout)(layers.Dense(settings.width)(y))
    return layers.Add()([x, y])


def create_model(settings: Settings) -> keras.Model:
    """Gives logits of shape (batch, length, kinds)."""
    inputs = keras.Input((settings.length,), dtype="int32")
    x = Embedding(settings.length, settings.width)(inputs)
    for _ in range(settings.depth):
        x = block(x, settings)
    return keras.Model(inputs, layers.Dense(1 + KINDS)(layers.LayerNormalization()(x)))


def create_optimizer(settings: Settings, steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """AdamW, clipped by global norm, with warm-up and a cosine."""
    cosine = keras.optimizers.schedules.CosineDecay(
        settings.learning_rate, settings.epochs * steps_per_epoch
    )
    rate = tfmulti.scale_learning_rate(
        cosine,
        settings.global_batch_size,
        base_batch_size=settings.base_batch_size,
        rule="sqrt",
        warmup_epochs=settings.warmup_epochs,
        steps_per_epoch=steps_per_epoch,
    )
    optimizer = keras.optimizers.AdamW(
        rate, weight_decay=settings.weight_decay, global_clipnorm=settings.clipnorm
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def train(settings: Settings):
    """Trains on every device of this job; returns what was measured, and the weights."""
    strategy = tfmulti.create_strategy(settings.strategy, logical_cpus=settings.logical_cpus)
    keras.utils.set_random_seed(settings.seed)
    keras.config.set_dtype_policy(settings.dtype_policy)
    train_split, test_split = load(settings)
    data = tfmulti.distribute_train(
        train_split, strategy, settings.global_batch_size, seed=settings.seed
    )
    with strategy.scope():
        model = create_model(settings)
        model.compile(
            tfmulti.DistributedOptimizer(create_optimizer(settings, int(data.cardinality()))),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            # Weighted, so that the mask counts.
            weighted_metrics=["accuracy"],
        )
    history = model.fit(
        data,
        validation_data=tfmulti.distribute_eval(test_split, strategy, settings.global_batch_size),
        epochs=settings.epochs,
        callbacks=[tfmulti.callbacks.Throughput(data)],
        verbose=common.verbose(),
    )
    return common.last_metrics(history), model.get_weights()


if __name__ == "__main__":
    settings = common.parse(Settings)
    common.keep(settings, *train(settings))
