"""`"package.module:function"`: finding the function and checking what it returned."""

from __future__ import annotations

import difflib
import importlib
import os
import sys


def resolve_function(name: str, argument: str):
    """Returns the function that `"package.module:function"` names.

    The current folder is put on `sys.path` where it is missing, as `python -m` does. An error
    that the module itself raises is not touched.

    Args:
        name: What the user gave.
        argument: Where, for the message: `"--model"`.

    Raises:
        ValueError: For a name of another form, or of what does not exist or cannot be called.

    Example:
        >>> resolve_function("math:sqrt", "--model")(4)
        2.0
    """
    received = f"{argument}={name!r}"
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        rule = f'`{argument}` must have the form "package.module:function".'
        raise make_error(rule, received, 'Use names as in Python, as "my_package.data:load".')
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists may miss an import of its own: that is the user's to read.
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        rule = f"`{argument}` must name a module that can be imported; {error.name!r} cannot."
        advice = f"Start in its folder, not in {os.getcwd()}, or add it to PYTHONPATH."
        raise make_error(rule, received, advice) from None
    if not hasattr(module, attribute):
        advice = did_you_mean(attribute, [k for k, v in vars(module).items() if callable(v)])
        raise make_error(f"`{argument}` must name a function of its module.", received, advice)
    if not callable(function := getattr(module, attribute)):
        received += f", {_describe(function)}"
        raise make_error(f"`{argument}` must name a function.", received, "Write one to return it.")
    return function


def make_error(rule, received, advice, kind=ValueError):
    """Returns an error in three parts: the rule, what was received, what to do."""
    return kind(f"{rule} Received: {received}. {advice}")


def did_you_mean(word, names):
    """Returns advice for a word that is none of `names`."""
    close = difflib.get_close_matches(word, names)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else "Check its spelling."


def _describe(value):
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(map(_describe, value[:4]))})"
    return type(value).__name__ + (f" of shape {value.shape}" if hasattr(value, "shape") else "")


def _num_rows(array):
    shape = getattr(array, "shape", None)
    return shape[0] if shape is not None and len(shape) else None


def check_pair(name, pair):
    """Returns (train, test) as the function `name` returned it, or raises ValueError."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        advice = "Return ((x_train, y_train), (x_test, y_test)), or two tf.data.Datasets."
        raise make_error(f"`{name}` must return a pair (train, test).", _describe(pair), advice)
    # Without TensorFlow imported, nothing can be one of its datasets.
    tensorflow = sys.modules.get("tensorflow")
    for label, split in zip(("train", "test"), pair):
        is_stream = tensorflow and isinstance(split, tensorflow.data.Dataset)
        example = split.element_spec if is_stream else split
        if not isinstance(example, (tuple, list)) or len(example) not in (2, 3):
            raise make_error(
                f"`{name}` must return (x, y) or (x, y, sample_weight) for {label}, as arrays "
                "or as a tf.data.Dataset of single examples.",
                _describe(split) + (f" with {_describe(example)}" if is_stream else ""),
                "Return (train, test), each with inputs and labels.",
            )
        if is_stream:
            continue
        arrays = [a for v in example for a in (v.values() if isinstance(v, dict) else [v])]
        rows = set(map(_num_rows, arrays))
        if len(rows) != 1 or None in rows:
            raise make_error(
                f"`{name}` must return arrays with one row for each example.",
                f"{label} with {', '.join(map(_describe, arrays))}",
                "Use np.asarray, and arrays of equal length; several inputs go into a dict.",
            )
    return tuple(tuple(split) if isinstance(split, list) else split for split in pair)
