"""Logical CPUs for the smoke tests, and the float32 policy after each."""

import os
import re
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

LAUNCH = [sys.executable, "-m", "tfmulti.launch", "--allocator=default"]
# What is freed is given back at once, and TensorFlow keeps no copies of weights.
LITTLE_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000", "TF_ENABLE_ONEDNN_OPTS": "0"}


def pytest_configure(config):
    # Before any test module is imported: TensorFlow takes it before its first use only.
    [cpu] = tf.config.list_physical_devices("CPU")
    if not tf.config.get_logical_device_configuration(cpu):
        four = [tf.config.LogicalDeviceConfiguration()] * 4
        tf.config.set_logical_device_configuration(cpu, four)


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.clear_session(free_memory=False)
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def ends_alike():
    """Trains on one device and on two logical CPUs; both must end alike, to 1e-6."""

    def check(train, settings, **flags):
        one, weights = train(settings(strategy="one_device", **flags))
        two, others = train(settings(strategy="mirrored", logical_cpus=2, **flags))
        assert len(weights) == len(others) > 0
        for expected, found in zip(weights, others):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        for metrics in (one, two):
            metrics.pop("examples_per_second", None)
        assert two == pytest.approx(one, abs=1e-6)
        return one

    return check


@pytest.fixture
def run_within_memory():
    """Runs an experiment whose last line tells numbers, where memory is short.

    Returns the ended process, and of each worker that told numbers what they are.
    """

    def run(name, *flags, workers=()):
        program = [sys.executable, "-m", f"experiments.{name}.experiment", "--epochs=1", *flags]
        done = subprocess.run(
            [*([*LAUNCH, *workers, "--"] if workers else ()), *program],
            env={**os.environ, **LITTLE_MEMORY},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if "taken_mb" in line]
        numbers = [re.findall(r"(\w+): ([\d.e+]+)", line) for line in lines]
        return done, [{name: float(value) for name, value in each} for each in numbers]

    return run
