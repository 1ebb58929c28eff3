"""A recurrent cell that several tests train."""

import keras
from keras import layers


class DroppingCell(layers.Layer):
    """Draws, and so assigns a seed, in each step of the loop of `RNN`."""

    def __init__(self, units):
        super().__init__()
        self.state_size = self.output_size = units
        self.dense, self.dropout = layers.Dense(units, "tanh"), layers.Dropout(0.3)

    def build(self, shape):
        self.dense.build((None, shape[-1] + self.output_size))
        super().build(shape)

    def call(self, x, states, training=False):
        found = self.dense(keras.ops.concatenate([x, states[0]], -1))
        found = self.dropout(found, training=training)
        return found, [found]
