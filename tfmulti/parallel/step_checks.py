"""Refuses steps whose changes the chief of parameter servers cannot make from workers' answers."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

from tfmulti.verification import graph_search


def updated_besides(scope, seeds, *known) -> list[keras.Variable]:
    """Returns the variables that a step has assigned, besides those of which the chief gets values.

    Args:
        scope: The `RecordingScope` of the step.
        seeds: Pairs of the states of random generators, and values.
        *known: Lists of variables.
    """
    expected = {id(v) for each in ([v for v, _ in seeds], *known) for v in each}
    return [v for number, v in scope.updated.items() if number not in expected]


def refuse_writes(name: str, lost: Sequence[keras.Variable], traced) -> None:
    """Raises ValueError for what a step changes and the chief does not.

    Args:
        name: `train_step` or `test_step`.
        lost: Keras's variables that it assigns, of which the answers have nothing.
        traced: The traced step.
    """
    if lost:
        raise ValueError(
            f"With parameter servers a `{name}` must assign only metrics, and weights of the model "
            f"that are not trainable. Received: a step that assigns {lost[0].path}. Hold such "
            "numbers in self.add_weight(..., trainable=False), and random generators in attributes "
            "of the model; change weights by the optimizer, and its learning rate by a schedule or "
            "a callback; or use the strategy multi_worker."
        )
    if found := graph_search.find_writes(traced):
        raise ValueError(
            f"With parameter servers a `{name}` must change variables of Keras only: each worker "
            "would change its own copy of any other, and again when it repeats another's step. "
            f"Received: {', '.join(found)}. Hold such numbers in "
            "self.add_weight(..., trainable=False), or use the strategy multi_worker."
        )


def refuse_infinite(states: Sequence[keras.Variable]) -> None:
    """Raises ValueError for a state that is not finite: no change can be added to it."""
    for state in states:
        values = keras.ops.convert_to_numpy(state)
        infinite = values[~np.isfinite(values)]
        if infinite.size:
            raise ValueError(
                "With parameter servers what a `train_step` changes in a state is added to it, so "
                f"the state must be finite. Received: {state.path}, which holds {infinite[0]}. "
                "Begin with 0, and keep a sum or a moving mean; or use the strategy multi_worker."
            )
