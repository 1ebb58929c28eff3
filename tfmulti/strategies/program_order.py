"""Compares what workers do next, so that none waits for one that does something else.

Every worker must create the same variables, make the same calls and end the same passes, in the
same order. What each is about to do is published in TensorFlow's coordination service.
"""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
import re
import time

import keras
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, marks, topology
from tfmulti.runtime.scoped import Scoped
from tfmulti.strategies import failed_calls

WAIT_WARNING_S, WAIT_TIMEOUT_S = 60.0, 1800.0
"""When a worker that waits for another says so, and when it gives up, amid a call of `fit`."""
_action_numbers, _barrier_numbers = itertools.count(), itertools.count()
# While the results of a pass are read, at whose end all workers have waited for each other.
_is_pass_ended = Scoped(False)
# Keras numbers the layers of a process: conv2d_3. A worker may have created other models before.
_COUNTER = re.compile(r"_\d+(?=/|$)")


def compare_variable(path: str, shape: tuple[int, ...] | None, dtype: str) -> None:
    """Raises ValueError if the chief creates a different variable, or none, at this point.

    Args:
        path: The variable's path.
        shape: Its shape, or None if it is unknown.
        dtype: Its dtype.
    """
    if not tf.distribute.has_strategy() or not tf.distribute.in_cross_replica_context():
        return
    text = f"the variable {path} of shape {shape} and type {dtype}"
    compare_with_chief(tf.distribute.get_strategy(), text)


def compare_call(
    strategy: tf.distribute.Strategy, name: str, given: dict, waits: bool = False
) -> None:
    """Raises ValueError if the chief does not call the same method, with the same settings.

    Args:
        strategy: The strategy of this worker.
        name: The method, such as `"fit"`.
        given: Its arguments by name.
        waits: Whether the chief waits for the others, and all for a limited time, as they do in a
            call within another.
    """
    doing, waits = f"a call of {describe_call(name, given)}", waits or failed_calls.is_nested()
    # A worker may prepare for hours before it calls `fit`, and not amid a step of it.
    compare_with_chief(strategy, doing, WAIT_TIMEOUT_S if waits else math.inf)
    if waits:
        _wait_for_others(strategy, doing)


def end_pass(model) -> None:
    """Waits for the other workers where a pass of `fit`, `evaluate` or `predict` ends.

    Raises:
        ValueError: If another worker goes on with the pass.
    """
    reach_together(model.distribute_strategy, "the end of a pass over the data")


def reach_together(strategy: tf.distribute.Strategy, doing: str) -> None:
    """Waits for all workers to come to the same place of the program, such as a collective read.

    Args:
        strategy: The strategy of this worker.
        doing: The place, as text.

    Raises:
        ValueError: If another worker does something else, or does not come.
    """
    if not _is_pass_ended.value:
        compare_with_chief(strategy, doing, WAIT_TIMEOUT_S)
        _wait_for_others(strategy, doing)


def result_or_logs(original, model, logs):
    """Ends a pass together with other workers, and gives one without remaining steps its logs.

    Keras uses the logs of the last step. If training resumes after that, there are none but those
    of the checkpoint; without them, the metrics' own.

    Args:
        original: `Model._get_metrics_result_or_logs`, with which `fit` and `evaluate` end a pass.
        model: The model.
        logs: The logs of the last step.
    """
    end_pass(model)
    if not logs:
        logs = marks.LAST_LOGS.get(model)
        marks.LAST_LOGS.set(model, None)
    # Keras reads the metrics one by one: the workers have waited for each other once.
    with _is_pass_ended.set_to(True):
        return original(model, logs) if logs else model.get_metrics_result()


def describe_call(name: str, given: dict) -> str:
    """Returns a call's settings, which all workers must give alike, as in `fit(epochs=2)`.

    Args:
        name: The method.
        given: Its arguments by name.
    """
    usual = inspect.signature(getattr(keras.Model, name)).parameters
    settings = [
        f"{key}={value}"
        for key, value in sorted(given.items())
        if _is_setting(key, value) and not (key in usual and value == usual[key].default)
    ]
    if given.get("validation_data") is not None:
        settings.append("validation_data=...")
    together = [type(each).__name__ for each in _callbacks_on_all_workers(given.get("callbacks"))]
    if together:
        settings.append(f"callbacks=[{', '.join(together)}, ...]")
    return f"{name}({', '.join(settings)})"


def _callbacks_on_all_workers(callbacks) -> list:
    """Returns those that one worker must not be given alone, of what `fit` was given."""
    each = getattr(callbacks, "callbacks", callbacks) or ()
    return [one for one in tf.nest.flatten(each) if marks.ON_ALL_WORKERS.get(one)]


def _is_setting(name, value) -> bool:
    """Whether all workers must give the same; what is printed may differ, and data are not text."""
    if name in ("x", "y", "sample_weight", "callbacks", "verbose"):
        return False
    is_simple = isinstance(value, (numbers.Real, str, list, tuple, dict))
    return is_simple and all(isinstance(x, (numbers.Real, str)) for x in tf.nest.flatten(value))


def compare_with_chief(
    strategy: tf.distribute.Strategy, doing: str, timeout_s: float = math.inf
) -> None:
    """Raises ValueError if the chief's next collective action differs from this worker's.

    It is a RuntimeError if the chief has gone on because its call has failed.

    Args:
        strategy: The strategy of this worker.
        doing: The action of this worker, as text.
        timeout_s: How long to wait for the chief's, in seconds.
    """
    if not getattr(strategy, "checks_call_order", False):
        return
    key = f"tfmulti/action/{next(_action_numbers)}"
    if topology.is_chief(strategy):
        keras_compat.publish(key, doing)
        return
    on_chief = _await(strategy, key, 0, doing, timeout_s)
    if _COUNTER.sub("", on_chief) != _COUNTER.sub("", doing):
        failed_calls.raise_if_others_failed()
        raise ValueError(
            "All workers must build the same model, and train and evaluate it in the same order, "
            f"with the same settings. Received: on {topology.worker_name(strategy)} {doing}; on "
            f"the first worker {on_chief}. "
            "Look for code that depends on the worker: a setting, a file, an `if` for the chief."
        )


def _wait_for_others(strategy, doing):
    """Makes the chief wait for all others, which have waited for it: a barrier.

    It is no collective, which a worker amid a step could not join.
    """
    if not getattr(strategy, "checks_call_order", False):
        return
    start = f"tfmulti/barrier/{next(_barrier_numbers)}"
    if not topology.is_chief(strategy):
        keras_compat.publish(f"{start}/{topology.worker_index(strategy)}", doing)
        return
    for worker in range(1, topology.num_workers(strategy)):
        _await(strategy, f"{start}/{worker}", worker, doing, WAIT_TIMEOUT_S)


def _await(strategy, key, worker, doing, timeout_s) -> str:
    """Returns what another worker publishes when it comes to the same place of the program."""
    task = topology.cluster_of(strategy).tasks[worker]
    other = topology.worker_names(strategy)[worker]
    begin = time.monotonic()
    try:
        return keras_compat.read_published(key, *task, timeout_s=min(WAIT_WARNING_S, timeout_s))
    except TimeoutError:
        logging.warning("This worker is waiting for %s to reach %s.", other, doing)
    try:
        return keras_compat.read_published(key, *task, timeout_s=timeout_s - WAIT_WARNING_S)
    except TimeoutError as error:
        seconds = time.monotonic() - begin
        raise ValueError(
            f"All workers must reach {doing} together. Received: {topology.worker_name(strategy)} "
            f"reached it, but {other} did not within {seconds:.0f} s. Give every worker the same "
            "number of batches, and call `evaluate` and `predict` on all workers. To stop within "
            "an epoch, set `stop_training` at the same batch on every worker; in `on_epoch_end`, "
            "setting it on one worker is enough."
        ) from error
