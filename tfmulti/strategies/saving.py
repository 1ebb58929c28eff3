"""What a saved file holds: the state of all replicas and workers."""

from __future__ import annotations

import keras

from tfmulti import topology
from tfmulti.step import accumulation, local_steps, slots


def before_saving(model: keras.Model, with_optimizer: bool) -> None:
    """Makes replicas alike where all workers save a model; elsewhere they must be so already.

    Args:
        model: The model that is saved.
        with_optimizer: Whether its optimizer is saved too.

    Raises:
        RuntimeError: If only this worker may be saving, and others hold different weights or sums.
    """
    is_alone = topology.num_workers(model.distribute_strategy) > 1 and not slots.is_gathering()
    if local_steps.num_pending(model):
        if not slots.is_gathering():
            raise RuntimeError(
                "A model can be saved only when all workers hold the same weights. Received: a "
                f"save {local_steps.num_pending(model)} local steps after the last average. Save "
                "it at the end of an epoch or after `fit`, in callbacks.Checkpoint or "
                "ModelCheckpoint, or call tfmulti.average_weights(model) on every worker first."
            )
        slots.join_gathering()
        local_steps.average_weights(model)
    if not with_optimizer or accumulation.is_settled(model):
        return
    if is_alone:
        raise RuntimeError(
            "An optimizer can be saved only when all workers hold the same sums of gradients. "
            "Received: a save between two updates of `gradient_accumulation_steps`, on one worker. "
            "Save it after an update, at the end of an epoch or after `fit`, or in "
            "callbacks.Checkpoint or ModelCheckpoint."
        )
    if slots.is_gathering():
        slots.join_gathering()
    accumulation.settle_compiled(model)
