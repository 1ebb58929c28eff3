"""What the chief alone does with a folder, and whose failure ends all workers alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from tfmulti import topology
from tfmulti.checkpoint import generations
from tfmulti.strategies import coordination

Result = TypeVar("Result")


def on_chief(strategy: tf.distribute.Strategy, function: Callable[[], Result]) -> Result | None:
    """Calls a function on the chief, and returns its result there; every worker must call this.

    Args:
        strategy: The strategy of this worker.
        function: May raise CheckpointError or OSError.

    Raises:
        CheckpointError: On the other workers, if the function fails; on the chief its own error.
    """
    result, failed, chief = None, None, topology.is_chief(strategy)
    if chief:
        try:
            result = function()
        except (generations.CheckpointError, OSError) as error:
            failed = error
    text = coordination.broadcast(strategy, str(failed or "").encode() if chief else None)
    if failed is not None:
        raise failed
    if text and not chief:
        raise generations.CheckpointError(text.decode())
    return result
