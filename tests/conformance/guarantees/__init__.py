"""Every guarantee, in the order of the table."""

import dataclasses

from conformance.guarantee import EXACT, TOLD
from conformance.guarantees import (
    batches,
    custom_losses,
    custom_metrics,
    custom_optimizers,
    custom_step_losses,
    custom_steps,
    gradients,
    layers,
    losses,
    optimizers,
    pipelines,
    row_state,
    saving,
    sizes,
    steps,
    tensor_parallel,
)


def replicated(sections: dict) -> list:
    """Returns what may be told in parts, once more: exact where replicas compute all rows."""
    return [
        dataclasses.replace(
            each, name=f"{each.name}, replicated", must=EXACT, on_difference="replicate"
        )
        for section in sections.values()
        for each in section
        if each.must == TOLD
    ]


SECTIONS = {
    "Batches and feeds": batches.GUARANTEES,
    "What happens to gradients": gradients.GUARANTEES,
    "Optimizers": optimizers.GUARANTEES,
    "Pipelines": pipelines.GUARANTEES,
    "Tensor parallelism": tensor_parallel.GUARANTEES,
    "Losses, weights and metrics": losses.GUARANTEES,
    "Layers": layers.GUARANTEES,
    "Steps": steps.GUARANTEES,
    "Custom steps": [*custom_steps.GUARANTEES, *custom_step_losses.GUARANTEES],
    "Custom optimizers, and optimizers in other places": custom_optimizers.GUARANTEES,
    "Custom losses": custom_losses.GUARANTEES,
    "Custom metrics and logs": custom_metrics.GUARANTEES,
    "State that comes from rows": row_state.GUARANTEES,
    "Saving": saving.GUARANTEES,
}
SECTIONS["Steps that every replica computes from the whole batch"] = replicated(SECTIONS)
ALL = [guarantee for section in SECTIONS.values() for guarantee in section]
RANDOM = sizes.GUARANTEES


def find(name: str):
    """Returns the guarantee with this name."""
    return next(guarantee for guarantee in [*ALL, *RANDOM] if guarantee.name == name)
