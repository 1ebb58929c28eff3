"""A worker that does something other than the first one: `python unlike_worker.py CASE`."""

import json
import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfmulti
from tfmulti.mpi import calls
from tfmulti.strategies import program_order

# Also imported where doctests are collected, outside of a job.
CASE = sys.argv[-1].removesuffix(", sharded")
IS_SHARDED = sys.argv[-1].endswith(", sharded")
IS_CHIEF = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0) == 0
STATES = ("statistics", "frozen weights", "rows of a table", "same state")
DATA = np.random.RandomState(2).randn(8, 4).astype("float32")


def here(case):
    return case == CASE and not IS_CHIEF


def alone(when):
    """Whether this worker alone makes a call at a time of the training."""
    return CASE == f"{'chief' if IS_CHIEF else 'other'} {when}"


class Change(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if alone("after an epoch"):
            self.model.evaluate(DATA, DATA[:, :1], verbose=0)
        if alone("reads a metric after an epoch"):
            print(float(self.model.metrics[0].result()))
        if CASE == "rate" and IS_CHIEF:
            self.model.optimizer.learning_rate.assign(0.5)
        if here("weights"):
            self.model.layers[-1].bias.assign([1.0])

    def on_train_end(self, logs=None):
        if alone("at the end"):
            self.model.evaluate(DATA, DATA[:, :1], verbose=0)

    def on_train_batch_end(self, batch, logs=None):
        if alone("amid an epoch"):
            self.model.predict(DATA, verbose=0)
        if alone("reads a metric amid an epoch"):
            self.model.get_metrics_result()
        stops_here = (
            here("stop")
            or here("stop and save")
            or CASE == "stop together"
            or here("stop at the end")
        )
        if stops_here and batch == (1 if CASE == "stop at the end" else 0):
            self.model.stop_training = True


def batches_of(x):
    """Batches of unknown number, one fewer on the other worker."""

    def generate():
        for _ in range(2 - here(CASE)):
            yield x, x[:, :1]

    specs = tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(generate, output_signature=specs)


def plain(x):
    """Batches of a dataset, of which each worker takes its rows."""
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    if "without a seed" in CASE:
        data = data.shuffle(32)
    if "seeds" in CASE:
        data = data.shuffle(32, seed=1 if IS_CHIEF else 2)
    if "shards" in CASE:
        data = data.shard(2, 0 if IS_CHIEF else 1)
    return data.batch(16)


class Batches(keras.utils.PyDataset):
    """Batches that `fit` shuffles, or that have rows in another order on the other worker."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        shuffles = "own order" in CASE or (index == 2 and "later order" in CASE)
        order = np.random.default_rng(IS_CHIEF if shuffles else 0).permutation(8)
        noise = 0.1 * (not IS_CHIEF and "own inputs" in CASE)
        return DATA[order] + index + noise, DATA[order, :1]


def batches_in_an_order(model, x):
    """Returns what `fit` is given; another call may be given it before."""
    if CASE.startswith("python"):
        if "alike" in CASE:
            keras.utils.set_random_seed(1)
        return {"x": Batches(), "shuffle": "unshuffled" not in CASE}
    if CASE.endswith("words"):
        return {"x": tf.constant([["a"], ["b"]] * 8), "y": x[:16, :1]}
    data = plain(x)
    if "evaluated" in CASE:
        model.evaluate(data, verbose=0)
    if "predicted" in CASE:
        model.predict(data, verbose=0)
    return {"x": data}


class OneByOne(keras.Model):
    """Takes the gradients of its weights one by one, on one worker in another order."""

    def train_step(self, data):
        x, y = data
        gradients = {}
        for place in (0, 1) if IS_CHIEF else (1, 0):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x))
            gradients[place] = tape.gradient(loss, self.trainable_variables[place])
        self.optimizer.apply([gradients[0], gradients[1]], self.trainable_variables[:2])
        return {"loss": loss}


def build():
    if CASE.endswith("words"):
        return of_words()
    if CASE in STATES:
        return with_state()
    if CASE == "gradients":
        given = keras.Input((4,))
        return OneByOne(given, keras.layers.Dense(1)(keras.layers.Dense(2048)(given)))
    if CASE.endswith(("by shards", "keeps the best")):
        hidden = keras.layers.Dense(2048)
        return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    activations = ["relu", "tanh"] if here("order") else ["tanh", "relu"]
    given = keras.Input((4,))
    branches = [keras.layers.Dense(3, each)(given) for each in activations]
    hidden = keras.layers.LeakyReLU(0.1 if here("slope") else 0.2)(keras.layers.Add()(branches))
    hidden = keras.layers.Dropout(0.1)(hidden)
    return keras.Model(given, keras.layers.Dense(1)(hidden))


def with_state():
    """Its statistics and its frozen weights are what each worker has made of them."""
    scale, frozen = keras.layers.Normalization(), keras.layers.Dense(4, trainable=False)
    scale.adapt(np.arange(32.0).reshape(8, 4) * (2 if here("statistics") else 1))
    table = keras.layers.Dense(3000)
    model = keras.Sequential([keras.Input((4,)), scale, frozen, table, keras.layers.Dense(1)])
    if here("frozen weights"):
        frozen.set_weights([2 * each for each in frozen.get_weights()])
    if here("rows of a table"):
        kernel, bias = table.get_weights()
        table.set_weights([np.concatenate([kernel[:-1], -kernel[-1:]]), bias])
    return model


def of_words():
    """Its words are given in the order of a set, say."""
    lookup = keras.layers.StringLookup()
    lookup.set_vocabulary(["a", "b"] if here("words") else ["b", "a"])
    embed = keras.layers.Embedding(3, 1)
    return keras.Sequential([keras.Input((1,), dtype="string"), lookup, embed])


def predict_by_shards(model, given):
    """Predicts a batch on one worker, once `fit` has sharded the weights."""
    if CASE.endswith("by shards"):
        model.fit(**given, verbose=0)
    if alone("by shards"):
        model.predict_on_batch(DATA)


def savers(data):
    saves = CASE == "stop and save" or alone("saves")
    if alone("keeps the best"):
        return [keras.callbacks.EarlyStopping("loss", restore_best_weights=True)]
    return [tfmulti.callbacks.Checkpoint(tempfile.mkdtemp(), data)] if saves else []


def main():
    program_order.WAIT_WARNING_S, program_order.WAIT_TIMEOUT_S = 1.0, 3.0
    calls.COMPARE_S = 1.0
    strategy = tfmulti.create_strategy("multi_worker")
    # Keras counts the layers of a process, and draws seeds: neither is a difference.
    if not IS_CHIEF:
        keras.layers.Dense(1)
    rate = keras.optimizers.schedules.CosineDecay(0.1, 9) if CASE == "alike" else 0.01
    with strategy.scope():
        model = build()
        shard = "parameters" if CASE.endswith(("by shards", "keeps the best")) else None
        shard = "parameters" if IS_SHARDED else shard
        shard = "state" if CASE == "gradients" else shard
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(rate), shard=shard)
        model.compile(optimizer, "mae" if here("loss") else "mse")
    x = np.random.RandomState(1 if here("rows") or here("own rows") else 0).randn(32, 4)
    x = x.astype("float32")[: 12 if here("fewer") else 16 if CASE == "fewer" else None]
    given = {"x": x, "y": -x[:, :1] if here("labels") else x[:, :1], "batch_size": 16}
    if CASE == "own stream":
        # As of files that are listed in another order.
        rows = tf.data.Dataset.from_tensor_slices(x[:: -1 if here(CASE) else 1])
        stream = rows.map(lambda row: (row, row[:1]))
        given = {"x": tfmulti.distribute_train(stream, strategy, 16)}
    if CASE == "own rows":
        given = {"x": tfmulti.distribute_train((x, x[:, :1]), strategy, 16)}
    if CASE == "validation" and IS_CHIEF or CASE == "validated labels":
        given["validation_data"] = (x, -x[:, :1] if here("validated labels") else x[:, :1])
    if CASE == "evaluated batches":
        model.evaluate(batches_of(x), verbose=0)
    if CASE == "predicted batches":
        model.predict(batches_of(x), verbose=0)
    if CASE == "batches":
        given = {"x": batches_of(x)}
    if CASE.startswith(("plain", "python")) or CASE.endswith("words"):
        given = batches_in_an_order(model, x)
    predict_by_shards(model, given)
    if CASE.endswith((" save", " saves")):
        given = {"x": tfmulti.distribute_train((x, x[:, :1]), strategy, 16)}
    callbacks = [Change(), *savers(given["x"])]
    epochs = 3 if here("epochs") else 2
    model.fit(**given, epochs=epochs, verbose=int(IS_CHIEF), callbacks=callbacks)
    print(f"trained {int(model.optimizer.iterations)} steps", flush=True)


if __name__ == "__main__":
    main()
