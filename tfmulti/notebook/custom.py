"""The classes and functions of one's own in a Keras model, which Keras loads by their names."""

from __future__ import annotations

import json
import types
import zipfile
from collections import deque
from pathlib import Path

import keras

_CONFIG = "config.json"
# Nothing of the user's is found within these.
_OTHERS = ("tensorflow", "numpy", "h5py", "jax", "torch", "threading", "weakref")


def objects_of(model: keras.Model, path: Path) -> dict[str, object]:
    """Returns what `keras.saving.load_model` needs as `custom_objects`.

    Args:
        model: The model.
        path: Its file, made by `model.save`.
    """
    with zipfile.ZipFile(path) as archive:
        wanted = set(_names_in(json.loads(archive.read(_CONFIG))))
    found: dict[str, object] = {}
    for each in _reachable(model):
        if len(found) == len(wanted):
            break
        is_named = isinstance(each, (type, types.FunctionType))
        kind = each if is_named else type(each)
        name = keras.saving.get_registered_name(kind)
        if name in wanted and not (kind.__module__ or "").startswith("keras"):
            found.setdefault(name, kind)
    return found


def _names_in(config):
    """Yields the names in a model's configuration that are not Keras's own."""
    if isinstance(config, list):
        for each in config:
            yield from _names_in(each)
    elif isinstance(config, dict):
        # A function says its name there, and of its module that it is Python's own.
        is_function = config.get("class_name") == "function"
        name = config.get("config" if is_function else "registered_name")
        if isinstance(name, str) and not str(config.get("module")).startswith("keras"):
            yield name
        for each in config.values():
            yield from _names_in(each)


def _reachable(model):
    """Yields the objects that a model is made of, the nearest first."""
    waiting, seen = deque([model]), {id(model)}
    while waiting:
        each = waiting.popleft()
        yield each
        for part in _parts_of(each):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def _parts_of(each):
    if isinstance(each, (str, bytes, int, float, type, types.ModuleType)):
        return []
    if isinstance(each, dict):
        return list(each.values())
    if isinstance(each, (list, tuple, set, frozenset)):
        return list(each)
    if isinstance(each, types.MethodType):
        return [each.__self__, each.__func__]
    if isinstance(each, types.FunctionType) or type(each).__module__.startswith(_OTHERS):
        return []
    return list(getattr(each, "__dict__", {}).values())
