"""Contrastive learning of pairs, in small: the upper half of an image finds its lower half.

Two encoders and a temperature that is learned, as CLIP has them (Radford et al., 2021, arXiv
2103.00020); the negatives of a pair are all others of the global batch, which
`tfmulti.gather_batch` brings to every replica. `--negatives replica` leaves it out, as one easily
does. `--replicas 1,2,8` trains with both on so many logical CPUs and draws what comes of it.
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

METRICS = ("loss", "recall")
COMPARISONS = (
    common.Comparison("With and without the gather", ("--replicas=1,2,8",), setups=("one device",)),
    common.Comparison("For equality", ("--epochs=3", "--dtype_policy=float64")),
    common.Comparison(
        "Without the gather", ("--epochs=3", "--dtype_policy=float64", "--negatives=replica")
    ),
)
TITLES = {"batch": "with gather_batch", "replica": "without"}


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    dataset: str = common.flag("digits", "digits, or a tensorflow-datasets name of images.")
    epochs: int = common.flag(20, "Passes over the data.")
    learning_rate: float = common.flag(0.002, "Rate of the optimizer.")
    width: int = common.flag(64, "Width of the hidden layers.")
    dimensions: int = common.flag(16, "Numbers in an embedding.")
    negatives: str = common.flag("batch", "Whose rows a pair is told from.", ("batch", "replica"))
    replicas: str = common.flag("", "Train on each of these numbers of logical CPUs, and draw.")


def load(dataset: str):
    """Returns the pairs of halves to train on, and those to test with."""
    splits = tfmulti.load_dataset(dataset)
    middle = splits[0][0].shape[1] // 2
    return [(images[:, :middle], images[:, middle:]) for images, *_ in splits]


class Pairs(keras.Model):
    """Embeds both halves, and learns which belong together."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.encoders = [self.create_encoder(settings) for _ in range(2)]
        self.log_scale = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(np.log(10.0)), name="log_scale"
        )
        self.gather = settings.negatives == "batch"

    @staticmethod
    def create_encoder(settings: Settings) -> keras.Model:
        """Halves of images to embeddings of length one."""
        return keras.Sequential(
            [
                layers.Flatten(),
                layers.Dense(settings.width, activation="silu"),
                layers.Dense(settings.dimensions),
                layers.UnitNormalization(),
            ]
        )

    def call(self, halves):
        """Returns the embeddings of both halves, each of shape (batch, dimensions)."""
        return tuple(encode(half) for encode, half in zip(self.encoders, halves))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Each upper half is to find its lower half among those of the batch, and the reverse."""
        uppers, lowers = tfmulti.gather_batch(y_pred) if self.gather else y_pred
        logits = ops.exp(self.log_scale) * ops.matmul(uppers, ops.transpose(lowers))
        partners = tf.range(tf.shape(logits)[0])
        losses = [
            tf.nn.sparse_softmax_cross_entropy_with_logits(partners, each)
            for each in (logits, ops.transpose(logits))
        ]
        return tf.reduce_mean(losses)


def recall(model: keras.Model, test, strategy) -> float:
    """Returns how many upper halves of a split find their own lower half first."""
    rows = tfmulti.distribute_eval((test,), strategy, 256)
    uppers, lowers = model.predict(rows, verbose=0)
    return float(np.mean(np.argmax(uppers @ lowers.T, axis=1) == np.arange(len(uppers))))


class Recalls(keras.callbacks.Callback):
    """Keeps the recall after every epoch."""

    def __init__(self, test, strategy):
        super().__init__()
        self.test, self.strategy, self.values = test, strategy, []

    def on_epoch_end(self, epoch, logs=None):
        """Predicts the test split; on all workers, since that is a collective."""
        self.values.append(recall(self.model, self.test, self.strategy))


def fit(settings: Settings, strategy):
    """Trains under a strategy; returns the history, with the recalls, and the weights."""
    if settings.negatives == "replica":
        # Verification would refuse what is shown here.
        strategy.verify = "never"
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(settings.seed)
    train_split, test_split = load(settings.dataset)
    data = tfmulti.distribute_train(
        (train_split,), strategy, settings.global_batch_size, seed=settings.seed
    )
    with strategy.scope():
        model = Pairs(settings)
        optimizer = keras.optimizers.Adam(settings.learning_rate)
        model.compile(tfmulti.DistributedOptimizer(optimizer))
    recalls = Recalls(test_split, strategy)
    callbacks = [recalls, tfmulti.callbacks.Throughput(data)]
    verbose = 0 if settings.replicas else common.verbose()
    history = model.fit(data, epochs=settings.epochs, callbacks=callbacks, verbose=verbose)
    history.history["recall"] = recalls.values
    return history, model.get_weights()


def fit_all(settings: Settings) -> tuple[dict, list[np.ndarray]]:
    """Trains on several numbers of replicas, both ways; returns histories, one device's weights."""
    numbers = sorted(map(int, settings.replicas.split(",")))
    histories, weights = {}, []
    for number in [1, *(n for n in numbers if n > 1)]:
        strategy = tfmulti.create_strategy(
            "mirrored" if number > 1 else "one_device",
            devices=[f"CPU:{i}" for i in range(number)],
            logical_cpus=numbers[-1],
        )
        for negatives in TITLES if number > 1 else ["batch"]:
            chosen = dataclasses.replace(settings, negatives=negatives)
            history, found = fit(chosen, strategy)
            histories[number, negatives] = history.history
            weights = weights or found
            print(f"{number}, {negatives}: {history.history['recall'][-1]:.3f}", flush=True)
    return histories, weights


def draw(histories: dict, path: Path) -> None:
    """Draws loss and recall over the epochs, for each number of replicas, both ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    names = {"loss": "training loss", "recall": "test recall at 1, in %"}
    numbers = sorted({number for number, _ in histories})
    colours = dict(zip(numbers[1:], ("#fdae6b", "#f16913", "#a63603", "#7f2704")))
    for axis, (name, label) in zip(figure.subplots(1, len(names)), names.items()):
        for (number, negatives), history in histories.items():
            values = np.array(history[name]) * (100 if name == "recall" else 1)
            epochs = np.arange(1, len(values) + 1)
            title = f"{number} replicas, {TITLES[negatives]}" if number > 1 else "one device"
            if number == 1:
                axis.plot(epochs, values, color="#9ecae1", lw=6, label=title)
            elif negatives == "batch":
                place = numbers.index(number)
                style = {"ls": "", "marker": "ov^s"[place % 4], "color": "#08519c", "ms": 4}
                # Not all at the same epochs: they would hide one another.
                shown = slice(place % len(numbers), None, len(numbers))
                axis.plot(epochs[shown], values[shown], label=title, **style)
            else:
                axis.plot(epochs, values, color=colours[number], ls="--", label=title)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel("epoch")
        axis.set_title(label)
        axis.grid(True, alpha=0.3)
    axis.legend(fontsize=8)
    figure.suptitle("A contrastive loss on several replicas: the same global batch, the same start")
    figure.savefig(path, dpi=110)


def table(histories: dict) -> str:
    """Returns losses and recalls after training in Markdown, a line for each number."""
    lines = ["replicas | loss | loss without | recall | recall without", "---" + " | ---:" * 4]
    for number in sorted({number for number, _ in histories}):
        cells = [str(number)]
        for name, style in (("loss", "{:.4f}"), ("recall", "{:.1%}")):
            for negatives in TITLES:
                found = histories.get((number, negatives))
                cells.append("-" if found is None else style.format(found[name][-1]))
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def train(settings: Settings):
    """Trains on every device of this job; returns what was measured, and the weights."""
    keras.config.set_dtype_policy(settings.dtype_policy)
    if not settings.replicas:
        strategy = tfmulti.create_strategy(settings.strategy, logical_cpus=settings.logical_cpus)
        history, weights = fit(settings, strategy)
        return common.last_metrics(history), weights
    histories, weights = fit_all(settings)
    if settings.workdir:
        folder = Path(settings.workdir)
        folder.mkdir(parents=True, exist_ok=True)
        draw(histories, folder / "contrastive.png")
        (folder / common.TABLE).write_text(table(histories))
    metrics = {
        f"{name}: {number}, {negatives}": float(history[name][-1])
        for (number, negatives), history in histories.items()
        for name in METRICS
    }
    return metrics, weights


if __name__ == "__main__":
    settings = common.parse(Settings)
    common.keep(settings, *train(settings))
