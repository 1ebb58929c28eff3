"""What large batches cost, and what scaling the learning rate and warming up give back.

The curves of Goyal et al. (2017, arXiv 1706.02677) in small: a fixed number of epochs, and test
error against the batch size for each rule. Writes large_batch.png and results.md into --workdir.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np

import tfmulti
from experiments import common

# Name -> (rule, whether to warm up).
RULES = {
    "none": ("none", False),
    "sqrt": ("sqrt", False),
    "sqrt, warm-up": ("sqrt", True),
    "linear": ("linear", False),
    "linear, warm-up": ("linear", True),
}
METRICS = ("loss: none, 256", "loss: linear, 256", "loss: linear, warm-up, 256")
COMPARISONS = (
    common.Comparison("Error after training", setups=("one device",)),
    common.Comparison(
        "For equality",
        ("--batch_sizes=256", "--epochs=2", "--num_seeds=1", "--dtype_policy=float64"),
        ("one device", "two logical CPUs"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    unused: ClassVar = ("global_batch_size",)

    dataset: str = common.flag("digits", "digits, or a tensorflow-datasets name.")
    epochs: int = common.flag(20, "Passes over the data, the same for all.")
    learning_rate: float = common.flag(0.05, "Rate for the base batch size.")
    base_batch_size: int = common.flag(32, "Batch size for which the rate was tuned.")
    batch_sizes: str = common.flag("32,128,512,1024", "Global batch sizes.")
    warmup_epochs: float = common.flag(5.0, "Epochs of gradual warm-up.")
    num_seeds: int = common.flag(2, "Runs of each, from --seed on.")


class Trainer:
    """Trains the same model from the same start, with one batch size and rule at a time."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.strategy = tfmulti.create_strategy(
            settings.strategy, logical_cpus=settings.logical_cpus
        )
        keras.config.set_dtype_policy(settings.dtype_policy)
        self.train_split, self.test_split = tfmulti.load_dataset(settings.dataset)
        self.known = {}

    def run(self, rule: str, batch_size: int, seed: int) -> tuple[dict, list[np.ndarray]]:
        """Returns training loss and test error, and the weights; what is known is not redone."""
        settings = self.settings
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed)
        data = tfmulti.distribute_train(self.train_split, self.strategy, batch_size, seed=seed)
        scaling, warm_up = RULES[rule]
        if batch_size == settings.base_batch_size:
            scaling = "none"
        key = scaling, warm_up, batch_size, seed
        if key in self.known:
            return self.known[key]
        rate = tfmulti.scale_learning_rate(
            settings.learning_rate,
            batch_size,
            base_batch_size=settings.base_batch_size,
            rule=scaling,
            warmup_epochs=settings.warmup_epochs if warm_up else 0.0,
            steps_per_epoch=int(data.cardinality()),
        )
        with self.strategy.scope():
            model = tfmulti.create_model("mlp", self.train_split)
            optimizer = keras.optimizers.SGD(rate, momentum=0.9)
            model.compile(
                tfmulti.DistributedOptimizer(optimizer),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        history = model.fit(data, epochs=settings.epochs, verbose=0)
        test = tfmulti.distribute_eval(self.test_split, self.strategy, 512)
        found = model.evaluate(test, verbose=0, return_dict=True)
        metrics = {"loss": history.history["loss"][-1], "error": 1 - found["accuracy"]}
        self.known[key] = metrics, model.get_weights()
        return self.known[key]


def draw(errors: dict, batch_sizes: list[int], path: Path) -> None:
    """Draws error against batch size: the mean of the seeds, with the best and the worst."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.8), layout="constrained")
    axis = figure.subplots()
    colours = dict(zip(("none", "sqrt", "linear"), ("#636363", "#2171b5", "#d94801")))
    for place, rule in enumerate(RULES):
        values = 100 * np.array([errors[rule, size] for size in batch_sizes])
        mean = values.mean(axis=1)
        # Side by side, so that the bars can be told apart.
        x = np.array(batch_sizes) * 1.04 ** (place - 2)
        style = {"color": colours[RULES[rule][0]], "ls": "-" if RULES[rule][1] else "--"}
        low, high = mean - values.min(axis=1), values.max(axis=1) - mean
        axis.errorbar(x, mean, (low, high), marker="o", capsize=3, label=rule, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(batch_sizes, batch_sizes)
    ticks = [1, 2, 3, 5, 10, 20, 50, 90]
    axis.set_yticks(ticks, ticks)
    axis.minorticks_off()
    axis.set_xlabel("global batch size")
    axis.set_ylabel("test error in % (mean, best and worst seed)")
    axis.set_title("The same number of epochs with each batch size")
    axis.grid(True, alpha=0.3)
    axis.legend(title="learning rate")
    figure.savefig(path, dpi=110)


def table(errors: dict, batch_sizes: list[int]) -> str:
    """Returns the mean errors in Markdown: a line for each rule."""
    lines = ["learning rate | " + " | ".join(map(str, batch_sizes))]
    lines.append("---" + " | ---:" * len(batch_sizes))
    for rule in RULES:
        cells = [f"{100 * np.mean(errors[rule, size]):.1f}%" for size in batch_sizes]
        lines.append(" | ".join([rule, *cells]))
    return "".join(f"| {line} |\n" for line in lines)


def train(settings: Settings):
    """Trains with every batch size and rule; returns losses and errors, and all weights."""
    trainer = Trainer(settings)
    batch_sizes = [int(size) for size in settings.batch_sizes.split(",")]
    metrics, weights, errors = {}, [], {}
    for batch_size in batch_sizes:
        for rule in RULES:
            seeds = range(settings.seed, settings.seed + settings.num_seeds)
            runs = [trainer.run(rule, batch_size, seed) for seed in seeds]
            errors[rule, batch_size] = [found["error"] for found, _ in runs]
            for name in ("loss", "error"):
                mean = np.mean([found[name] for found, _ in runs])
                metrics[f"{name}: {rule}, {batch_size}"] = float(mean)
            weights += [array for _, arrays in runs for array in arrays]
            if common.is_chief():
                print(f"{batch_size}, {rule}: {errors[rule, batch_size]}", flush=True)
    if settings.workdir and common.is_chief():
        folder = Path(settings.workdir)
        folder.mkdir(parents=True, exist_ok=True)
        draw(errors, batch_sizes, folder / "large_batch.png")
        (folder / common.TABLE).write_text(table(errors, batch_sizes))
    return metrics, weights


if __name__ == "__main__":
    settings = common.parse(Settings)
    common.keep(settings, *train(settings))
