"""Tells the private attributes that a user's code sets from those of Keras and TensorFlow.

A counter may be called `self._step`. Python does not tell who sets an attribute, but the code of a
library has the names of those that it sets or reads.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator

from tfmulti import marks

_LIBRARIES = {"keras", "tensorflow", "tfmulti", *sys.stdlib_module_names}


def is_own(thing, name: str) -> bool:
    """Whether an attribute may be of the user's code: each public one, and some private ones.

    Those are the private attributes of an object of a class outside of the libraries, with a name
    that does not occur in the library classes from which it is derived.

    Args:
        thing: The object.
        name: The name of the attribute.

    Example:
    >>> import keras
    >>> class Own(keras.layers.Layer):
    ...     __module__ = "script"
    >>> [is_own(Own(), name) for name in ("step", "_step", "_path")]
    [True, True, False]
    """
    if not name.startswith("_"):
        return not name.startswith(marks.PREFIX)
    kinds = type(thing).__mro__
    return not _is_library(kinds[0]) and not any(
        name in _names_in(kind) for kind in kinds if _is_library(kind)
    )


def is_users(thing) -> bool:
    """Whether an object is of a class of the user's, or of one that no known library defines."""
    return not _is_library(type(thing))


def _is_library(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in _LIBRARIES


@functools.cache
def _names_in(kind: type) -> frozenset[str]:
    """Returns the names in the code of a library's class, and those of its own attributes."""
    names = set(vars(kind))
    for code in _codes_in(list(vars(kind).values()), set()):
        # Some are set by `setattr` or `__dict__`, with a string.
        names |= {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    return frozenset(names)


def _codes_in(part, seen: set[int]) -> Iterator[types.CodeType]:
    """Yields the code of functions, also that of decorated functions and of those within them."""
    if id(part) in seen:
        return
    seen.add(id(part))
    inner: list = []
    if isinstance(part, types.CodeType):
        yield part
        inner = list(part.co_consts)
    elif isinstance(part, types.FunctionType):
        cells = [cell for cell in part.__closure__ or () if cell != types.CellType()]
        inner = [part.__code__, *(cell.cell_contents for cell in cells)]
    elif isinstance(part, (staticmethod, classmethod)):
        inner = [part.__func__]
    elif isinstance(part, property):
        inner = [part.fget, part.fset, part.fdel]
    elif isinstance(part, functools.cached_property):
        inner = [part.func]
    elif isinstance(part, list):
        inner = part
    for each in [*inner, getattr(part, "__wrapped__", None)]:
        yield from _codes_in(each, seen)
