"""Dataclasses whose fields become flags, each with what its value must be."""

from __future__ import annotations

import dataclasses


def setting(default, text: str, choices=None, at_least=None, word=None):
    """Returns a dataclass field that becomes a flag, with what its value must be.

    Args:
        default: Its default.
        text: What it is for.
        choices: All values that it can have.
        at_least: The smallest value.
        word: A word that a number can be replaced with.
    """
    metadata = {"help": text, "choices": choices, "at_least": at_least, "word": word}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(config) -> None:
    """Raises ValueError for the first setting of a dataclass whose value cannot be."""
    for field in dataclasses.fields(config):
        _check_value(field, getattr(config, field.name))


def _check_value(field, value):
    choices, at_least = field.metadata["choices"], field.metadata["at_least"]
    if value is None or (word := field.metadata["word"]) and value == word:
        return
    if word and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(
            f"`{field.name}` must be a whole number or {word!r}. "
            f"Received: {field.name}={value!r}. Use for example 32."
        )
    if choices and value not in choices:
        raise ValueError(
            f"`{field.name}` must be one of {', '.join(choices)}. "
            f"Received: {field.name}={value!r}. See --help."
        )
    if at_least is not None and not value >= at_least:
        raise ValueError(
            f"`{field.name}` must be at least {at_least}. "
            f"Received: {field.name}={value!r}. Use a larger number."
        )
