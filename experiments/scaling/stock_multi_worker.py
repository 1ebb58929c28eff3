"""Stock Keras under stock MultiWorkerMirroredStrategy; the cluster is in TF_CONFIG."""

import argparse
import json
import os

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workload", choices=["compute", "communication"], default="compute")
parser.add_argument("--batch_size", type=int, default=100, help="examples of each worker")
parser.add_argument("--cores", type=int, default=1, help="cores of each worker")
parser.add_argument("--nopin", action="store_true", help="leave the process on all cores")
flags = parser.parse_args()

index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if not flags.nopin:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[index * flags.cores : (index + 1) * flags.cores])

import tensorflow as tf  # noqa: E402 - it counts the cores that it may use when it is imported
from keras_workloads import trainer  # noqa: E402

from tfmulti.bench import control  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(flags.cores)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
num_workers = strategy.num_replicas_in_sync

train = trainer(strategy, flags.workload, flags.batch_size * num_workers)
control.serve("stock_multi_worker", index, train)
