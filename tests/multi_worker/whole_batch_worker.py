"""One worker gathers and trains: `python whole_batch_worker.py FOLDER LOGICAL_CPUS [stock]`.

With `stock`, TensorFlow's sums have the keys that it gives them.
Leaves `worker_INDEX.npz` in the folder. On one device `results` is what they must be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.distribute import cross_device_utils

import tfmulti


class Largest(keras.metrics.Metric):
    """Begins with minus infinity, which no sum over replicas keeps right."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), keras.initializers.Constant(-np.inf))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(y_true - y_pred)))

    def result(self):
        return self.largest

    def reset_state(self):
        self.largest.assign(-np.inf)


class Pairs(keras.Model):
    """In-batch negatives; notes the rows of each step in their order."""

    def __init__(self):
        super().__init__()
        self.left, self.right = layers.Dense(3), layers.Dense(3)
        self.seen = self.add_weight(shape=(99,), trainable=False, initializer="zeros", name="seen")

    def call(self, x):
        return self.left(x), self.right(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        (left, right), numbers = tfmulti.gather_batch((y_pred, y))
        num_rows = tf.shape(numbers)[0]
        self.seen.assign(tf.concat([numbers, self.seen[: 99 - num_rows]], axis=0))
        logits = tf.matmul(left, right, transpose_b=True)
        labels = tf.range(num_rows)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def gather_types(strategy) -> dict[str, np.ndarray]:
    """Gathers two rows of each type, one of them from each of two replicas; eagerly, and traced."""
    dtypes = ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float64", "complex64"]

    def gather():
        context = tf.distribute.get_replica_context()
        part = 2 // context.num_replicas_in_sync
        begin = part * context.replica_id_in_sync_group
        own = tf.constant([[0.0, 1.0], [2.0, 3.0]])[begin : begin + part]
        return tfmulti.gather_batch([tf.cast(own, dtype) for dtype in dtypes])

    found = {}
    for name, run in (("eager", strategy.run), ("traced", tf.function(strategy.run))):
        for dtype, value in zip(dtypes, run(gather)):
            found[f"types/{name}/{dtype}"] = tf.cast(value, tf.complex64).numpy()
            found[f"types/{name}/{dtype}/kept"] = np.array(value.dtype == dtype)
    return found


def rows(num_rows):
    random = np.random.RandomState(0)
    return random.randn(num_rows, 4).astype("float32")


def fit(strategy, create, data) -> dict[str, np.ndarray]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = create(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    feed = tfmulti.distribute_train(data, strategy, 16, seed=3)
    history = model.fit(feed, epochs=2, verbose=0).history
    found = {f"weight/{i}": np.asarray(weight) for i, weight in enumerate(model.get_weights())}
    return found | {f"history/{name}": np.array(values) for name, values in history.items()}


def create_pairs(optimizer):
    model = Pairs()
    model.compile(optimizer)
    return model


def create_dice(optimizer):
    model = keras.Sequential([layers.Dense(3, "sigmoid")])
    loss = tfmulti.WholeBatchLoss(keras.losses.Dice())
    model.compile(optimizer, loss, metrics=[tfmulti.WholeBatchMetric(Largest())])
    return model


def results(strategy) -> dict[str, np.ndarray]:
    """Trains with uneven last batches and with empty replica batches."""
    found = gather_types(strategy) if strategy.num_replicas_in_sync < 3 else {}
    for num_rows in (43, 33):
        x = rows(num_rows)
        numbers = np.arange(1, num_rows + 1, dtype="float32")
        for name, create, y in (
            ("pairs", create_pairs, numbers),
            ("dice", create_dice, x[:, :3]),
        ):
            made = fit(strategy, create, (x, y))
            found |= {f"{name}/{num_rows}/{key}": value for key, value in made.items()}
    return found


def main(folder, logical_cpus, keys="ours"):
    strategy = tfmulti.create_strategy("multi_worker", logical_cpus=int(logical_cpus))
    if keys == "stock":
        launcher = cross_device_utils.CollectiveReplicaLauncher
        launcher.all_reduce = launcher.all_reduce.__wrapped__
    arrays = {"num_replicas": np.array(strategy.num_replicas_in_sync)}
    arrays |= {"why": np.array(strategy.why)} | results(strategy)
    index = strategy.cluster_resolver.task_id
    np.savez(Path(folder) / f"worker_{index}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
