"""The data that the command line offers: built-in names, users' functions, tensorflow-datasets."""

from __future__ import annotations

import difflib
import importlib
import os
import pathlib
import re
import ssl
import sys
import textwrap
from urllib import parse, request

import numpy as np

from tfmulti.runtime import processes
from tfmulti.sharding import epoch_order


def resolve_function(name: str, argument: str):
    """Returns the function that `"package.module:function"` names.

    It adds the current folder to `sys.path`, as `python -m` does. It passes on an error that the
    module itself raises.

    Args:
        name: What the user gave.
        argument: Where, for the message: `"--model"`.

    Raises:
        ValueError: For a name of another form, or an object that is missing or not callable.

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
        # The module exists but one of its own imports fails: the user needs that error.
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


_MEMORY_LIMIT_BYTES = 2**30
_PROBE_TIMEOUT_S = 8.0


def _find_builder(name):
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name)
    except (ValueError, AssertionError) as error:
        names = ["digits", *tfds.list_builders(with_community_datasets=False)]
        dataset = re.split("[/:]", name)[0].lower()
        if dataset in names:
            rule = "`dataset` must name a config and version that exist."
            received = f"dataset={name!r}: {textwrap.shorten(str(error), 300).rstrip('.:')}"
            advice = f"Use {dataset!r} alone, or load_split for one split."
            raise make_error(rule, received, advice) from error
        rule = (
            "`dataset` must be 'digits', a name of tensorflow-datasets or of a folder in "
            'TFDS_DATA_DIR, or "package.module:function".'
        )
        advice = did_you_mean(dataset, names)
        raise make_error(rule, f"dataset={name!r}", advice) from None


def prepared_builder(name):
    """Returns the builder of a name, with its data on disk."""
    builder = _find_builder(name)
    if builder.is_prepared():
        return builder
    cause = None
    fault = unreachable(_urls_to_fetch(builder), _PROBE_TIMEOUT_S)
    if not fault:
        try:
            builder.download_and_prepare()
            return builder
        except (OSError, AssertionError) as error:
            # Another worker of this host may have written it first.
            builder = _find_builder(name)
            if builder.is_prepared():
                return builder
            fault = cause = error
    raise make_error(
        "`dataset` must be on disk, or be fetched from the network.",
        f"dataset={name!r}, which is not in {builder.data_dir}; {fault}",
        'On a machine with a network run: python -c "import tensorflow_datasets as tfds; '
        f"tfds.load('{name}')\", copy ~/tensorflow_datasets/{builder.name} here, and set "
        "TFDS_DATA_DIR to the folder that holds it. 'digits' needs no network.",
        RuntimeError,
    ) from cause


def _urls_to_fetch(builder):
    downloads = pathlib.Path(builder.data_dir_root, "downloads")
    if any(downloads.glob(f"{builder.name}/**/*.INFO")) or any(downloads.glob("manual/*")):
        return []
    if builder.url_infos or not type(builder).__module__.startswith("tensorflow_datasets."):
        return list(builder.url_infos or [])
    # For some datasets tensorflow-datasets does not register the URLs.
    pages = [builder.info.homepage or "", "https://storage.googleapis.com/tfds-data"]
    return [] if builder.MANUAL_DOWNLOAD_INSTRUCTIONS else pages


def unreachable(urls, timeout):
    """Returns why none of the hosts of `urls` answers, or None.

    tensorflow-datasets itself tries for more than three minutes.
    """
    hosts = {parse.urlsplit(url).hostname: url for url in urls if url.startswith("http")}
    probes = list(hosts.items())[:8]
    fault, answered = None, 0
    for _, fault in processes.ask_in_threads(lambda each: _probe(*each, timeout), probes, timeout):
        if fault is None:
            return None
        answered += 1
    if answered < len(probes):
        fault = fault or f"{probes[answered][0]} does not answer within {timeout:g} s"
    return fault


def _probe(host, url, timeout):
    """Returns why a host cannot be reached, through the proxy if there is one; or None."""
    try:
        # A new opener, because the shared one keeps the proxies of its first use.
        opener = request.build_opener()
        opener.open(request.Request(url, method="HEAD"), timeout=timeout).close()
    except Exception as error:
        fault = getattr(error, "reason", error)
        answered = getattr(error, "code", 502) not in (502, 503, 504)
        # The downloader may have another list of certificate authorities.
        if not answered and not isinstance(fault, ssl.SSLCertVerificationError):
            return f"{host}: {fault}"
    return None


def read_split(builder, split):
    """Returns a split as arrays, or as a stream if it is too large for memory."""
    import tensorflow as tf

    keys = builder.info.supervised_keys
    if not keys:
        rule = "`dataset` must have supervised keys, which name the input and the label."
        advice = 'Read it in your own function, named as "package.module:function".'
        raise make_error(rule, f"dataset={builder.info.full_name!r}", advice)
    try:
        num_examples = builder.info.splits[split].num_examples
    except (ValueError, AssertionError) as error:
        received = f"{split!r} of {builder.info.full_name!r}"
        advice = f"Use one of {', '.join(builder.info.splits)}, or a slice as 'train[:10%]'."
        raise make_error("A split must exist in its dataset.", received, advice) from error

    def scale(value):
        is_image = value.dtype == tf.uint8 and len(value.shape) >= 3
        return tf.cast(value, tf.float32) / 255 if is_image else value

    def pick(example):
        x, *rest = tf.nest.map_structure(lambda key: example[key], keys)
        return tf.nest.map_structure(scale, x), *rest

    examples = _open_split(builder, split).map(pick, num_parallel_calls=tf.data.AUTOTUNE)
    examples = examples.apply(tf.data.experimental.assert_cardinality(num_examples))
    specs = tf.nest.flatten(examples.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in specs):
        return examples
    size = num_examples * sum(s.shape.num_elements() * s.dtype.size for s in specs)
    if any(s.dtype == tf.string for s in specs):
        size += builder.info.dataset_size
    return _in_memory(examples, num_examples) if size <= _MEMORY_LIMIT_BYTES else examples


def _open_split(builder, split):
    import tensorflow as tf
    import tensorflow_datasets as tfds

    if builder.info.file_format == tfds.core.FileFormat.ARRAY_RECORD:
        source = builder.as_data_source(split)
        spec = builder.info.features.get_tensor_spec()
        return tf.data.Dataset.from_generator(lambda: iter(source), output_signature=spec)
    config = tfds.ReadConfig(try_autocache=False, skip_prefetch=True)
    return builder.as_dataset(split=split, shuffle_files=False, read_config=config)


def _in_memory(examples, num_examples):
    import tensorflow as tf

    spec = tf.nest.flatten(examples.element_spec)
    arrays = [np.empty((num_examples, *s.shape), s.dtype.as_numpy_dtype) for s in spec]
    start = 0
    for batch in examples.batch(128).as_numpy_iterator():
        rows = tf.nest.flatten(batch)
        stop = start + len(rows[0])
        for array, values in zip(arrays, rows):
            array[start:stop] = values
        start = stop
    return tf.nest.pack_sequence_as(examples.element_spec, arrays)


def is_unlabelled(split):
    """Whether the first label is the -1 with which tensorflow-datasets marks a missing one."""
    labels = split[1] if isinstance(split, tuple) else next(iter(split.batch(1)))[1]
    is_class = len(getattr(labels, "shape", ())) == 1 and labels.dtype in ("int32", "int64")
    return is_class and int(labels[0]) == -1


__all__ = ["load_dataset", "load_split", "resolve_function"]

# A version ("mnist:3.0.1") and a slice ("mnist/train[10%:]") have colons of their own.
_FUNCTION_NAME = re.compile(r"[^\[\]]*:(?![\d*])[^\[\]]*")


def find_function(name: str):
    """Returns the function that a name of data names; None for another kind of name.

    Raises:
        ValueError: For a function that is not there.
    """
    return resolve_function(name, "dataset") if _FUNCTION_NAME.fullmatch(name) else None


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
        ValueError: For an unknown name, or data of the wrong form.
        RuntimeError: For data that are not on disk and cannot be downloaded.

    Example:
        >>> (x, y), (x_test, y_test) = load_dataset("digits")
        >>> x.shape, x_test.shape
        ((1437, 8, 8, 1), (360, 8, 8, 1))
    """
    if name in DATASETS:
        return DATASETS[name]()
    function = find_function(name)
    if function is not None:
        return check_pair(name, function())
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
    """Returns one split, named `"dataset/split"`, such as `"mnist/train[:10%]"`.

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
    """Loads the digits that scikit-learn's `load_digits` has, from a file of this package.

    Were scikit-learn a requirement, Keras would import it in every process.

    Source: Alpaydin and Kaynak, 1998, "Optical Recognition of Handwritten Digits", the test set,
    UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, under CC BY 4.0.
    """
    digits = np.load(pathlib.Path(__file__).with_name("digits.npz"))
    x = (digits["x"] / 16).astype(np.float32)[..., np.newaxis]
    y = digits["y"].astype(np.int64)
    # Seed 0, epoch 0 of the frozen generators: the same split with every release of NumPy.
    train, test = np.split(epoch_order(len(x), seed=0, epoch=0), [1437])
    return (x[train], y[train]), (x[test], y[test])


DATASETS = {"digits": _load_digits}
