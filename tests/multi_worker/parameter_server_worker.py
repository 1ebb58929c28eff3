"""A job with parameter servers: `python parameter_server_worker.py FOLDER CASE ...`.

The chief leaves `CASE.json` in the folder: what it saw. Each task leaves its process id.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fewer_imports  # noqa: F401
import keras
import numpy as np
import tensorflow as tf

import tfmulti
from tfmulti.sharding import epoch_order

NUM_ROWS, BATCH_SIZE, EPOCHS = 43, 8, 2
# Two parts of 256 KiB and more.
IDS, COLUMNS = 70_000, 2


def rows(count=NUM_ROWS):
    rng = np.random.RandomState(0)
    x = rng.randn(count, 4).astype("float32")
    return x, x @ rng.randn(4, 1).astype("float32"), np.linspace(0.5, 2, count).astype("float32")


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            keras.layers.Dense(1),
        ]
    )
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)
    optimizer = keras.optimizers.Adam(decay, global_clipnorm=0.5, weight_decay=0.01)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def values_of(variables):
    return [np.asarray(variable.numpy()).ravel().tolist() for variable in variables]


def state_of(model):
    optimizer = [v for v in model.optimizer.variables if "learning_rate" not in v.path]
    return {"weights": values_of(model.weights), "optimizer": values_of(optimizer)}


def run(model, data=None, batch_size=BATCH_SIZE, epochs=EPOCHS, **settings):
    data = rows() if data is None else data
    settings = {"verbose": 0, **settings}
    return tfmulti.train_async(model, data, batch_size=batch_size, epochs=epochs, **settings)


class Shifting(keras.callbacks.Callback):
    """Changes a weight, with which the step that begins is to compute."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.layers[-1].bias.assign([0.1 * batch])


def synchronous(strategy, folder):
    """The result of one device, with schedules, clipping, penalties and sample weights.

    Workers keep only the inputs of one layer.
    """
    with strategy.scope():
        model = tfmulti.checkpoint_activations(build(), "dense*")
    # Without sample weights, unlike the data of training.
    validation = rows(21)[:2]
    given = {"validation_data": validation, "callbacks": [Shifting()]}
    history = run(model, max_staleness=0, **given)
    alone = build()
    expected = {}
    for epoch in range(EPOCHS):
        x, y, weights = (part[epoch_order(NUM_ROWS, 0, epoch)] for part in rows())
        fit = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
        logs = alone.fit(x, y, sample_weight=weights, **given, **fit).history
        for name, found in logs.items():
            expected.setdefault(name, []).extend(found)
    return {
        "history": history.history,
        "state": state_of(model),
        "expected": {"history": expected, "state": state_of(alone)},
    }


class Tied(keras.Model):
    """A model whose outputs are the products with a table that is cut over the servers."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(IDS, COLUMNS)
        self.hidden = keras.layers.Dense(COLUMNS)

    def call(self, words):
        hidden = self.hidden(self.table(words))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings))


def tied(strategy, folder):
    """The weights of such a model, and of one that plain Keras has trained."""

    def build_tied():
        keras.utils.set_random_seed(1)
        model = Tied()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Training ends with the averages of the weights in their place.
        optimizer = keras.optimizers.SGD(0.1, clipnorm=0.01, use_ema=True, ema_momentum=0.5)
        model.compile(optimizer, loss)
        model(np.zeros((1,), "int32"))
        return model

    words = np.arange(24, dtype="int32") * 100
    with strategy.scope():
        model = build_tied()
    history = run(model, (words, words + 1), max_staleness=0, epochs=1)
    alone = build_tied()
    order = epoch_order(len(words), 0, 0)
    logs = alone.fit(words[order], words[order] + 1, batch_size=BATCH_SIZE, shuffle=False)
    one = np.concatenate([np.ravel(weight) for weight in values_of(model.weights)])
    other = np.concatenate([np.ravel(weight) for weight in values_of(alone.weights)])
    return {
        "apart": float(np.abs(np.sort(one) - np.sort(other)).max()),
        "losses": [history.history["loss"], logs.history["loss"]],
        "parts": len(model.table.embeddings.parts),
    }


class SumOfPredictions(keras.losses.Loss):
    """The sum of predictions: each example adds one to the gradient of its row."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return y_pred


def build_counting(rate=1.0, kind=keras.optimizers.SGD, **settings):
    """A table whose rows count how often their example was trained on, downwards."""
    ids = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(IDS, COLUMNS, embeddings_initializer="zeros", name="table")
    model = keras.Model(ids, keras.ops.sum(table(ids), -1))
    model.compile(kind(rate, **settings), SumOfPredictions())
    return model


def ids(count=301):
    return np.random.RandomState(0).permutation(IDS)[:count].astype("int32")


def counts_of(model):
    """How often each example was trained on, and whether any other row has changed."""
    table = -model.get_layer("table").embeddings.numpy()[:, 0]
    mine = table[ids()]
    return {"least": float(mine.min()), "most": float(mine.max()), "sum": float(table.sum())}


def counted(strategy, folder):
    with strategy.scope():
        model = build_counting()
    history = run(model, (ids(), np.zeros(301, "float32")))
    layer = model.get_layer("table")
    model.save(folder / "counted.keras")
    loaded = keras.models.load_model(folder / "counted.keras", compile=False)
    same = loaded.get_layer("table").embeddings.numpy() == layer.embeddings.numpy()
    return {
        "counts": counts_of(model),
        "iterations": int(model.optimizer.iterations.numpy()),
        "history": history.history,
        "workers": history.steps_by_worker,
        "parts": [part.shape[0] for part in layer.embeddings.parts],
        "places": [part.value.device for part in layer.embeddings.parts],
        "loads": bool(same.all()),
    }


def slots(strategy, folder):
    """Where Adam's slots are of a table that is cut."""
    with strategy.scope():
        model = build_counting()
        model.compile(keras.optimizers.Adam(0.1), "mse")
    run(model, (ids(40), np.ones(40, "float32")), epochs=1)
    found = {}
    for part in model.get_layer("table").embeddings.parts:
        mine = [v for v in model.optimizer.variables if part.name in v.path]
        assert all(v.shape == part.shape and np.any(v.numpy()) for v in mine)
        found[part.value.device] = [v.value.device for v in mine]
    return found


def bounded(strategy, folder):
    with strategy.scope():
        model = build_counting()
    history = run(model, (ids(), np.zeros(301, "float32")), max_staleness=1)
    return {"history": history.history, "counts": counts_of(model)}


class CustomStep(keras.Model):
    """A step of its own, with batch normalization, dropout and a state that counts rows."""

    def __init__(self):
        super().__init__()
        self.normalize = keras.layers.BatchNormalization(momentum=0.5)
        self.drop, self.dense = keras.layers.Dropout(0.5), keras.layers.Dense(1)
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        return self.dense(self.drop(self.normalize(inputs, training=training), training=training))

    def train_step(self, data):
        x, y = data
        rows = keras.ops.cast(keras.ops.shape(x)[0], "float32")
        self.seen.assign_add(rows)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        drawn = self.drop(keras.ops.ones((64,)), training=True)
        mask = keras.ops.sum(drawn * keras.ops.sqrt(keras.ops.arange(64.0)))
        return {"own": loss, "mask": mask, "drawn": keras.random.normal(())}


def own_step(strategy, folder):
    with strategy.scope():
        model = CustomStep()
        model.compile(keras.optimizers.Adam(0.05), "mse")
    masks = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: masks.append(logs))
    x = rows(101)[0] + 3.0
    history = run(model, (x, x[:, :1]), callbacks=[note])
    return {
        "own": history.history["own"],
        "masks": [logs["mask"] for logs in masks],
        "drawn": [logs["drawn"] for logs in masks],
        "seen": float(model.seen.numpy()),
        "mean": model.normalize.moving_mean.numpy().tolist(),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


class Largest(keras.metrics.Metric):
    """The largest prediction: no sum over batches."""

    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(keras.ops.abs(y_pred))))

    def result(self):
        return self.most.value


def build_of_tokens():
    """Padding counts for nothing; the recurrent layer could draw random numbers, and does not."""
    layers = [keras.layers.Embedding(9, 4), keras.layers.GRU(4, return_sequences=True)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers, keras.layers.Dense(9)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile("sgd", loss)
    return model


def refused(strategy, folder):
    # The first batch has no padding.
    tokens = np.random.RandomState(0).randint(1, 9, (BATCH_SIZE, 6))
    with strategy.scope():
        model = build()
        of_tokens = build_of_tokens()
        summed = build_counting()
        lamb = build_counting(kind=keras.optimizers.Lamb)
        largest, of_squares = build(), build()
        of_squares.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
        largest.compile("sgd", "mse", metrics=[Largest()])
        uncompiled = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])

    def in_scope(call):
        with strategy.scope():
            return call()

    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    calls = {
        "fit": lambda: model.fit(*rows()),
        "evaluate": lambda: model.evaluate(*rows()),
        "predict": lambda: model.predict(rows()[0]),
        "callback": lambda: run(model, callbacks=[backup]),
        "staleness": lambda: run(model, max_staleness=-1),
        "batch_size": lambda: tfmulti.train_async(model, rows()),
        "split": lambda: run(summed, (ids(), np.zeros(301, "float32")), max_staleness=0),
        "optimizer": lambda: run(lamb, (ids(), np.zeros(301, "float32"))),
        "padding": lambda: run(of_tokens, (tokens, tokens), max_staleness=0),
        "metric": lambda: run(largest),
        "sum": lambda: run(of_squares),
        "validation": lambda: run(model, validation_data=rows()[0]),
        "strategy": lambda: run(build()),
        "train_on_batch": lambda: model.train_on_batch(*rows()),
        "test_on_batch": lambda: model.test_on_batch(*rows()),
        "scope": lambda: in_scope(lambda: run(model)),
        "shard": lambda: in_scope(lambda: tfmulti.DistributedOptimizer("adam", shard="state")),
        "pipeline": lambda: tfmulti.pipeline(uncompiled, stages=2),
        "tensor": lambda: tfmulti.tensor_parallel(uncompiled, {"kernel": "column"}),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
            errors[name] = None
        except ValueError as error:
            errors[name] = str(error)
    return errors


class Marks(keras.callbacks.Callback):
    """Makes a file after some steps, and stops once a file is there."""

    def __init__(self, folder, steps=20):
        super().__init__()
        self._folder, self._steps, self._done = folder, steps, 0

    def on_train_batch_end(self, batch, logs=None):
        self._done += 1
        if self._done == self._steps:
            (self._folder / "under_way").touch()

    def on_epoch_end(self, epoch, logs=None):
        if (self._folder / "enough").exists():
            self.model.stop_training = True


def killed_worker(strategy, folder):
    """Trains until a worker that was killed is back, and counts."""
    with strategy.scope():
        model = build_counting()
    lines = []

    def tell(line):
        lines.append(line)
        if "is back" in line:
            (folder / "enough").touch()

    data = (ids(), np.zeros(301, "float32"))
    history = run(model, data, epochs=500, callbacks=[Marks(folder)], print_fn=tell)
    return {
        "counts": counts_of(model),
        "epochs": len(history.epoch),
        "iterations": int(model.optimizer.iterations.numpy()),
        "workers": history.steps_by_worker,
        "lines": lines,
    }


def resumed(strategy, folder):
    """Trains three epochs with checkpoints within; the first start waits to be killed."""
    with strategy.scope():
        model = build_counting()
    saver = tfmulti.callbacks.Checkpoint(
        folder / "checkpoints", data := distributed(strategy), every_steps=10
    )
    again = (folder / "checkpoints").exists()
    epochs = 3 if again else 500
    # Within the second epoch, whose first step is no multiple of ten.
    history = run(model, data, None, epochs, callbacks=[saver, Marks(folder, 55)])
    return {
        "counts": counts_of(model),
        "iterations": int(model.optimizer.iterations.numpy()),
        "resumed": saver.resumed_step,
        "epochs": history.epoch,
    }


def distributed(strategy):
    return tfmulti.distribute_train((ids(), np.zeros(301, "float32")), strategy, BATCH_SIZE)


CASES = {
    each.__name__: each
    for each in (
        synchronous,
        counted,
        slots,
        bounded,
        own_step,
        tied,
        refused,
        killed_worker,
        resumed,
    )
}


def main(folder, *names):
    folder = Path(folder)
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    (folder / f"{task['type']}_{task['index']}.pid").write_text(str(os.getpid()))
    strategy = tfmulti.create_strategy("parameter_server")
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(CASES[name](strategy, folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
