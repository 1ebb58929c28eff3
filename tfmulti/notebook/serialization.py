"""Serializes functions, histories and models for another process, in the files of a folder."""

from __future__ import annotations

import inspect
import io
import json
import pickle
import sys
import types
import zipfile
from collections import ChainMap, deque
from collections.abc import Iterator
from pathlib import Path

import cloudpickle

from tfmulti.runtime import command_line

_CONFIG = "config.json"
# Objects of these packages hold no objects of the user.
_OTHERS = ("tensorflow", "numpy", "h5py", "jax", "torch", "threading", "weakref")


def objects_of(model, path: Path) -> dict[str, object]:
    """Returns the `custom_objects` for `keras.saving.load_model`.

    Args:
        model: The Keras model.
        path: Its file, made by `model.save`.
    """
    import keras

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
        # A function has its name there, and `builtins` as its module.
        is_function = config.get("class_name") == "function"
        name = config.get("config" if is_function else "registered_name")
        if isinstance(name, str) and not str(config.get("module")).startswith("keras"):
            yield name
        for each in config.values():
            yield from _names_in(each)


def _reachable(model):
    """Yields the objects that a model refers to, the nearest first."""
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


_FILE = "objects.pickle"
# Creating one of these starts TensorFlow, which then accepts no cluster.
_KERAS_KINDS = ("Layer", "Metric", "Optimizer", "Variable")
_TENSORFLOW_KINDS = ("Tensor", "Variable", "data.Dataset", "distribute.Strategy")
_MESSAGE_LENGTH = 300


class SerializationError(Exception):
    """An object cannot be serialized; the message names it."""


def save_call(folder: Path, function, args: tuple, kwargs: dict) -> None:
    """Serializes a call of a function, for processes that have not started TensorFlow yet.

    What `keras.saving.register_keras_serializable` has registered and the function uses is
    registered there too.

    Raises:
        SerializationError: For what cannot be sent to another process.
    """
    with open(folder / _FILE, "wb") as file:
        pickler = _CallPickler(file)
        try:
            pickler.dump((function, args, kwargs))
            pickler.dump(pickler.registered)
        except _FAILURES as error:
            raise SerializationError(
                _find_culprit(function, args, kwargs) or _describe(error)
            ) from error


def names_tensorflow(folder: Path) -> bool:
    """Returns whether a call may import TensorFlow, judged by the names in it."""
    data = (folder / _FILE).read_bytes()
    return any(name in data for name in (b"keras", b"tensorflow", b"tfmulti"))


def load_call(folder: Path) -> tuple:
    """Returns the function, its arguments and its keywords."""
    with open(folder / _FILE, "rb") as file:
        unpickler = pickle.Unpickler(file)
        call = unpickler.load()
        registered = unpickler.load()
    for name, each in registered.items():
        import keras

        package, _, own = name.rpartition(">")
        keras.saving.register_keras_serializable(package or "Custom", own)(each)
    return call


def save_result(folder: Path, result: object) -> None:
    """Serializes the result of a function.

    Raises:
        ValueError: For what cannot be sent to another process.
    """
    with open(folder / _FILE, "wb") as file:
        try:
            _ResultPickler(file, folder).dump(result)
        except _FAILURES as error:
            raise ValueError(
                "`function` must return an object that can be serialized. Received: "
                f"{type(result).__qualname__} with {_describe(error).rstrip('.')}. Return the "
                "history, a keras.Model, NumPy arrays, or a tuple or dict of these."
            ) from error


def load_result(folder: Path) -> object:
    """Returns the result of a function in another process."""
    with open(folder / _FILE, "rb") as file:
        return _ResultUnpickler(file, folder).load()


# pickle raises these for most objects that it cannot serialize.
_FAILURES = (pickle.PicklingError, TypeError, ValueError, AttributeError, SerializationError,
             NotImplementedError, RecursionError)  # fmt: skip


def _describe(error) -> str:
    if isinstance(error, SerializationError):
        return str(error)
    # Keras gives whole programs as examples.
    text = " ".join(str(error).split("Example:")[0].split())
    return f"{type(error).__name__}: {text}"[:_MESSAGE_LENGTH]


def _reduce_code(code: types.CodeType):
    """Keeps the file's name, so that a traceback shows the user's file or cell, and its line.

    cloudpickle 3.1.3 and newer put a name of their own in its place.
    """
    create, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return create, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


class _CallPickler(_Pickler):
    def __init__(self, file):
        super().__init__(file)
        self.registered: dict[str, object] = {}
        self._refused = tuple(_kinds_of_a_running_tensorflow())
        keras = sys.modules.get("keras")
        known = keras.saving.get_custom_objects() if keras else {}
        self._names = {id(each): name for name, each in known.items()}

    def persistent_id(self, obj):
        if isinstance(obj, self._refused):
            raise SerializationError(
                f"an object of {type(obj).__module__}.{type(obj).__qualname__}"
            )
        if isinstance(obj, (type, types.FunctionType)) and id(obj) in self._names:
            self.registered[self._names[id(obj)]] = obj
        return None


def _kinds_of_a_running_tensorflow() -> Iterator[type]:
    keras, tensorflow = sys.modules.get("keras"), sys.modules.get("tensorflow")
    for module, names in ((keras, _KERAS_KINDS), (tensorflow, _TENSORFLOW_KINDS)):
        for name in names if module else ():
            kind = module.optimizers if name == "Optimizer" else module
            for part in name.split("."):
                kind = getattr(kind, part)
            yield kind


class _ResultPickler(_Pickler):
    def __init__(self, file, folder):
        super().__init__(file)
        self._folder, self._models = folder, {}
        self._keras = sys.modules.get("keras")

    def persistent_id(self, obj):
        if self._keras is None:
            return None
        if isinstance(obj, self._keras.Model):
            if id(obj) not in self._models:
                self._models[id(obj)] = self._save(obj, f"model_{len(self._models)}.keras")
            return ("model", *self._models[id(obj)])
        if isinstance(obj, self._keras.callbacks.History):
            return ("history", obj.history, obj.epoch, obj.params)
        return None

    def _save(self, model, name):
        model.save(self._folder / name)
        return name, objects_of(model, self._folder / name)


class _ResultUnpickler(pickle.Unpickler):
    def __init__(self, file, folder):
        super().__init__(file)
        self._folder, self._models = folder, {}

    def persistent_load(self, pid):
        if "keras" not in sys.modules:
            command_line.import_tensorflow()
        import keras

        kind, *parts = pid
        if kind == "history":
            history = keras.callbacks.History()
            history.history, history.epoch, params = parts
            history.set_params(params)
            return history
        name, custom_objects = parts
        if name not in self._models:
            # The file comes from the user's own function, so lambdas are safe to load.
            self._models[name] = keras.saving.load_model(
                self._folder / name, custom_objects=custom_objects, safe_mode=False
            )
        return self._models[name]


def _find_culprit(function, args, kwargs) -> str | None:
    """Returns the name by which a function refers to an unserializable object, or None."""
    waiting = [*_variables_of(function), ("args", args), ("kwargs", kwargs)]
    seen = set()
    while waiting:
        name, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            _CallPickler(io.BytesIO()).dump(value)
        except _FAILURES as error:
            # Skip the function itself: look for the object that it uses.
            inner = _variables_of(value)
            if not inner:
                return f"`{name}`: {_describe(error)}"
            waiting = inner + waiting
    return None


def _variables_of(function) -> list[tuple[str, object]]:
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return []
    return [*found.nonlocals.items(), *found.globals.items()]
