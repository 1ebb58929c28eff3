"""A GAN: two networks, two optimizers, and a `train_step` of its own.

The noise of an example is a row of a table that the example and the step decide, so that any
number of replicas sees the same noise. `--noise stream` draws it in the step, as most scripts do:
then each replica has another stream.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfmulti
from experiments import common

METRICS = ("d_loss", "g_loss")
COMPARISONS = (
    common.Comparison("Trained", setups=("one device", "two logical CPUs")),
    common.Comparison("For equality", ("--epochs=2", "--dtype_policy=float64")),
)
LATENT, TABLE_ROWS = 16, 2**14


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    dataset: str = common.flag(
        "digits", "ring (eight clusters in the plane), digits, or a tensorflow-datasets name."
    )
    epochs: int = common.flag(40, "Passes over the data.")
    learning_rate: float = common.flag(0.0005, "Rate of both optimizers.")
    width: int = common.flag(128, "Width of the hidden layers.")
    noise: str = common.flag("table", "Where noise comes from.", ("table", "stream"))
    picture: str = common.flag("", "PNG file for samples; by default gan.png in --workdir.")


def load(settings: Settings) -> np.ndarray:
    """Returns what is real, within -1 and 1."""
    if settings.dataset != "ring":
        return 2 * tfmulti.load_dataset(settings.dataset)[0][0] - 1
    random = np.random.RandomState(settings.seed)
    angle = 2 * np.pi * random.randint(0, 8, 2000) / 8
    points = 0.8 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (points + 0.03 * random.randn(*points.shape)).astype("float32")


def create_generator(shape, width: int) -> keras.Model:
    """Noise of shape (batch, LATENT) to examples."""
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(width, activation="silu"),
            layers.Dense(width, activation="silu"),
            layers.Dense(int(np.prod(shape)), activation="tanh"),
            layers.Reshape(shape),
        ],
        name="generator",
    )


def create_discriminator(shape, width: int) -> keras.Model:
    """Examples to logits of being real."""
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Flatten(),
            layers.Dense(width, activation="silu"),
            layers.Dense(width, activation="silu"),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """Trains a generator against a discriminator (Goodfellow et al., 2014, arXiv 1406.2661)."""

    def __init__(self, shape, settings: Settings):
        super().__init__()
        self.generator = create_generator(shape, settings.width)
        self.discriminator = create_discriminator(shape, settings.width)
        self.from_table = settings.noise == "table"
        self.table = np.random.RandomState(settings.seed).randn(TABLE_ROWS, LATENT)
        self.seeds = keras.random.SeedGenerator(settings.seed)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_mean = keras.metrics.Mean(name="d_loss")
        self.g_mean = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer):
        """Takes one optimizer for each network."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self):
        """Both losses."""
        return [self.d_mean, self.g_mean]

    def noise(self, numbers):
        """Returns noise for examples of these numbers, at this step."""
        if not self.from_table:
            shape = (ops.shape(numbers)[0], LATENT)
            return keras.random.normal(shape, seed=self.seeds, dtype=self.compute_dtype)
        step = ops.cast(self.d_optimizer.iterations, "int64")
        # Odd factors, so that neighbours are far apart and no row is left out.
        rows = (ops.cast(numbers, "int64") * 7919 + step * 104729) % TABLE_ROWS
        return ops.take(ops.convert_to_tensor(self.table, self.compute_dtype), rows, axis=0)

    def train_step(self, data):
        """One step of each network; data are examples and their numbers."""
        real, numbers = data
        real = ops.cast(real, self.compute_dtype)
        noise = self.noise(numbers)
        ones = ops.ones((ops.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(noise))
            # One-sided label smoothing (Salimans et al., 2016, arXiv 1606.03498).
            d_loss = self.loss_fn(0.9 * ones, self.discriminator(real))
            d_loss += self.loss_fn(0 * ones, fake)
        self.step(tape, d_loss, self.discriminator, self.d_optimizer)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ones, self.discriminator(self.generator(noise)))
        self.step(tape, g_loss, self.generator, self.g_optimizer)
        self.d_mean.update_state(d_loss, sample_weight=ops.shape(real)[0])
        self.g_mean.update_state(g_loss, sample_weight=ops.shape(real)[0])
        return {metric.name: metric.result() for metric in self.metrics}

    @staticmethod
    def step(tape, loss, network, optimizer):
        """Updates one network; losses are written as on one device."""
        gradients = tape.gradient(loss, network.trainable_weights)
        optimizer.apply_gradients(zip(gradients, network.trainable_weights))


def draw(real: np.ndarray, samples: np.ndarray, path: str) -> None:
    """Draws samples beside real examples: points in the plane, or grey images."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    for axis, title, rows in zip(figure.subplots(1, 2), ("real", "made"), (real, samples)):
        axis.set_title(title)
        if rows.ndim == 2:
            axis.plot(*rows.T, ".", ms=3, alpha=0.6)
            axis.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
            continue
        side = int(len(rows) ** 0.5)
        rows = np.pad(rows[: side * side, ..., 0], ((0, 0), (1, 1), (1, 1)))
        height, width = rows.shape[1:]
        grid = rows.reshape(side, side, height, width)
        grid = grid.transpose(0, 2, 1, 3).reshape(side * height, side * width)
        axis.imshow(grid, cmap="gray", vmin=-1, vmax=1)
        axis.set_axis_off()
    figure.savefig(path, dpi=110)


def train(settings: Settings):
    """Trains on every device of this job; returns what was measured, and the weights."""
    strategy = tfmulti.create_strategy(settings.strategy, logical_cpus=settings.logical_cpus)
    keras.utils.set_random_seed(settings.seed)
    keras.config.set_dtype_policy(settings.dtype_policy)
    real = load(settings)
    examples = (real, np.arange(len(real)))
    data = tfmulti.distribute_train(
        examples, strategy, settings.global_batch_size, seed=settings.seed
    )
    with strategy.scope():
        gan = GAN(real.shape[1:], settings)
        optimizers = [keras.optimizers.Adam(settings.learning_rate, beta_1=0.5) for _ in range(2)]
        gan.compile(*map(tfmulti.DistributedOptimizer, optimizers))
    history = gan.fit(
        data,
        epochs=settings.epochs,
        callbacks=[tfmulti.callbacks.Throughput(data)],
        verbose=common.verbose(),
    )
    weights = gan.get_weights()
    picture = settings.picture or (settings.workdir and f"{settings.workdir}/gan.png")
    if picture and common.is_chief():
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        shown = 64 if real.ndim > 2 else 1000
        samples = gan.generator(gan.table[:shown].astype("float32")).numpy()
        draw(real[:shown], samples, picture)
    return common.last_metrics(history), weights


if __name__ == "__main__":
    settings = common.parse(Settings)
    common.keep(settings, *train(settings))
