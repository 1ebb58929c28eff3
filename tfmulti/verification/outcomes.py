"""What a verified step gives: results, or the reason why there are none."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf


class NotVerified(Exception):
    """The comparison proves nothing; the text gives the reason."""


class NothingChanges(NotVerified):
    """Both ways agree, but no weight changed; a later state may show a difference."""


class FailsHere(ValueError):
    """The step on the replicas fails on this worker while others wait in it for this one."""


@dataclasses.dataclass
class Outcome:
    """The results of one step.

    Attributes:
        outputs: Logs or predictions by name.
        metrics: The metrics' results after the step, by name.
    """

    outputs: dict
    metrics: dict


def by_name(structure) -> dict:
    """Returns the leaves of logs or predictions as arrays by name."""
    if isinstance(structure, dict):
        items = [
            (f"{name}/{n}" if n else str(name), v)
            for name, part in structure.items()
            for n, v in by_name(part).items()
        ]
        return dict(items)
    if isinstance(structure, (list, tuple)):
        return {
            f"{i}/{n}" if n else str(i): v
            for i, part in enumerate(structure)
            for n, v in by_name(part).items()
        }
    return {} if structure is None else {"": _as_array(structure)}


def _as_array(value):
    if isinstance(value, tf.RaggedTensor):
        return value.to_tensor().numpy()
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy()
    return keras.ops.convert_to_numpy(value)


def finite_values(step: tuple[Outcome, list[np.ndarray]]) -> set:
    """Returns the names of the values after a step that are entirely finite.

    Args:
        step: The results of the step, and the values of the state after it.
    """
    outcome, values = step
    pairs = [*enumerate(values), *outcome.outputs.items()]
    pairs += [(("metric", name), value) for name, value in outcome.metrics.items()]
    return {name for name, value in pairs if not _is_float(value) or np.isfinite(value).all()}


def _is_float(value) -> bool:
    return np.asarray(value).dtype.kind == "f"
