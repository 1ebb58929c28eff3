"""What one writes with TensorFlow alone: a loop over a MultiWorkerMirroredStrategy's steps.

Keras 3's own `fit` ends with an error under this strategy, fault or not.
"""

import json
import os
import signal
import sys

import numpy as np
import tensorflow as tf

EPOCHS, STEPS = 3000, 10


def worker():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def main(fault):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    width = 6 + (worker() if fault == "models" else 0)
    with strategy.scope():
        kernel = tf.Variable(tf.ones([8, width]))

    @tf.function
    def step(x):
        def train(x):
            gradient = tf.reduce_mean(x) * tf.ones_like(kernel)
            total = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
            kernel.assign_sub(0.01 * total)

        strategy.run(train, args=(x,))

    epochs = 20 if fault == "data" else EPOCHS
    for epoch in range(epochs):
        print(f"Epoch {epoch}/{epochs}", flush=True)
        for number in range(STEPS):
            if fault == "exception" and worker() == 1 and epoch == 3 and number == 5:
                raise ValueError("bad record 300")
            bad = fault == "data" and worker() == 1 and epoch == 3
            step(tf.constant(np.nan if bad else 1.0))
    print("the weights are finite:", bool(np.isfinite(kernel.numpy()).all()), flush=True)


if __name__ == "__main__":
    # As a shell starts it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(sys.argv[1] if len(sys.argv) > 1 else "")
