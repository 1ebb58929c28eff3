"""Trains on a worker what cannot be split: every replica computes the whole batch.

`python replicated_worker.py FOLDER CASE,...`, or a part of `in_one_job.py`.
"""

import os
import sys
import warnings

import cases as programs
import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import verification_cases as models


class Deciding(models.CustomStep):
    """Decides by the mean loss, draws random numbers of TensorFlow, and logs what is no mean."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x + tf.random.normal(tf.shape(x), stddev=self.noise), training=True)
            losses = tf.reduce_mean(tf.square(outputs - y), axis=-1)
            loss = tf.where(tf.reduce_mean(losses) > 0.3, tf.reduce_sum(losses), losses[0])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "largest": tf.reduce_max(losses)}

    def test_step(self, data):
        return {"spread": tf.math.reduce_std(self(data[0]))}

    noise = 0.0


class Phased(Deciding):
    """Can be split until a callback changes an attribute."""

    phase = 1

    def train_step(self, data):
        if self.phase == 2:
            return super().train_step(data)
        return keras.Model.train_step(self, data)

    def test_step(self, data):
        return keras.Model.test_step(self, data)


class NextPhase(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.phase = 2
            self.model.make_train_function(force=True)


class Noisy(Deciding):
    noise = 0.1


CASES = {
    "decides": Deciding,
    "random": Noisy,
    "changed": Phased,
    "centred": lambda: models.dense(models.Centre()),
}


def run_case(strategy, folder, name) -> dict:
    """Returns what training gives, with the copies of each weight on this worker."""
    before, strategy.on_difference = strategy.on_difference, "replicate"
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = CASES[name]()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = models.rows()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        settings["callbacks"] = [NextPhase()] if name == "changed" else []
        history = model.fit(x, y, validation_data=(x[:9], y[:9]), **settings).history
        predictions = model.predict(x[:21], batch_size=8, verbose=0)
    strategy.on_difference = before
    weights = [
        [np.float64(copy).ravel().tolist() for copy in strategy.experimental_local_results(v.value)]
        for v in [*model.trainable_variables, *model.optimizer.variables]
    ]
    return {
        "told": sum("Every replica computes" in str(each.message) for each in caught),
        "weights": weights,
        "history": {key: np.float64(values).tolist() for key, values in history.items()},
        "predictions": np.float64(predictions).tolist(),
    }


if __name__ == "__main__":
    programs.main(run_case)
