"""Which classes, functions and objects are Keras's own, whatever module they name as theirs."""

from __future__ import annotations

import inspect
import os

import keras

import tfmulti

_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(package.__file__)) + os.sep for package in (keras, tfmulti)
)


def is_stock(thing, *others: str) -> bool:
    """Whether a class, a function or an object is Keras's own.

    A decorator gives its function the module of what it wraps, and Keras gives its own to lambdas
    that it loads. So the code of a function counts, and that of each function that it wraps.

    Args:
        thing: The class, the function or the object; of an object its class counts.
        *others: Names of packages whose parts count too.
    """
    kind = thing if isinstance(thing, type) or hasattr(thing, "__code__") else type(thing)
    packages = tuple(f"{package}." for package in ("keras", *others))
    return str(kind.__module__).startswith(packages) and all(map(_is_known, _links(kind)))


def users_function(thing):
    """Returns the innermost function that is not Keras's of those that wrap another, if any."""
    links = _links(thing)
    return ([each for each in links if not _is_known(each)] or links)[-1]


def _links(function) -> list:
    """Returns a function, and those that it wraps, one within another."""
    links: list = []
    innermost = inspect.unwrap(function, stop=links.append)
    return [*links, innermost]


def _is_known(function) -> bool:
    """Whether the code of a function is Keras's or of this package; True for what has no code."""
    code = getattr(function, "__code__", None)
    return code is None or os.path.abspath(code.co_filename).startswith(_FOLDERS)
