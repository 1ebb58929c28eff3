"""Dataclass fields that become flags, with the constraints of their values."""

from __future__ import annotations

import dataclasses


def setting(default, text: str, choices=None, at_least=None, word=None):
    """Returns a dataclass field that becomes a flag, with the constraints of its value.

    Args:
        default: Its default.
        text: Its description.
        choices: All valid values.
        at_least: The smallest value.
        word: A word that is valid instead of a number.
    """
    metadata = {"help": text, "choices": choices, "at_least": at_least, "word": word}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(config) -> None:
    """Raises ValueError for the first setting of a dataclass with an invalid value."""
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
