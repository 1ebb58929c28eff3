"""Guarantees with sizes drawn at random."""

from __future__ import annotations

import keras
import numpy as np

from conformance.guarantee import Guarantee
from conformance.guarantees import common

SGD = keras.optimizers.SGD
OPTIMIZERS = {
    "SGD": common.sgd,
    "clipped": lambda: SGD(0.1, global_clipnorm=0.1),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "accumulating": lambda: SGD(0.1, gradient_accumulation_steps=2),
}
REMAINDERS = ("uneven", "pad", "drop")
NUM_RANDOM = 10


def build(num_rows, batch_size, optimizer, remainder, weighted, steps=1) -> Guarantee:
    """Returns a guarantee of these sizes; where no whole batch is, none is dropped."""
    if remainder == "drop" and num_rows < batch_size:
        remainder = "uneven"
    kind = "weighted" if weighted else "plain"
    return Guarantee(
        f"{num_rows} in {batch_size}, {optimizer}, {remainder}, {kind}, {steps} at once",
        common.classifier(OPTIMIZERS[optimizer], steps_per_execution=steps),
        data=getattr(common, kind),
        num_rows=num_rows,
        batch_size=batch_size,
        remainder=remainder,
    )


def draw(seed: int) -> Guarantee:
    """Returns a guarantee whose sizes depend on `seed` alone."""
    random = np.random.RandomState(seed)
    return build(
        random.randint(1, 301),
        random.randint(4, 101),
        random.choice(list(OPTIMIZERS)),
        random.choice(REMAINDERS),
        bool(random.randint(2)),
        random.randint(1, 3),
    )


GUARANTEES = [draw(seed) for seed in range(NUM_RANDOM)]
