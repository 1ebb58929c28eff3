"""Strategies on the logical devices that conftest.py makes.

The variable TFMULTI_TESTS_ON chooses them, for tests that create their strategies here: `GPU` for
parts of one GPU, `collectives` for CPUs that reduce as GPUs do; else CPUs.
"""

import os

import pytest

import tfmulti

ON = os.environ.get("TFMULTI_TESTS_ON", "CPU")
assert ON in ("CPU", "GPU", "collectives"), ON
DEVICE = "GPU" if ON == "GPU" else "CPU"
_MEMORY_OF_PART_MIB = 1024


def create_strategy(num_replicas, **settings):
    """A strategy on the first logical devices; one device's where it is one.

    A step that differs in parts is an error: that every replica can compute the whole batch must
    not hide it.
    """
    settings.setdefault("on_difference", "error")
    devices = [f"{DEVICE}:{index}" for index in range(num_replicas)]
    kind = "mirrored" if num_replicas > 1 else "one_device"
    return tfmulti.create_strategy(kind, devices=devices, **settings)


def not_on_gpu(reason):
    """Skips a test there."""
    return pytest.mark.skipif(ON == "GPU", reason=reason)


def split_gpu(count):
    """Makes several logical GPUs of the first one, without TF32, which rounds to 10 bits."""
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    part = tf.config.LogicalDeviceConfiguration(memory_limit=_MEMORY_OF_PART_MIB)
    tf.config.set_visible_devices([gpu], "GPU")
    tf.config.set_logical_device_configuration(gpu, [part] * count)
    tf.config.experimental.enable_tensor_float_32_execution(False)
