"""A small convnet on small grey images, as the first Keras example of most users has it."""

import keras
import numpy as np
from keras import layers

import tfmulti

NUM_CLASSES = 4
INPUT_SHAPE = (12, 12, 1)
BATCH_SIZE = 16
EPOCHS = 2


def load_data():
    """Images with one bright quarter, which is the class."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, NUM_CLASSES, 80)
    x = generator.integers(0, 120, (80, 12, 12)).astype("uint8")
    for image, label in zip(x, y):
        image[6 * (label // 2) :, 6 * (label % 2) :][:6, :6] += 120
    return (x[:60], y[:60]), (x[60:], y[60:])


def main(strategy):
    (x_train, y_train), (x_test, y_test) = load_data()
    x_train = np.expand_dims(x_train.astype("float32") / 255, -1)
    x_test = np.expand_dims(x_test.astype("float32") / 255, -1)
    y_train = keras.utils.to_categorical(y_train, NUM_CLASSES)
    y_test = keras.utils.to_categorical(y_test, NUM_CLASSES)

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(shape=INPUT_SHAPE),
                layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
                layers.MaxPooling2D(pool_size=(2, 2)),
                layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
                layers.Flatten(),
                layers.Dropout(0.5),
                layers.Dense(NUM_CLASSES, activation="softmax"),
            ]
        )
        model.compile(
            loss="categorical_crossentropy",
            optimizer=tfmulti.DistributedOptimizer(keras.optimizers.Adam(1e-3)),
            metrics=["accuracy"],
        )

    history = model.fit(
        x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, validation_split=0.1, verbose=0
    )
    history.history["test"] = model.evaluate(x_test, y_test, verbose=0)
    return model, history.history
