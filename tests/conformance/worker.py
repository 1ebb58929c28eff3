"""One process of a place: tries one guarantee and leaves what came out in a file.

Processes are forked from one that has imported this module. Nothing here, nor in the guarantees,
may use TensorFlow while it is imported: its threads do not survive a fork.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: F401 - the server of processes has it ready for all
import numpy as np
import tensorflow as tf

from conformance import guarantees, training
from conformance.guarantee import Origin


def main(column, names: list[str], index: int, environ, folder: str, orders: int) -> None:
    """Tries guarantees as worker `index` of a column.

    Leaves `NUMBER_INDEX.npz` in the folder for each, or `NUMBER_INDEX.txt` with the error. An
    error on one of several workers ends this process, because the others may wait for it.
    """
    warnings.simplefilter("ignore")
    silence(Path(folder) / f"{index}.log")
    # A process that is ended leaves its files behind.
    tempfile.tempdir = folder
    os.environ.update(environ)
    strategy = None
    for number, name in enumerate(names):
        path = Path(folder) / f"{number}_{index}"
        try:
            strategy = strategy or create_strategy(column)
            arrays = attempt(guarantees.find(name), column, strategy, index, orders)
            np.savez(path.with_suffix(".part.npz"), **arrays)
            os.replace(path.with_suffix(".part.npz"), path.with_suffix(".npz"))
        except Exception as error:
            path.with_suffix(".txt").write_text(f"{type(error).__name__}: {error}")
            if column.workers > 1:
                raise
            traceback.print_exc()


def attempt(guarantee, column, strategy, index, orders) -> dict:
    """Returns a guarantee's arrays at a place; on plain Keras for each order of the rows."""
    several = column.kind == "plain" and not (column.stock or guarantee.ordered)
    arrays = {}
    for order in range(orders if several else 1):
        found = training.train(guarantee, Origin(strategy, column.stock, index, order))
        arrays |= {f"{order}/{name}": value for name, value in found.items()}
    assert not column.stock or "tfmulti.strategies" not in sys.modules
    return arrays


def silence(path: Path) -> None:
    """Sends what this process writes to a file."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)


def create_strategy(column):
    """Creates the column's strategy, or None for plain Keras."""
    names = [f"CPU:{i}" for i in range(column.devices)]
    if column.kind == "plain":
        return None
    if column.stock:
        if column.kind == "multi_worker":
            return tf.distribute.MultiWorkerMirroredStrategy()
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * column.devices
        tf.config.set_logical_device_configuration(cpu, parts)
        return tf.distribute.MirroredStrategy(names)
    import tfmulti

    if column.kind == "multi_worker":
        return tfmulti.create_strategy(
            "multi_worker",
            logical_cpus=column.devices,
            communication=column.communication,
        )
    # The stages of a pipeline may be on devices that the strategy itself does not use.
    cpus = max(column.devices, 2)
    return tfmulti.create_strategy(column.kind, devices=names, logical_cpus=cpus)
