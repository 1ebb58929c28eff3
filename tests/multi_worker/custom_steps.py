"""Models with a custom `train_step`, which several programs of workers train."""

import keras
import tensorflow as tf


class CustomStep(keras.Model):
    """Clips by hand, by the norm of gradients that are on several workers."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Penalized(keras.Model):
    """A penalty on gradients, which needs a second derivative."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            steep = tf.reduce_mean(tf.square(inner.gradient(outputs, x)))
            loss = self.compute_loss(x, y, outputs) + steep
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}
