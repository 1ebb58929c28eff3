"""Every promise, in the order of the table."""

from conformance.promises import (
    batches,
    gradients,
    layers,
    losses,
    optimizers,
    saving,
    sizes,
    steps,
)

SECTIONS = {
    "Batches and feeds": batches.PROMISES,
    "What happens to gradients": gradients.PROMISES,
    "Optimizers": optimizers.PROMISES,
    "Losses, weights and metrics": losses.PROMISES,
    "Layers": layers.PROMISES,
    "Steps": steps.PROMISES,
    "Saving": saving.PROMISES,
}
ALL = [promise for section in SECTIONS.values() for promise in section]
RANDOM = sizes.PROMISES


def find(name: str):
    """Returns the promise with this name."""
    return next(promise for promise in [*ALL, *RANDOM] if promise.name == name)
