"""What is printed while a step is verified: a line if that takes long, and no noise."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

import tensorflow as tf

_SECONDS = 5.0


@contextlib.contextmanager
def quiet_tensorflow() -> Iterator[None]:
    """Suppresses TensorFlow's warnings of steps that run eagerly and are traced several times."""

    def is_error(record):
        return record.levelno > logging.WARNING

    logger = tf.get_logger()
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


@contextlib.contextmanager
def announced(kind: str, seconds: float = _SECONDS) -> Iterator[None]:
    """Prints a line to stderr if what runs within takes long.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
        seconds: How long nothing is printed.
    """
    line = (
        f"tfmulti: verifying `{kind}_step` on a few rows before the first step; "
        'create_strategy(verify="never") skips it.\n'
    )
    timer = threading.Timer(seconds, lambda: sys.stderr.write(line))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
