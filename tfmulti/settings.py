"""Dataclass fields that become flags, and the constraints of settings and arguments."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Mapping, Sequence

from tfmulti.choices import MODELS, USED_WITH

# What a field's type admits, how its value becomes Python's own, and what it is in words.
_KINDS = {
    "bool": (bool, bool, "True or False"),
    "int": (numbers.Integral, int, "a whole number"),
    "float": (numbers.Real, float, "a number"),
    "str": (str | os.PathLike, os.fspath, "text"),
    "Mapping": (Mapping, lambda value: value, "a mapping"),
    "None": (type(None), lambda value: value, "None"),
}


def setting(
    default, text, choices=None, at_least=None, word=None, *, on_servers=True, per_worker=False
):
    """Returns a dataclass field that becomes a flag, with the constraints of its value.

    Args:
        default: Its default.
        text: Its description.
        choices: All valid values.
        at_least: The smallest value.
        word: A word that is valid instead of a number.
        on_servers: Whether it can be used with parameter servers.
        per_worker: Whether each worker of a job may have another value.
    """
    metadata = {"help": text, "choices": choices, "at_least": at_least, "word": word}
    metadata |= {"on_servers": on_servers, "per_worker": per_worker}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(config) -> None:
    """Raises ValueError for the first setting of a dataclass with an invalid value.

    NumPy's numbers and paths become Python's own numbers and text, which JSON can represent.
    """
    for field in dataclasses.fields(config):
        value = _convert(field, getattr(config, field.name))
        object.__setattr__(config, field.name, value)
        _check_value(field, value)


def _convert(field, value):
    """Returns a value as Python's own of the types that a field's annotation names."""
    word, kinds = field.metadata["word"], field.type.split(" | ")
    if word:
        if isinstance(value, str) and value == word:
            return value
        kinds.remove("str")
    for each in kinds:
        kind, convert, _ = _KINDS[each]
        # True is a number in Python.
        if isinstance(value, kind) and (each == "bool" or not isinstance(value, bool)):
            return value if isinstance(value, int | float) else convert(value)
    if field.metadata["choices"]:
        # They say more than the type.
        check_choice(field.name, value, field.metadata["choices"], "See --help.")
    *first, last = [_KINDS[each][2] for each in reversed(kinds)] + ([repr(word)] if word else [])
    advice = f"It is: {field.metadata['help']}"
    if "str" not in kinds:
        example = 32 if word else max(1, field.metadata["at_least"] or 1)
        advice = f"Use for example {example if field.default is None else field.default}."
    raise ValueError(
        f"`{field.name}` must be {', '.join(first)}{' or ' if first else ''}{last}. "
        f"Received: {field.name}={value!r}. {advice}"
    )


def _check_value(field, value):
    choices, at_least = field.metadata["choices"], field.metadata["at_least"]
    if value is None or value == field.metadata["word"]:
        return
    if choices:
        check_choice(field.name, value, choices, "See --help.")
    if at_least is not None and not value >= at_least:
        raise ValueError(
            f"`{field.name}` must be at least {at_least}. "
            f"Received: {field.name}={value!r}. Use a larger number."
        )


def unused_by(strategy: str, given: Mapping[str, object], defaults: Mapping) -> list[str]:
    """Returns the names of what was given, and has no effect with a strategy.

    Args:
        strategy: The strategy; `"auto"` may choose any.
        given: Values by name.
        defaults: Their defaults.

    >>> unused_by("mirrored", {"bucket_bytes": 8, "logical_cpus": 2}, {"bucket_bytes": None})
    ['bucket_bytes']
    """
    return [
        name
        for name, strategies in USED_WITH.items()
        if strategy not in ("auto", *strategies) and name in given and given[name] != defaults[name]
    ]


def check_used(of: str, given: Mapping[str, object], defaults: Mapping, advice: str) -> None:
    """Raises ValueError for an argument that the strategy cannot use.

    Args:
        of: The argument that names the strategy.
        given: All arguments by name.
        defaults: Their defaults.
        advice: What to do, with `{name}` and `{strategy}` for the argument and one that uses it.

    >>> given = {"name": "mirrored", "bucket_bytes": 8}
    >>> check_used("name", given, {"bucket_bytes": None}, "Use {strategy!r}.")
    Traceback (most recent call last):
    ValueError: `bucket_bytes` can be used with multi_worker and auto only. Received: \
bucket_bytes=8, name='mirrored'. Use 'multi_worker'.
    """
    for name in unused_by(given[of], given, defaults):
        raise ValueError(
            f"`{name}` can be used with {', '.join(USED_WITH[name])} and auto only. "
            f"Received: {name}={given[name]!r}, {of}={given[of]!r}. "
            + advice.format(name=name, strategy=USED_WITH[name][0])
        )


def check_choice(name: str, value, choices: Sequence[str | None], advice: str) -> None:
    """Raises ValueError for an argument that is none of its choices.

    Args:
        name: The argument.
        value: Its value.
        choices: All valid values; None as the first one makes it optional.
        advice: What to do, the last part of the message.

    >>> check_choice("shard", "slots", (None, "state"), "Use 'state'.")
    Traceback (most recent call last):
    ValueError: `shard` must be None or one of state. Received: shard='slots'. Use 'state'.
    """
    if value in choices:
        return
    optional = "None or " if choices[0] is None else ""
    names = ", ".join(choice for choice in choices if choice is not None)
    raise ValueError(
        f"`{name}` must be {optional}one of {names}. Received: {name}={value!r}. {advice}"
    )


def check_model(name: str) -> None:
    """Raises ValueError for a name that is neither a built-in model's nor a function's.

    >>> check_model("cnnn")
    Traceback (most recent call last):
    ValueError: `model` must be one of cnn, mlp, or 'package.module:function'. Received: \
model='cnnn'. Use 'cnn' for images, or 'mine:create' for the function create of mine.py.
    """
    if ":" not in name and name not in MODELS:
        raise ValueError(
            f"`model` must be one of {', '.join(MODELS)}, or 'package.module:function'. "
            f"Received: model={name!r}. Use 'cnn' for images, or 'mine:create' for the function "
            "create of mine.py."
        )


def check_whole_number(
    name: str, value, advice: str, at_least: int = 1, optional: bool = False
) -> None:
    """Raises ValueError for an argument that is no whole number, or too small.

    Args:
        name: The argument.
        value: Its value.
        advice: What to do, the last part of the message.
        at_least: The smallest valid number.
        optional: Whether None is valid.

    >>> check_whole_number("epochs", 0.5, "Use for example 3.")
    Traceback (most recent call last):
    ValueError: `epochs` must be a whole number from 1. Received: epochs=0.5. Use for example 3.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < at_least:
        raise ValueError(
            f"`{name}` must be {'None or ' if optional else ''}a whole number from {at_least}. "
            f"Received: {name}={value!r}. {advice}"
        )


def check_type(name: str, value, kind: type, description: str, advice: str) -> None:
    """Raises ValueError for an argument of another type.

    Args:
        name: The argument.
        value: Its value.
        kind: The type that it must have.
        description: What it must be, in words.
        advice: What to do, the last part of the message.

    >>> check_type("strategy", 3, dict, "a strategy", "Use create_strategy.")
    Traceback (most recent call last):
    ValueError: `strategy` must be a strategy. Received: strategy=3. Use create_strategy.
    """
    if not isinstance(value, kind):
        raise ValueError(f"`{name}` must be {description}. Received: {name}={value!r}. {advice}")
