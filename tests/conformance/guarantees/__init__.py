"""Every guarantee, in the order of the table."""

from conformance.guarantees import (
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
    pipelines,
    row_state,
    saving,
    sizes,
    steps,
    tensor_parallel,
)

SECTIONS = {
    "Batches and feeds": batches.GUARANTEES,
    "What happens to gradients": gradients.GUARANTEES,
    "Optimizers": optimizers.GUARANTEES,
    "Pipelines": pipelines.GUARANTEES,
    "Tensor parallelism": tensor_parallel.GUARANTEES,
    "Losses, weights and metrics": losses.GUARANTEES,
    "Layers": layers.GUARANTEES,
    "Steps": steps.GUARANTEES,
    "Steps of the user's own": [*own_steps.GUARANTEES, *own_step_losses.GUARANTEES],
    "Optimizers in other places, and of the user's own": own_optimizers.GUARANTEES,
    "Losses of the user's own": own_losses.GUARANTEES,
    "Metrics and logs of the user's own": own_metrics.GUARANTEES,
    "State that comes from rows": row_state.GUARANTEES,
    "Saving": saving.GUARANTEES,
}
ALL = [guarantee for section in SECTIONS.values() for guarantee in section]
RANDOM = sizes.GUARANTEES


def find(name: str):
    """Returns the guarantee with this name."""
    return next(guarantee for guarantee in [*ALL, *RANDOM] if guarantee.name == name)
