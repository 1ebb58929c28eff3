"""How a value of a whole batch comes from the same value of the batch's parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEAN, SUM, NEITHER = "mean", "sum", "neither"
# Rounding differs with the number of rows; what is looked for here is far above it.
CLOSE = 1e-4


def is_close(value, reference, close: float = CLOSE) -> bool:
    """Whether two arrays are alike up to rounding.

    Args:
        value: An array.
        reference: Another one.
        close: How far apart they can be, relative to the largest number in them.

    Example:
    >>> is_close([1.0, 1e-9], [1.0, 0.0]), is_close([1.0], [1.01])
    (True, False)
    """
    a, b = (np.asarray(each, np.float64) for each in (value, reference))
    if a.shape != b.shape:
        return False
    if not a.size:
        return True
    scale = max(np.abs(a).max(), np.abs(b).max())
    # Not `>`: NaN is like nothing.
    return bool(scale == 0 or np.abs(a - b).max() <= close * scale)


def relate(whole, parts: Sequence, weights: Sequence[float], close: float = CLOSE) -> str:
    """Tells whether a value of the whole is the parts' mean, their sum, or neither.

    Args:
        whole: The value of the whole batch.
        parts: The values of its parts.
        weights: The rows of each part, of all rows.
        close: How far apart values can be, relative to the largest number in them.

    Returns:
        `"mean"`, `"sum"` or `"neither"`.

    Example:
    >>> relate(2.0, [1.0, 3.0], [0.5, 0.5]), relate(4.0, [1.0, 3.0], [0.5, 0.5])
    ('mean', 'sum')
    """
    whole = np.asarray(whole, np.float64)
    parts = [np.asarray(part, np.float64) for part in parts]
    if any(part.shape != whole.shape for part in parts):
        return NEITHER
    # Relative to the parts too: a sum that cancels must not make rounding look large.
    scale = max(1e-30, *(np.abs(each).max(initial=0.0) for each in (whole, *parts)))
    for name, factors in ((MEAN, weights), (SUM, [1.0] * len(parts))):
        made = sum(factor * part for factor, part in zip(factors, parts))
        if np.abs(made - whole).max(initial=0.0) <= close * scale:
            return name
    return NEITHER
