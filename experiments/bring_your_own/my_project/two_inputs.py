"""A subclassed model with named inputs and its own `train_step`."""

import keras
import numpy as np
import tensorflow as tf


def load():
    """Returns (train, test): x is a dict of an image and a table row, y is 0 or 1."""
    rng = np.random.RandomState(1)
    images = rng.randn(900, 8, 8, 1).astype("float32")
    table = rng.randn(900, 4).astype("float32")
    labels = (images.mean((1, 2, 3)) * 8 + table.sum(1) > 0)[:, None].astype("float32")
    x = {"image": images, "table": table}

    def part(rows):
        return {name: array[rows] for name, array in x.items()}, labels[rows]

    return part(slice(0, 800)), part(slice(800, None))


class TwoInputs(keras.Model):
    """A branch for each input."""

    def __init__(self):
        super().__init__()
        self.image_branch = keras.Sequential(
            [keras.layers.Conv2D(8, 3, activation="tanh"), keras.layers.Flatten()]
        )
        self.table_branch = keras.layers.Dense(16, activation="tanh")
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        """Takes a dict of shapes (batch, 8, 8, 1) and (batch, 4); gives logits (batch, 1)."""
        branches = [self.image_branch(inputs["image"]), self.table_branch(inputs["table"])]
        return self.head(keras.ops.concatenate(branches, axis=-1))

    def train_step(self, data):
        """One step; `scale_loss` is where the loss is weighed by this replica's examples."""
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        """Updates the metrics."""
        x, y = data
        logits = self(x, training=False)
        for metric in self.metrics:
            metric.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    @property
    def metrics(self):
        """The loss and the accuracy, both means over examples."""
        return [self.loss_mean, self.accuracy]


def create(train):
    """Returns a compiled model."""
    model = TwoInputs()
    model.loss_mean = keras.metrics.BinaryCrossentropy(from_logits=True, name="loss")
    model.accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)
    model.compile(keras.optimizers.AdamW(3e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    return model
