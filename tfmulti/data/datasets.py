"""The data that the command line offers: built-in names, users' functions, tensorflow-datasets."""

from __future__ import annotations

import re

import numpy as np

from tfmulti.data.functions import check_pair, make_error, resolve_function
from tfmulti.data.prepared_datasets import is_unlabelled, prepared_builder, read_split
from tfmulti.sharding import epoch_order

__all__ = ["load_dataset", "load_split", "resolve_function"]

# A version ("mnist:3.0.1") and a slice ("mnist/train[10%:]") have colons of their own.
_FUNCTION_NAME = re.compile(r"[^\[\]]*:(?![\d*])[^\[\]]*")


def load_dataset(name: str = "digits"):
    """Returns the data of a name as a pair (train, test).

    Each is a tuple of arrays `(x, y)` or `(x, y, sample_weight)`, or a `tf.data.Dataset` of
    single examples. From tensorflow-datasets, images come scaled to 0..1, and splits of at
    most 1 GiB as arrays, so that each worker reads only its own rows. Create the strategy
    first: reading them starts TensorFlow's runtime.

    Args:
        name: `"digits"`, 1,437 and 360 handwritten digits of shape `(8, 8, 1)` that need no
            network; `"package.module:function"`, called as `fn() -> (train, test)`; or a
            name of tensorflow-datasets, where `validation` stands in for a `test` that is
            missing or has no labels.

    Raises:
        ValueError: For a name that is not known, or data of the wrong form.
        RuntimeError: For data that is not on disk and cannot be fetched.

    Example:
        >>> (x, y), (x_test, y_test) = load_dataset("digits")
        >>> x.shape, x_test.shape
        ((1437, 8, 8, 1), (360, 8, 8, 1))
    """
    if name in DATASETS:
        return DATASETS[name]()
    if _FUNCTION_NAME.fullmatch(name):
        return check_pair(name, resolve_function(name, "dataset")())
    builder = prepared_builder(name)
    tests = [split for split in ("test", "validation") if split in builder.info.splits]
    if not tests or "train" not in builder.info.splits:
        raise make_error(
            "`dataset` must have a split train, and test or validation.",
            f"dataset={name!r} with {', '.join(builder.info.splits)}",
            f"Write a function that returns two slices, as load_split('{name}/train[:90%]').",
        )
    test = read_split(builder, tests[0])
    if len(tests) > 1 and is_unlabelled(test):
        test = read_split(builder, tests[1])
    return read_split(builder, "train"), test


def load_split(name: str):
    """Returns one split, named `"dataset/split"`, as in `"mnist/train[:10%]"`.

    What comes before the last slash is a name that `load_dataset` takes; so are the errors.

    Example:
        >>> x, y = load_split("digits/test")
        >>> y.shape
        (360,)
    """
    dataset, _, split = name.rpartition("/")
    if not dataset or not split:
        advice = "Use for example 'digits/train' or 'mnist/train[:10%]'."
        raise make_error('A split must be named "dataset/split".', repr(name), advice)
    if dataset not in DATASETS and not _FUNCTION_NAME.fullmatch(dataset):
        return read_split(prepared_builder(dataset), split)
    splits = dict(zip(("train", "test"), load_dataset(dataset)))
    if split not in splits:
        raise make_error("A split must exist in its dataset.", repr(name), "Use train or test.")
    return splits[split]


def _load_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images / 16).astype(np.float32)[..., np.newaxis]
    y = digits.target.astype(np.int64)
    # Seed 0, epoch 0 of the frozen generators: the same split with every release of NumPy.
    train, test = np.split(epoch_order(len(x), seed=0, epoch=0), [1437])
    return (x[train], y[train]), (x[test], y[test])


DATASETS = {"digits": _load_digits}
