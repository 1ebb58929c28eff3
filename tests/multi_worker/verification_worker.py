"""Verifies right and wrong models on a worker: `python verification_worker.py CPUS COMMUNICATION`.

Prints a line of JSON that says what came of each.
"""

import json
import os
import sys
import warnings

import keras
import tensorflow as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import verification_cases as models

import tfmulti


class ClippedTable(keras.Model):
    """Clips the gradients of all weights together, also the sparse ones of a table."""

    def __init__(self):
        super().__init__()
        self.table, self.dense = keras.layers.Embedding(9, 4), keras.layers.Dense(1)

    def call(self, x):
        return self.dense(self.table(tf.cast(tf.abs(x[:, 0]), tf.int32) % 9))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


# What creates a model, its loss and its metrics.
CASES = {
    "right": (models.dense, models.squares, [models.MeanError]),
    "own step": (models.CustomStep, "mse", []),
    "clipped table": (ClippedTable, "mse", []),
    "counted steps": (models.CountingStep, "mse", []),
    "wrong counted steps": (lambda: models.CountingStep(models.root_of_mean), "mse", []),
    "wrong loss": (models.dense, models.root_of_mean, []),
    "wrong state": (lambda: models.dense(models.RunningMean()), "mse", []),
    "wrong metric": (models.dense, "mse", [models.Largest]),
    "whole metric": (models.Matches, None, []),
    "equal parts": (models.TwoParts, None, []),
    "unlike parts": (models.TwoParts, None, []),
    "unlike parts from Python": (models.TwoParts, None, []),
}


def through_python(batch):
    """Has a dataset that cannot be copied, so that each worker sees its own rows alone."""
    structure = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), batch)
    flat = tf.py_function(lambda *parts: parts, tf.nest.flatten(batch), [tf.float32] * 3)
    for part, spec in zip(flat, tf.nest.flatten(structure)):
        part.set_shape([None, *spec.shape[1:]])
    return tf.nest.pack_sequence_as(batch, flat)


# Batches with parts that have different numbers of rows; on 2 or 4 workers' replicas.
PARTS = {
    "equal parts": lambda: models.two_parts(12, 4),
    "unlike parts": lambda: models.two_parts(12, 5),
    "unlike parts from Python": lambda: models.two_parts(12, 5).map(
        lambda *batch: through_python(batch)
    ),
}


def run_case(strategy, folder, name):
    """Returns `trained`, or what a model is refused with."""
    strategy.verify = "auto"
    make, loss, metrics = CASES[name]
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
        # Only then does each step change its count.
        eager = isinstance(model, models.CountingStep)
        metrics = [create() for create in metrics]
        model.compile(optimizer, loss=loss, metrics=metrics, run_eagerly=eager)
    x, y = models.rows()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(not verified|decides by)")
            if name in PARTS:
                model.fit(PARTS[name](), verbose=0)
                return "trained"
            # 28 rows leave none of the replicas without rows.
            rows = slice(28 if name == "whole metric" else None)
            data = tfmulti.distribute_train((x[rows], y[rows]), strategy, 8, seed=0)
            model.fit(data, verbose=0)
            model.predict(x[:24], verbose=0, batch_size=8)
        return "trained"
    except ValueError as error:
        return str(error)


def main(logical_cpus, communication):
    strategy = tfmulti.create_strategy(
        "multi_worker",
        logical_cpus=int(logical_cpus),
        communication=communication,
        on_difference="error",
    )
    # Two replicas in one process would both change the count, which is refused.
    names = [name for name in CASES if logical_cpus == "1" or "counted" not in name]
    print(json.dumps({name: run_case(strategy, None, name) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
