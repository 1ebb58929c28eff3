"""Finds the variables that a model holds in attributes, beside its weights and optimizers.

Such are a `tf.Variable` that a step changes, and the weights of a teacher in an object of its own;
also what the user's callbacks hold, and what a loss or another function reads from around it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.checkpoint import callback_states
from tfmulti.verification.own_names import is_users
from tfmulti.verification.python_values import walk

PREFIX = "own/"
"""Begins their names in a checkpoint; the path of the attribute follows, such as `moving/0`."""
OF_CALLBACKS = "callbacks_own/"
"""Begins the names of those of callbacks; the class, its number and the path follow."""
_MOST_NAMES = 3
_KINDS = (keras.Variable, tf.Variable)
_FOREIGN = ("keras", "tensorflow", "tfmulti")


def own_variables(
    model: keras.Model, others: Iterable[keras.Variable], callbacks: Sequence = ()
) -> dict[str, keras.Variable | tf.Variable]:
    """Returns the variables of a model, its objects and functions, and callbacks, by their names.

    Those of metrics, which Keras resets, and those of tfmulti are left out.

    Args:
        model: The model.
        others: The variables that have other names.
        callbacks: The callbacks of this `fit`.
    """
    left_out = [*others, *keras_compat.metric_variables(model)]
    # The value of sharded state cannot be read here, and the model does not hold it.
    left_out += [variable.value for variable in left_out if not hasattr(variable, "is_here")]
    known = {id(variable) for variable in left_out}
    walked = walk(model)
    found = [(f"{PREFIX}{path}", thing) for path, thing in walked if isinstance(thing, _KINDS)]
    found += [(f"{PREFIX}{path}", variable) for path, variable in _around_functions(walked)]
    named = {}
    for path, variable in [*found, *_of_callbacks(callbacks)]:
        if id(variable) not in known and not _is_internal(path, variable):
            known.add(id(variable))
            named[path] = variable
    return named


def _of_callbacks(callbacks) -> Iterator[tuple[str, keras.Variable | tf.Variable]]:
    """Yields the variables of the user's callbacks; not those of metrics, which are reset."""
    numbers: dict[str, int] = {}
    for callback in callbacks:
        is_lambda = type(callback) is keras.callbacks.LambdaCallback
        if not (is_lambda or callback_states.is_users(callback)):
            continue
        kind = type(callback).__name__
        number = numbers[kind] = numbers.get(kind, -1) + 1
        walked = walk(callback_states.attributes_of(callback))
        found = [(path, thing) for path, thing in walked if isinstance(thing, _KINDS)]
        for path, variable in [*found, *_around_functions(walked)]:
            if not _is_added(variable):
                yield f"{OF_CALLBACKS}{kind}/{number}/{path}", variable


def _around_functions(walked) -> Iterator[tuple[str, keras.Variable | tf.Variable]]:
    """Yields the variables that the user's functions read, of their module or one around them."""
    functions = [pair for path, thing in walked for pair in _functions_of(path, thing)]
    for path, thing in functions:
        if str(thing.__module__).partition(".")[0] in _FOREIGN:
            continue
        try:
            around = inspect.getclosurevars(thing)
        except ValueError:
            # A name around it has no value yet.
            continue
        for name, value in {**around.globals, **around.nonlocals}.items():
            if isinstance(value, list | tuple | dict):
                # Not the objects in it: a global one may hold all that the program has.
                items = value.items() if isinstance(value, dict) else enumerate(value)
                parts = {f"{name}/{key}": part for key, part in items}
            else:
                parts = {name: value}
            for each, part in parts.items():
                if isinstance(part, _KINDS):
                    yield f"{path}/{each}", part


def _functions_of(path, thing) -> list[tuple[str, types.FunctionType]]:
    """Returns a function itself, or the methods of an object of the user's, with their paths."""
    if isinstance(thing, types.FunctionType):
        return [(path, thing)]
    if not is_users(thing):
        return []
    methods = {
        name: method
        for kind in reversed(type(thing).__mro__)
        for name, method in vars(kind).items()
        if isinstance(method, types.FunctionType)
    }
    return [(f"{path}/{name}".lstrip("/"), method) for name, method in methods.items()]


def _is_added(variable) -> bool:
    """Whether each replica has a part of it, as of a metric: to read it would be a collective."""
    how = getattr(variable, "synchronization", None)
    return how in ("on_read", tf.VariableSynchronization.ON_READ)


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
    kept, mine = set(kept), set(mine)
    for prefix, whose in ((PREFIX, "the model's"), (OF_CALLBACKS, "the callbacks'")):
        before, now = ({n for n in names if n.startswith(prefix)} for names in (kept, mine))
        _report(before, now, prefix, whose, print_fn)


def _report(before, now, prefix, whose, print_fn):
    for names, text in (
        (before - now, "the checkpoint has a value of {}, which this run does not have (yet); the "
         "value is ignored"),
        (now - before, "the checkpoint has no value of {}: what it is now is kept"),
    ):  # fmt: skip
        if names:
            some = [name.removeprefix(prefix) for name in sorted(names)]
            more = f" and {len(some) - _MOST_NAMES} more" if len(some) > _MOST_NAMES else ""
            print_fn(text.format(f"{whose} {', '.join(some[:_MOST_NAMES])}{more}"))
