"""One worker of a job over MPI that comes to harm: `python mpi_worker.py raise|kill`."""

import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tfmulti


class Harm(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and strategy.cluster_resolver.task_id == 1:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("its own mistake")


strategy = tfmulti.create_strategy("multi_worker")
print(strategy.why, flush=True)
data = (np.ones((64, 3), "float32"), np.ones((64, 1), "float32"))
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(tfmulti.distribute_train(data, strategy, 8), verbose=0, callbacks=[Harm()])
