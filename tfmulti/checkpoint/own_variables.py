"""Finds the variables that a model holds in attributes, beside its weights and optimizers.

Such are a `tf.Variable` that a step changes, and the weights of a teacher in an object of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.verification.python_values import walk

PREFIX = "own/"
"""Begins their names in a checkpoint; the path of the attribute follows, such as `moving/0`."""
_MOST_NAMES = 3


def own_variables(
    model: keras.Model, others: Iterable[keras.Variable]
) -> dict[str, keras.Variable | tf.Variable]:
    """Returns the variables that a model and the objects that it holds have, by their names.

    Those of metrics, which Keras resets, and those of tfmulti are left out.

    Args:
        model: The model.
        others: The variables that have other names.
    """
    left_out = [*others, *keras_compat.metric_variables(model)]
    # The value of sharded state cannot be read here, and the model does not hold it.
    left_out += [variable.value for variable in left_out if not hasattr(variable, "is_here")]
    known = {id(variable) for variable in left_out}
    kinds = (keras.Variable, tf.Variable)
    found = [(path, thing) for path, thing in walk(model) if isinstance(thing, kinds)]
    return {
        f"{PREFIX}{path}": variable
        for path, variable in found
        if id(variable) not in known and not _is_internal(path, variable)
    }


def _is_internal(path, variable) -> bool:
    """Whether it belongs to tfmulti itself, or is noted by it."""
    return any(part.startswith(marks.PREFIX) for part in (variable.name, *path.split("/")))


def report_others(kept: Iterable[str], mine: Iterable[str], print_fn: Callable[[str], None]):
    """Tells of variables that only a checkpoint has, or only this run.

    Args:
        kept: The names in the checkpoint.
        mine: The names in this run.
        print_fn: Function of one line of text.
    """
    before, now = ({name for name in names if name.startswith(PREFIX)} for names in (kept, mine))
    for names, text in (
        (before - now, "the checkpoint has a value of {}, which this run does not have (yet); the "
         "value is ignored"),
        (now - before, "the checkpoint has no value of {}: what it is now is kept"),
    ):  # fmt: skip
        if names:
            some = [name.removeprefix(PREFIX) for name in sorted(names)]
            more = f" and {len(some) - _MOST_NAMES} more" if len(some) > _MOST_NAMES else ""
            print_fn(text.format(f"the model's {', '.join(some[:_MOST_NAMES])}{more}"))
