"""Draws a program: a pure function of a seed."""

from __future__ import annotations

import dataclasses
import random

STEPS = (
    "stock",
    "stock",
    "own",
    "own, by the book",
    "own, under tf.function",
    "own, a partial",
    "own, two optimizers",
    "own, two optimizers in a dict",
    "own, clipped by hand",
    "own, sum by hand",
    "compute_loss",
)
LOSSES = {
    "classes": (
        "entropy",
        "entropy, mean_with_sample_weight",
        "entropy, ignore_class",
        "entropy by rows",
        "entropy, one number",
        "entropy, masked",
    ),
    "numbers": (
        "mean squared error",
        "Huber",
        "Huber, sum",
        "squares by rows",
        "squares, one number",
        "squares, compute_average_loss",
        "root of mean squares",
        "squares, masked",
    ),
}
METRICS = {
    "classes": ("accuracy", "weighted accuracy", "top 2", "perplexity", "surest", "batches"),
    "numbers": ("mae", "weighted mae", "rmse", "total of means", "largest", "moving average"),
}
# Layers after the first, which is a Dense or an Embedding. None has a bias or a scale that the
# next takes away: its gradient would be rounding alone, which Adam makes large.
LAYERS = (
    "Dense",
    "Dense",
    "LayerNormalization",
    "BatchNormalization, frozen",
    "BatchNormalization, synchronized",
    "running mean",
    "add_loss of a mean",
    "add_loss of a sum",
    "activity regularizer",
    "centred",
)
OPTIMIZERS = (
    "SGD",
    "SGD, global_clipnorm",
    "SGD, accumulation",
    "SGD, moving average",
    "Adam",
    "AdamW, clipnorm",
)
FEEDS = ("arrays", "dataset", "pipeline", "pipeline, padded")


@dataclasses.dataclass(frozen=True)
class Program:
    """What a user might write.

    Attributes:
        seed: What it was drawn by.
        target: `"classes"` or `"numbers"`.
        tokens: Whether rows are sequences of tokens; else they are features.
        body: Layers in order.
        loss: The loss given to `compile`.
        step: Whose step it is, and what it does.
        metrics: What is measured.
        optimizer: The optimizer, or the first of two.
        feed: How rows come to `fit`.
        weights: `""`, `"sample"` or `"class"`.
        num_rows: Rows to train on.
        batch_size: The global batch size.
        executions: `steps_per_execution`.
        validate: Whether to validate, evaluate and predict too.
        replicas: Replicas on which to try it.
    """

    seed: int
    target: str
    tokens: bool
    body: tuple[str, ...]
    loss: str
    step: str
    metrics: tuple[str, ...]
    optimizer: str
    feed: str
    weights: str
    num_rows: int
    batch_size: int
    executions: int
    validate: bool
    replicas: int

    def __str__(self):
        metrics = ", ".join(self.metrics) or "none"
        lines = [
            f"step: {self.step}; steps_per_execution: {self.executions}",
            f"loss: {self.loss}; metrics: {metrics}",
            f"layers: {'; '.join(self.body)}; of {'tokens' if self.tokens else 'features'}",
            f"optimizer: {self.optimizer}",
            f"feed: {self.feed}; weights: {self.weights or 'none'}; {self.num_rows} rows in "
            f"batches of {self.batch_size}; validates: {self.validate}",
            f"replicas: {self.replicas}",
        ]
        return "\n".join([f"program {self.seed}", *(f"  {line}" for line in lines)])


def draw(seed: int) -> Program:
    """Returns the seed's program; the same one whatever the machine."""
    rng = random.Random(seed)
    target = rng.choice(("classes", "numbers"))
    tokens = rng.random() < 0.3
    loss = rng.choice(LOSSES[target])
    step = rng.choice(STEPS)
    return Program(
        seed=seed,
        target=target,
        tokens=tokens,
        body=_body(rng, tokens),
        loss=loss,
        step=step,
        metrics=tuple(rng.sample(METRICS[target], rng.choice((0, 1, 1, 2)))),
        optimizer=rng.choice(OPTIMIZERS),
        feed=rng.choice(FEEDS),
        weights=_weights(rng, target),
        num_rows=rng.randint(17, 60),
        batch_size=rng.randint(8, 20),
        executions=rng.choice((1, 1, 1, 2)),
        validate=rng.random() < 0.2,
        replicas=rng.choice((2, 3)),
    )


def _body(rng, tokens) -> tuple[str, ...]:
    first = (rng.choice(("Embedding, mean", "Embedding, LSTM")),) if tokens else ("Dense",)
    others = rng.sample(LAYERS, rng.choice((0, 1, 2)))
    return (*first, *others)


def _weights(rng, target) -> str:
    drawn = rng.choice(("", "", "", "sample", "class"))
    return "" if drawn == "class" and target == "numbers" else drawn
