"""Stock Keras under stock MirroredStrategy, a replica on each of several logical CPUs."""

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workload", choices=["compute", "communication"], default="compute")
parser.add_argument("--batch_size", type=int, default=100, help="examples of each replica")
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--cores", type=int, default=1, help="cores of each replica")
parser.add_argument("--nopin", action="store_true", help="leave the process on all cores")
flags = parser.parse_args()

if not flags.nopin:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: flags.replicas * flags.cores])

import tensorflow as tf  # noqa: E402 - it counts the cores that it may use when it is imported
from keras_workloads import trainer  # noqa: E402

from tfmulti.bench import control  # noqa: E402

[cpu] = tf.config.list_physical_devices("CPU")
logical = [tf.config.LogicalDeviceConfiguration() for _ in range(flags.replicas)]
tf.config.set_logical_device_configuration(cpu, logical)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(flags.replicas)])

train = trainer(strategy, flags.workload, flags.batch_size * flags.replicas)
control.serve("stock_mirrored", 0, train)
