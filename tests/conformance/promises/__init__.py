"""Every promise, in the order of the table."""

from conformance.promises import (
    batches,
    gradients,
    layers,
    losses,
    optimizers,
    own_losses,
    own_metrics,
    own_optimizers,
    own_step_losses,
    own_steps,
    row_state,
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
    "Steps of the user's own": [*own_steps.PROMISES, *own_step_losses.PROMISES],
    "Optimizers in other places, and of the user's own": own_optimizers.PROMISES,
    "Losses of the user's own": own_losses.PROMISES,
    "Metrics and logs of the user's own": own_metrics.PROMISES,
    "State that comes from rows": row_state.PROMISES,
    "Saving": saving.PROMISES,
}
ALL = [promise for section in SECTIONS.values() for promise in section]
RANDOM = sizes.PROMISES


def find(name: str):
    """Returns the promise with this name."""
    return next(promise for promise in [*ALL, *RANDOM] if promise.name == name)
