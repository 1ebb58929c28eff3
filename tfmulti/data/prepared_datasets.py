"""tensorflow-datasets: what is on disk is read, what can be fetched is fetched."""

from __future__ import annotations

import pathlib
import queue
import re
import ssl
import textwrap
import threading
import time
from urllib import parse, request

import numpy as np

from tfmulti.data.functions import did_you_mean, make_error

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
            # Another worker of this host may have been quicker.
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
    # Of some of its own datasets tensorflow-datasets does not register where they come from.
    pages = [builder.info.homepage or "", "https://storage.googleapis.com/tfds-data"]
    return [] if builder.MANUAL_DOWNLOAD_INSTRUCTIONS else pages


def unreachable(urls, timeout):
    """Returns why none of the hosts of `urls` answers, or None.

    tensorflow-datasets itself tries for more than three minutes.
    """
    hosts = {parse.urlsplit(url).hostname: url for url in urls if url.startswith("http")}
    answers = queue.Queue()
    deadline = time.monotonic() + timeout
    probes = list(hosts.items())[:8]
    for probe in probes:
        threading.Thread(target=_probe, args=(*probe, timeout, answers), daemon=True).start()
    fault = None
    for host, _ in probes:
        try:
            fault = answers.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            return fault or f"{host} does not answer within {timeout:g} s"
        if fault is None:
            break
    return fault


def _probe(host, url, timeout, answers):
    """Puts into `answers` why a host cannot be reached, through the proxy if there is one."""
    try:
        # A new opener, because the shared one keeps the proxies of its first use.
        opener = request.build_opener()
        opener.open(request.Request(url, method="HEAD"), timeout=timeout).close()
        fault = None
    except Exception as error:
        fault = getattr(error, "reason", error)
        answered = getattr(error, "code", 502) not in (502, 503, 504)
        # A certificate that only the downloader's own list of authorities may know.
        if answered or isinstance(fault, ssl.SSLCertVerificationError):
            fault = None
    answers.put(fault and f"{host}: {fault}")


def read_split(builder, split):
    """Returns a split as arrays, or as a stream where it is too large for memory."""
    import tensorflow as tf

    keys = builder.info.supervised_keys
    if not keys:
        rule = "`dataset` must have supervised keys, which say what is input and what is label."
        advice = 'Read it in a function of your own, named as "package.module:function".'
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
