"""What workers are asked for with unlike numbers of rows, or in unusual ways.

Each case is a function of a strategy and this worker's number; on one device it is given the
rows of all workers.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmulti

NUM_ROWS = 11


def create_model(strategy, **compile_options):
    """A model whose rows can be told apart by what it predicts."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", metrics=["mae"], **compile_options)
    return model


def rows(num_rows=NUM_ROWS):
    x = np.random.default_rng(num_rows).normal(size=(num_rows, 3)).astype("float32")
    return x, x[:, :2] * 2


def predict(strategy, worker):
    """The last batch of three has three rows: two and one."""
    x, _ = rows()
    return {"predictions": create_model(strategy).predict(x, batch_size=4, verbose=0)}


def predict_distributed(strategy, worker):
    """The same from `distribute_eval`."""
    data = tfmulti.distribute_eval(rows(), strategy, 4)
    return {"predictions": create_model(strategy).predict(data, verbose=0)}


def predict_several_steps(strategy, worker):
    """The same with two steps a call, and then other numbers of rows."""
    model = create_model(strategy, steps_per_execution=2)
    sizes = (NUM_ROWS, 13, 5)
    return {str(n): model.predict(rows(n)[0], batch_size=4, verbose=0) for n in sizes}


def evaluate_several_steps(strategy, worker):
    """`evaluate` and `fit` with two steps a call, on data of different lengths."""
    model = create_model(strategy, steps_per_execution=2)
    sizes = (NUM_ROWS, 13, 5)
    for n in sizes:
        model.fit(*rows(n), batch_size=4, epochs=1, shuffle=False, verbose=0)
    results = {str(n): model.evaluate(*rows(n), batch_size=4, verbose=0) for n in sizes}
    return results | {"weights": model.weights[0].numpy()}


def on_batches(strategy, worker):
    """Each worker has its own rows of a batch; the numbers change on one worker first."""
    model = create_model(strategy)
    several = strategy.num_replicas_in_sync > 1
    results = {}
    for step, (first, second) in enumerate([(2, 2), (2, 2), (2, 1), (1, 3), (4, 1)]):
        x, y = rows(first + second)
        if several:
            own = slice(0, first) if worker == 0 else slice(first, None)
            x, y = x[own], y[own]
        results[f"train/{step}"] = model.train_on_batch(x, y)[0]
        results[f"test/{step}"] = model.test_on_batch(x, y)[0]
    return results | {"weights": model.weights[0].numpy()}


def same_on_batches(strategy, worker):
    """All workers give the same rows to a model, which is told once; of other rows nothing is."""
    several, told = strategy.num_replicas_in_sync > 1, []
    for own in (False, True):
        model, (x, y) = create_model(strategy), rows(4)
        part = slice(worker, None, 2) if own and several else slice(None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model.train_on_batch(x[part], y[part])
                model.test_on_batch(x[part], y[part])
        told.append(sum("each worker's own part" in str(w.message) for w in caught))
    return {"told": told == [int(several), 0]}


def predict_on_batches(strategy, worker):
    """Each worker has rows of its own, and asks as often as it likes; the numbers change."""
    results = {}
    for eager in (False, True):
        model = create_model(strategy, run_eagerly=eager)
        for number in (13, 1, 2, 13):
            results[f"{eager}/{number}"] = model.predict_on_batch(rows(number)[0])
        if worker == 1:
            model.predict_on_batch(rows(3)[0])
    # The workers are together still.
    return results | {"all": model.predict(rows()[0], batch_size=4, verbose=0)}


class LastLoss(keras.metrics.Metric):
    """A metric whose `result` returns its variable, as in Keras's own example."""

    def __init__(self, name="last", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))

    def result(self):
        return self.total


def metric_variable(strategy, worker):
    """What `fit` and `evaluate` show of a metric that returns its variable."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", metrics=[LastLoss()])
    logs = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs, seen=logs: seen.append(float(logs["last"]))
    )
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": [note]}
    history = model.fit(*rows(), epochs=2, **options)
    result = model.evaluate(*rows(), batch_size=4, verbose=0)
    return {"logs": logs, "history": history.history["last"], "evaluate": result}


class CustomLogs(keras.Model):
    """Returns what it has computed by itself, and never updates the metric of that name."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [*super().metrics, self.mae]

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = (self(x) - y) ** 2
            loss = tf.reduce_mean(errors)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self.mae.update_state(y, self(x))
        logs = {"loss": loss, "mae": self.mae.result()}
        return logs | {"by_output": tf.reduce_mean(errors, axis=0)}


def own_logs(strategy, worker):
    """Every batch's logs of a step of one's own: a number, a metric's result, a vector."""
    with strategy.scope():
        model = CustomLogs()
        model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": [note]}
    history = model.fit(*rows(), epochs=2, **options).history
    results = {f"batch/{name}": [logs[name] for logs in seen] for name in seen[0]}
    return results | {f"history/{name}": values for name, values in history.items()}


def two_dtypes(strategy, worker):
    """Gradients of two dtypes in one step."""
    with strategy.scope():
        hidden = keras.layers.Dense(3, activation="tanh", dtype="float64")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), hidden])
        model.compile("sgd", "mse")
    x, _ = rows()
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    return {str(place): weight for place, weight in enumerate(model.get_weights())}


def each_dtype(strategy, worker):
    """Variables of each dtype have the chief's values; a model of bfloat16 trains."""
    names = "bool float16 bfloat16 int8 uint8 int16 uint16 int32 uint32 int64 uint64 complex64"
    results = {}
    with strategy.scope():
        for name in (*names.split(), "complex128", "float8_e5m2"):
            initial = tf.cast(tf.constant([0.0, 1.0, 2.0]) + worker, tf.as_dtype(name))
            wide = "complex128" if "complex" in name else "float64"
            for how, dtype in (("given", initial.dtype), ("of the value", None)):
                read = tf.convert_to_tensor(tf.Variable(initial, dtype=dtype))
                assert read.dtype == initial.dtype
                results[f"{name}, dtype {how}"] = tf.cast(read, wide)
        layers = [keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    x, y = rows()
    losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"]
    return results | {"learned": losses[1] < losses[0]}


def many_collectives(strategy, worker):
    """More traced collectives than TensorFlow's own keys of 32 bits had room for, beside rows."""

    @tf.function(autograph=False)
    def add(value, times):
        def replica_add(x):
            for _ in range(times):
                x = tf.distribute.get_replica_context().all_reduce("MEAN", x + 1.0)
            return x

        return strategy.experimental_local_results(strategy.run(replica_add, (value,)))[0]

    results = {}
    for traced, rank in enumerate(range(1, 5)):
        value = tf.ones([2] * rank)
        results[str(traced)] = add(value, 300)
    return results


def files(strategy, worker):
    """Rows of files, of several and of one, which TensorFlow would share by file."""
    results, folder = {}, Path(tempfile.mkdtemp())
    for count in (3, 1):
        names = [str(folder / f"{count}_{number}") for number in range(count)]
        for name, some in zip(names, np.array_split(rows()[0], count)):
            with tf.io.TFRecordWriter(name) as writer:
                for row in some:
                    writer.write(row.tobytes())
        read = tf.data.TFRecordDataset(names).map(lambda text: tf.io.decode_raw(text, "float32"))
        inputs = read.map(lambda row: tf.ensure_shape(row, [3])).batch(4)
        data = inputs.map(lambda x: (x, 2 * x[:, :2]))
        model = create_model(strategy)
        results[f"{count}/loss"] = model.fit(data, epochs=2, verbose=0).history["loss"]
        results[f"{count}/weights"] = model.weights[0].numpy()
        results[f"{count}/evaluated"] = model.evaluate(data, verbose=0)
        results[f"{count}/predicted"] = model.predict(inputs, verbose=0)
    return results


class Predicting(keras.Model):
    """Predicts what a function of the inputs returns."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def predicted_texts(strategy, worker):
    """Predictions that are texts, of different lengths on each worker."""
    words = np.array(["a", "", "be", "ab\0c", "b" * 300, "a", "c"])
    data = tf.data.Dataset.from_tensor_slices(words).batch(4)
    results = {}
    for rank, function in enumerate((tf.identity, lambda x: tf.stack([x, x + "!"], axis=1)), 1):
        with strategy.scope():
            model = Predicting(function)
            model.compile()
        results[str(rank)] = model.predict(data, verbose=0).astype("S301").view("uint8")
    return results


def parts_that_are_none(strategy, worker):
    """A generator of batches without sample weights, as Keras takes it."""
    x, y = rows()
    model = create_model(strategy)
    batches = lambda: ((x[i : i + 4], y[i : i + 4], None) for i in (0, 4, 8))
    model.fit(batches(), verbose=0)
    result = model.evaluate(batches(), verbose=0)
    predictions = model.predict(batches(), verbose=0)
    return {"weights": model.weights[0].numpy(), "result": result, "predictions": predictions}


CASES = {
    function.__name__: function
    for function in (
        predict,
        predict_distributed,
        predict_several_steps,
        evaluate_several_steps,
        on_batches,
        same_on_batches,
        predict_on_batches,
        metric_variable,
        own_logs,
        two_dtypes,
        each_dtype,
        many_collectives,
        files,
        predicted_texts,
        parts_that_are_none,
    )
}


def run_case(name: str, strategy, worker: int) -> dict[str, np.ndarray]:
    """Returns what a case gives, as arrays by name."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    return {key: np.asarray(value) for key, value in CASES[name](strategy, worker).items()}
