"""What workers do together, compared before TensorFlow's collectives wait for it.

Every variable is a collective under several workers, and every pass over data. A worker that
does another thing than the chief would wait, or end with an error about shapes or keys.
"""

from __future__ import annotations

import itertools
import re

import tensorflow as tf

from tfmulti import keras_compat

_numbers = itertools.count()
# Keras numbers the layers of a process: conv2d_3. Another model may have been made before.
_COUNTER = re.compile(r"_\d+(?=/|$)")


def compare_variable(path: str, shape: tuple[int, ...] | None, dtype: str) -> None:
    """Raises ValueError where the chief creates another variable, or none, at this point.

    Args:
        path: The variable's path.
        shape: Its shape, or None where it is not known.
        dtype: Its type.
    """
    if not tf.distribute.has_strategy() or not tf.distribute.in_cross_replica_context():
        return
    text = f"the variable {path} of shape {shape} and type {dtype}"
    compare_with_chief(tf.distribute.get_strategy(), text)


def compare_call(strategy: tf.distribute.Strategy, name: str) -> None:
    """Raises ValueError where the chief does not call `fit`, `evaluate` or `predict` alike."""
    compare_with_chief(strategy, f"a call of {name}")


def compare_with_chief(strategy: tf.distribute.Strategy, doing: str) -> None:
    """Raises ValueError where the chief's next common act is another one than this worker's.

    Args:
        strategy: The strategy of this worker.
        doing: What this worker is going to do.
    """
    if not getattr(strategy, "compares_acts", False):
        return
    key = f"tfmulti/act/{next(_numbers)}"
    if strategy.extended.should_checkpoint:
        keras_compat.publish(key, doing)
        return
    resolver = strategy.cluster_resolver
    first = "chief" if "chief" in resolver.cluster_spec().jobs else "worker"
    theirs = keras_compat.read_published(key, first, 0)
    if _COUNTER.sub("", theirs) != _COUNTER.sub("", doing):
        here = f"{resolver.task_type} {resolver.task_id}"
        raise ValueError(
            "All workers must build the same model and train and evaluate it alike. "
            f"Received: on {here} {doing}; on the first worker {theirs}. "
            "Look for what depends on the worker: a setting, a file, `if` it is the chief."
        )
