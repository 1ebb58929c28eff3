"""A user's own script, with the fault that is named on the command line."""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfmulti

# Seconds that the chief takes before it builds the model.
WAITS = {"chief is slow": 12, "chief freezes": 600}


def main(fault, folder):
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tfmulti.create_strategy("multi_worker")
    keras.utils.set_random_seed(0)
    if worker == 0 and fault in WAITS:
        print("the chief waits", flush=True)
        time.sleep(WAITS[fault])
    print("builds the model", flush=True)
    rng = np.random.RandomState(0)
    x, y = rng.randn(64, 8).astype("float32"), rng.randint(0, 3, 64)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(6, "relu"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        shard = "state" if "shards" in fault else None
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.Adam(), shard=shard)
        model.compile(optimizer, loss, metrics=["accuracy"])
    data = tfmulti.distribute_train((x, y), strategy, 16, seed=0)

    def fail(epoch, logs):
        if worker == 1 and epoch == 2 and fault == "callback fails":
            raise ValueError("bad callback")
        if worker == 1 and epoch == 2 and fault == "leaves early":
            sys.exit(0)

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=fail)]
    model.fit(data, epochs=6, verbose=0, callbacks=callbacks)
    if fault.startswith("chief saves") and worker == 0:
        model.save(Path(folder) / "model.keras")
        model.save_weights(Path(folder) / "model.weights.h5")
    if fault == "chief evaluates" and worker == 0:
        model.evaluate(x, y, verbose=0)
    model.fit(data, epochs=3, verbose=0)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
