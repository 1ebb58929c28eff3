"""A DCGAN with its own `train_step` and no `call()`, trained on a plain dataset of batches."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfmulti

LATENT_DIM = 6


def load_dataset():
    """Forty-three images in batches of sixteen: the last one has eleven."""
    images = np.random.default_rng(0).random((43, 8, 8, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices(images).shuffle(43).batch(16)


def create_discriminator():
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ],
        name="discriminator",
    )


def create_generator():
    return keras.Sequential(
        [
            keras.Input(shape=(LATENT_DIM,)),
            layers.Dense(4 * 4 * 4),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, kernel_size=5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        images = ops.concatenate([self.generator(noise), real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        # Noise on the labels: a trick that nearly every GAN has.
        labels += 0.05 * tf.random.uniform(tf.shape(labels))

        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        noise = tf.random.normal(shape=(batch_size, self.latent_dim))
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def main(strategy):
    dataset = load_dataset()
    with strategy.scope():
        gan = GAN(create_discriminator(), create_generator(), LATENT_DIM)
        gan.compile(
            d_optimizer=tfmulti.DistributedOptimizer(keras.optimizers.Adam(1e-4)),
            g_optimizer=tfmulti.DistributedOptimizer(keras.optimizers.Adam(1e-4)),
            loss_fn=keras.losses.BinaryCrossentropy(),
        )
    history = gan.fit(dataset, epochs=2, verbose=0)
    return gan, history.history
