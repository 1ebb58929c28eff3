"""One worker of a job over MPI that comes to harm: `python mpi_worker.py raise|kill|exit INDEX`."""

import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fewer_imports  # noqa: F401
import keras
import numpy as np

import tfmulti


class Harm(keras.callbacks.Callback):
    def __init__(self, how, index):
        super().__init__()
        self.how, self.index = how, index

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and self.model.distribute_strategy.cluster_resolver.task_id == self.index:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                sys.exit(3)
            raise ValueError("its own mistake")


def main(how, index):
    strategy = tfmulti.create_strategy("multi_worker")
    print(strategy.why, flush=True)
    rows = (np.ones((64, 3), "float32"), np.ones((64, 1), "float32"))
    data = tfmulti.distribute_train(rows, strategy, 8)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(data, verbose=0, callbacks=[Harm(how, int(index))])


if __name__ == "__main__":
    main(*sys.argv[1:])
