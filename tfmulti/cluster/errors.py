"""`ClusterError`, and the form of its message."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

_MAX_SHOWN = 160


class ClusterError(ValueError):
    """A cluster is described wrongly, or cannot be used; the message says where and why."""


def setting_error(
    field: str, rule: str, *, received: str, source: str, advice: str
) -> ClusterError:
    """Returns (does not raise) the error for one mistake in a `TF_CONFIG` or a variable.

    Args:
        field: what is wrong, as Python would index it: `TF_CONFIG["cluster"]["worker"][1]`; or
            the name of an environment variable.
        rule: what must hold, as the rest of a sentence that begins with `field`.
        received: what was found there.
        source: where this `TF_CONFIG` came from, or whose variable it is, such as `"Slurm"`.
        advice: what to write instead, one or more sentences.

    Example:
        >>> print(setting_error('TF_CONFIG["task"]', "must be an object", received="3",
        ...                     source="the file a.json", advice="Write one."))
        `TF_CONFIG["task"]` must be an object. Received: 3 (from the file a.json). Write one.
    """
    return ClusterError(f"`{field}` {rule}. Received: {received} (from {source}). {advice}")


def show(value: object) -> str:
    """Returns a value as JSON writes it, shortened, so that "0" and 0 look different.

    Example:
        >>> show("0"), show(0), show(None), show({"a": [True]})
        ('"0"', '0', 'null', '{"a": [true]}')
    """
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError):  # A mapping from Python may have keys that JSON does not know.
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def suggest(word: object, options: Iterable[str]) -> str:
    """Returns 'Did you mean "worker"? ', or an empty string where nothing is close.

    Example:
        >>> suggest("wroker", ["chief", "worker"])
        'Did you mean "worker"? '
        >>> suggest("gpu", ["chief", "worker"])
        ''
    """
    close = difflib.get_close_matches(str(word).lower(), list(options), n=1)
    return f'Did you mean "{close[0]}"? ' if close else ""
