"""The ways into Keras's trainer other than `fit` on dense arrays, under several replicas."""

import itertools
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti import marks, topology
from tfmulti.cluster import environment
from tfmulti.step import rows as replica_rows
from tfmulti.step import wrapped_step
from tfmulti.strategies import fit_callbacks

NUM_ROWS, BATCH_SIZE = 33, 16  # The last batch has one row.


def rows(count=NUM_ROWS):
    rng = np.random.RandomState(0)
    x, y = rng.randn(count, 4).astype("float32"), rng.randn(count, 1).astype("float32")
    return x, y, rng.uniform(0.5, 2, count).astype("float32")


def dense():
    penalty = keras.regularizers.L2(0.01)
    return [keras.layers.Dense(5, "tanh", kernel_regularizer=penalty), keras.layers.Dense(1)]


def build(num_replicas, layers=dense, **compiled):
    keras.utils.set_random_seed(1)
    with create_strategy(num_replicas).scope():
        model = keras.Sequential(layers())
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1, clipnorm=0.5))
        compiled = {k: v() if callable(v) else v for k, v in compiled.items()}
        model.compile(optimizer, "mse", **compiled)
    return model


def weights_of(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def assert_same(one, other):
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("count", [16, 5, 1])
def test_train_on_batch_splits_the_batch(count):
    """A metric that counts rows tells whether each row was seen once."""

    def train(num_replicas):
        model = build(num_replicas, metrics=lambda: [keras.metrics.TruePositives(name="hits")])
        x, y, weights = rows(count)
        y = (y > 0).astype("float32")
        results = {}
        for step in range(3):
            logs = model.train_on_batch(x, y, sample_weight=weights, return_dict=True)
            results |= {f"{step}/{name}": value for name, value in logs.items()}
        logs = model.test_on_batch(x, y, return_dict=True)
        results |= {f"test/{name}": value for name, value in logs.items()}
        return results | {"weights": weights_of(model)}

    one = train(1)
    for num_replicas in (2, 3):
        assert_same(one, train(num_replicas))


def ragged_rows():
    x, y, weights = rows()
    lengths = np.arange(NUM_ROWS) % 4
    flat = np.random.RandomState(2).randn(lengths.sum(), 4).astype("float32")
    return tf.RaggedTensor.from_row_lengths(flat, lengths), y, weights


def sparse_rows():
    x, y, weights = rows()
    return tf.sparse.from_dense(np.where(x > 0.3, x, 0)), y, weights


class RaggedSum(keras.layers.Layer):
    def call(self, x):
        return tf.reduce_sum(x, axis=1) if isinstance(x, tf.RaggedTensor) else x


@pytest.mark.parametrize(
    ("data", "layers"),
    [
        pytest.param(
            ragged_rows, lambda: [RaggedSum(), *dense()], id="ragged", marks=pytest.mark.slow
        ),
        pytest.param(sparse_rows, dense, id="sparse", marks=pytest.mark.slow),
    ],
)
def test_ragged_and_sparse_inputs_give_one_devices_result(data, layers):
    def train(num_replicas):
        model = build(num_replicas, layers, weighted_metrics=["mae"])
        dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH_SIZE)
        history = model.fit(dataset, validation_data=dataset, epochs=2, verbose=0).history
        predicted = model.predict(dataset, verbose=0)
        return history | {"weights": weights_of(model), "predicted": predicted}

    one = train(1)
    for num_replicas in (2, 3):
        assert_same(one, train(num_replicas))


class OfDense(keras.layers.Layer):
    def call(self, x):
        return tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x


def test_predict_takes_a_sparse_tensor():
    x = tf.sparse.from_dense(rows(9)[0])
    with create_strategy(2).scope():
        model = keras.Sequential([keras.Input((4,), sparse=True), OfDense()])
    predicted = model.predict(x, batch_size=4, verbose=0)
    np.testing.assert_array_equal(predicted, rows(9)[0])
    some = replica_rows.some_rows((x, rows(9)[1]), 7, 20)
    np.testing.assert_array_equal(tf.sparse.to_dense(some[0]), rows(9)[0][7:])
    assert len(some[1]) == 2


@pytest.mark.slow
def test_logs_of_a_batch_are_those_of_all_rows():
    """Running values, as on one device, at every batch."""

    def train(num_replicas):
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(dict(logs)),
            on_test_batch_end=lambda batch, logs: seen.append(dict(logs)),
        )
        model = build(num_replicas, metrics=["mae"])
        x, y, _ = rows()
        model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0, callbacks=[note])
        model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[note])
        return {f"{i}/{name}": float(v) for i, logs in enumerate(seen) for name, v in logs.items()}

    one = train(1)
    assert len(one) == 12
    for num_replicas in (2, 3):
        assert_same(one, train(num_replicas))


@pytest.mark.slow
def test_jit_compile_is_refused_on_several_replicas():
    x, y, _ = rows()
    with pytest.raises(ValueError, match="`jit_compile` must be False on several replicas"):
        build(2, jit_compile=True).fit(x, y, verbose=0)
    model = build(1, jit_compile=True)
    model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    plain = build(1, jit_compile=False)
    plain.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights_of(model), weights_of(plain), atol=1e-6)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-NUM_ROWS // BATCH_SIZE)

    def __getitem__(self, index):
        start = index * BATCH_SIZE
        return tuple(part[start : start + BATCH_SIZE] for part in rows())


def endless():
    return tf.data.Dataset.from_tensor_slices(rows()).batch(BATCH_SIZE).repeat()


def generator():
    for _ in range(4):
        yield from (Batches()[index] for index in range(3))


SOURCES = {
    "PyDataset": (Batches, {}),
    "endless": (endless, {"steps_per_epoch": 4}),
    "generator": (generator, {"steps_per_epoch": 4}),
    "too few": (lambda: endless().take(5), {"steps_per_epoch": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_batches(source):
    def train(num_replicas):
        model = build(num_replicas)
        create, settings = SOURCES[source]
        history = model.fit(create(), epochs=2, verbose=0, shuffle=False, **settings).history
        return {
            "steps": int(model.optimizer.iterations.numpy()),
            "weights": weights_of(model),
        } | history

    one = train(1)
    for num_replicas in (2, 3):
        assert_same(one, train(num_replicas))


@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
def test_no_batch_of_a_generator_is_drawn_before_a_step_takes_it(form):
    taken, make = [], {"ragged": tf.RaggedTensor.from_tensor, "sparse": tf.sparse.from_dense}

    def batches():
        for number in range(6):
            taken.append(number)
            yield make.get(form, tf.identity)(tf.fill([5, 1], number + 1.0))

    spec = {"ragged": tf.RaggedTensorSpec, "sparse": tf.SparseTensorSpec}.get(form, tf.TensorSpec)
    data = tf.data.Dataset.from_generator(batches, output_signature=spec([None, 1], tf.float32))
    strategy = create_strategy(3)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    for number in range(3):
        parts = strategy.experimental_local_results(next(iterator))
        assert [int(replica_rows.count_rows(part)) for part in parts] == [2, 2, 1]
        flat = [part if form == "dense" else part.values for part in parts]
        assert all((part.numpy() == number + 1).all() for part in flat)
        assert taken == list(range(number + 1))


WINDOWS = np.random.RandomState(0).rand(60, 3).astype("float32")


def windows():
    return keras.utils.timeseries_dataset_from_array(
        WINDOWS[:50], WINDOWS[10:, 0], sequence_length=10, batch_size=8
    )


def windows_from_python():
    spec = tuple(tf.TensorSpec(shape, "float32") for shape in ((None, None, 3), (None,)))
    return tf.data.Dataset.from_generator(lambda: iter(windows()), output_signature=spec)


@pytest.mark.slow
@pytest.mark.parametrize("create", [windows, windows_from_python])
def test_a_dataset_that_does_not_tell_the_size_of_a_row(create):
    """The model takes ten steps, and no other number."""

    def train(num_replicas):
        keras.utils.set_random_seed(1)
        with create_strategy(num_replicas).scope():
            inputs = keras.Input((10, 3))
            outputs = keras.layers.Dense(1)(keras.layers.SimpleRNN(4)(inputs))
            model = keras.Model(inputs, outputs)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model.fit(create(), verbose=0).history | {"weights": weights_of(model)}

    assert create().element_spec[0].shape.as_list() == [None, None, 3]
    assert_same(train(1), train(2))


@pytest.mark.parametrize("made", ["optimizer", "metric", "layer"])
def test_what_is_made_outside_of_the_scope_is_refused(made):
    """Each replica would add to the same iterations, counts or weights."""
    outside = {
        "optimizer": keras.optimizers.SGD(0.1),
        "metric": keras.metrics.MeanSquaredError(),
        "layer": keras.layers.Dense(1),
    }
    outside["layer"].build((None, 4))
    strategy = create_strategy(2)
    with strategy.scope():
        inside = {
            "optimizer": keras.optimizers.SGD(0.1),
            "metric": keras.metrics.MeanSquaredError(),
            "layer": keras.layers.Dense(1),
        }
        parts = {**inside, made: outside[made]}
        model = keras.Sequential([parts["layer"]])
        optimizer = tfmulti.DistributedOptimizer(parts["optimizer"])
        model.compile(optimizer, "mse", metrics=[parts["metric"]])
    with pytest.raises(ValueError, match="must be created in the strategy's scope"):
        model.fit(*rows()[:2], verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
@pytest.mark.parametrize("change", ["build", "build and compile", "LoRA"])
def test_what_creates_variables_outside_of_the_scope_is_told_in_our_words(change, method):
    """An optimizer that cannot be built ends in a message of TensorFlow about colocation."""
    strategy = create_strategy(2)
    layer = keras.layers.Dense(1)
    with strategy.scope():
        model = keras.Sequential([layer])
        if change == "LoRA":
            model.build((None, 4))
        model.compile(tfmulti.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    if change == "LoRA":
        layer.enable_lora(1)
    else:
        model.build((None, 4))
    if change == "build and compile":
        model.compile(tfmulti.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    with pytest.raises(ValueError, match="must be created in the strategy's scope.*LoRA"):
        getattr(model, method)(*rows()[:2])


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_a_step_that_xla_compiles_is_refused(method):
    strategy = create_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="`jit_compile` must be False on several replicas"):
        getattr(model, method)(*rows()[:2])


def test_a_batch_with_a_number_that_belongs_to_no_row_is_refused():
    model = build(2)
    with pytest.raises(ValueError, match="Every tensor of a batch must have rows"):
        model.distribute_strategy.run(model.train_step, args=((tf.constant(1.0), rows()[1]),))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("distributed", "reductions"), [(True, 2), (False, 3)])
def test_a_step_reduces_as_little_as_it_needs(distributed, reductions, all_reduces):
    """Gradients; metrics, requests and statistics; the rows where the data do not tell."""
    strategy = create_strategy(2)
    x, y, _ = rows(20)
    with strategy.scope():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.Adam(global_clipnorm=1.0))
        model.compile(optimizer, "mse", metrics=["mae"])
    if distributed:
        model.fit(tfmulti.distribute_train((x, y), strategy, 8, seed=0), verbose=0)
    else:
        model.fit(x, y, batch_size=8, verbose=0)
    assert len(all_reduces) == 2 * reductions


class Batch(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("source", ["dense", "ragged", "distribute_train", "map"])
def test_a_batch_that_is_a_namedtuple_stays_one(source):
    x, y, _ = rows(8)
    strategy, x = create_strategy(2), tf.RaggedTensor.from_tensor(x) if source == "ragged" else x
    examples = tf.data.Dataset.from_tensor_slices(Batch(x, y))
    own = source in ("distribute_train", "map")
    batches = tfmulti.distribute_train(examples, strategy, 4, seed=0) if own else examples.batch(4)
    # Twice: the second function was given the parts of what the first one returned.
    for _ in range(2 if source == "map" else 0):
        batches = batches.map(lambda batch: batch._replace(y=batch.y + 0))
    drawn = next(iter(strategy.experimental_distribute_dataset(batches)))
    assert type(drawn) is Batch
    assert len(strategy.experimental_local_results(drawn.y)[1]) == 2


class Centred(keras.Model):
    """Predicts how far each row is from the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def predict_step(self, data):
        outputs = self(data[0] if isinstance(data, tuple) else data)
        return {"apart": outputs - tf.reduce_mean(outputs, 0), "mean": tf.reduce_mean(outputs)}


@pytest.mark.parametrize("eager", [False, True])
def test_predict_on_batch_of_a_custom_step_is_one_devices(eager):
    predictions = []
    for num_replicas in (3, 1):
        keras.utils.set_random_seed(0)
        with create_strategy(num_replicas).scope():
            model = Centred()
            model.compile("sgd", "mse", run_eagerly=eager)
        x = rows()[0]
        predictions.append([model.predict_on_batch(part) for part in (x, x[:2], x)])
    for found, expected in zip(*predictions):
        assert found["apart"].shape == expected["apart"].shape
        np.testing.assert_allclose(found["apart"], expected["apart"], atol=1e-6)
        np.testing.assert_allclose(found["mean"], expected["mean"], atol=1e-6)


@pytest.mark.slow
def test_eager_steps_agree_where_a_replica_has_no_rows():
    """Its tensors alone show that its batch has no rows: the others must communicate as it does."""
    x, y, _ = rows(9)

    def train(num_replicas):
        keras.utils.set_random_seed(1)
        with create_strategy(num_replicas, verify="never").scope():
            normalization = keras.layers.Normalization()
            normalization.adapt(x)
            inputs = keras.Input((4,))
            inner = normalization(inputs)
            inner = keras.layers.BatchNormalization(synchronized=True)(inner)
            outputs = {name: keras.layers.Dense(1, name=name)(inner) for name in "ab"}
            model = keras.Model(inputs, outputs)
            model.compile("sgd", {"a": "mse", "b": "mae"}, run_eagerly=True)
        data = {"x": x, "y": {"a": y, "b": y}, "batch_size": 4, "verbose": 0}
        history = model.fit(**data, shuffle=False).history
        tested = model.evaluate(**data, return_dict=True)
        tested = {f"test/{name}": value for name, value in tested.items()}
        return history | tested | {"weights": weights_of(model)}

    assert_same(train(1), train(2))


def test_predict_on_batch_predicts_with_the_layers_that_a_model_has_now():
    x, strategy = rows()[0], create_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    # In a scope TensorFlow would trace for that scope.
    assert model.predict_on_batch(x).shape == (len(x), 3)
    with strategy.scope():
        model.pop()
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
    assert model.predict_on_batch(x).shape == (len(x), 1)


class Classes(keras.Model):
    """Predicts the largest of three by a function of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def make_predict_function(self, force=False):
        if self.predict_function is None or force:
            scores = super().make_predict_function(force)
            self.predict_function = lambda data: tf.argmax(scores(data), axis=-1)
        return self.predict_function


def test_predict_on_batch_refuses_a_function_of_ones_own():
    x = np.random.RandomState(0).randn(7, 4).astype("float32")
    with create_strategy(2).scope():
        model = Classes()
    assert model.predict(x, verbose=0).shape == (7,)
    with pytest.raises(ValueError, match="by the model's `predict_step`. Received: Classes with"):
        model.predict_on_batch(x)


class OwnTrainFunction(keras.Model):
    """Makes the function of a step itself, by the strategy or as on one device."""

    def __init__(self, by_strategy):
        super().__init__()
        self.dense, self.by_strategy = keras.layers.Dense(1), by_strategy

    def call(self, x):
        return self.dense(x)

    def make_train_function(self, force=False):
        strategy = self.distribute_strategy

        @tf.function
        def function(iterator):
            if not self.by_strategy:
                return self.train_step(next(iterator))
            logs = strategy.run(self.train_step, args=(next(iterator),))
            return {name: strategy.reduce("MEAN", log, axis=None) for name, log in logs.items()}

        self.train_function = function
        return function


@pytest.mark.slow
def test_a_train_function_of_ones_own_runs_the_step_by_the_strategy():
    x = np.random.RandomState(0).randn(21, 3).astype("float32")

    def trained(num_replicas, by_strategy=True):
        keras.utils.set_random_seed(0)
        with create_strategy(num_replicas).scope():
            model = OwnTrainFunction(by_strategy)
            model.compile("adam", "mse")
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    for one, three in zip(trained(1), trained(3)):
        np.testing.assert_allclose(three, one, atol=1e-6)
    with pytest.raises(ValueError, match="custom `make_train_function` must.* Write `outputs"):
        trained(3, by_strategy=False)


class OwnStep(keras.Model):
    """Trains by a step of another name."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def pretrain_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def make_train_function(self, force=False):
        strategy = self.distribute_strategy

        @tf.function
        def function(iterator):
            logs = strategy.run(self.pretrain_step, args=(next(iterator),))
            return {"loss": strategy.reduce("MEAN", logs["loss"], axis=None)}

        self.train_function = function


def test_a_step_of_another_name_is_refused():
    x = np.ones((8, 3), "float32")
    with create_strategy(2).scope():
        model = OwnStep()
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Received: a run of another function on a batch. Write"):
        model.fit(x, x[:, :1], verbose=0)
    with create_strategy(1).scope():
        model = OwnStep()
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], verbose=0)


@pytest.mark.slow
def test_a_train_function_of_ones_own_is_not_verified_on_batches_from_python():
    x = np.ones((8, 3), "float32")
    specs = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(lambda: [(x, x[:, :1])] * 2, output_signature=specs)
    with create_strategy(2).scope():
        model = OwnTrainFunction(by_strategy=True)
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="`train_step` was not verified: Python code makes"):
        model.fit(data, verbose=0)


class MeasuresInBranch(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.error = keras.layers.Dense(1), keras.metrics.Mean(name="error")

    def call(self, x):
        return self.dense(x)

    def test_step(self, data):
        x, y = data
        error = tf.reduce_mean(tf.abs(self(x) - y))

        def update():
            self.error.update_state(error)
            return 1

        tf.cond(tf.shape(x)[1] > 2, update, lambda: 0)
        return {"error": self.error.result()}


def test_a_test_step_updates_a_metric_in_a_branch():
    def evaluated(num_replicas):
        keras.utils.set_random_seed(0)
        with create_strategy(num_replicas, verify="never").scope():
            model = MeasuresInBranch()
            model.compile("sgd")
        x, y, _ = rows(9)
        return model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)

    assert_same(evaluated(1), evaluated(2))


def test_the_launcher_learns_of_the_first_step_of_train_on_batch(tmp_path, monkeypatch):
    """It took a failure after hours of such a loop for one before the first step."""
    path = tmp_path / "progress"
    monkeypatch.setenv(environment.PROGRESS, str(path))
    monkeypatch.setattr(fit_callbacks, "_batches", itertools.count())
    model, seen = build(1, lambda: [keras.layers.Dense(1)]), []
    x, y, _ = rows(BATCH_SIZE)
    for _ in range(2):
        seen.append(path.exists())
        model.train_on_batch(x, y)
    assert seen == [False, False] and path.exists()


@pytest.mark.parametrize("name", ["BackupAndRestore", "OrbaxCheckpoint"])
def test_callbacks_that_write_one_folder_from_all_workers_are_refused(name, monkeypatch):
    kind = getattr(keras.callbacks, name, None)
    if kind is None:
        pytest.skip(f"this Keras has no {name}")
    # The constructor of one of them needs a package of its own.
    callback = kind.__new__(kind)
    callback.backup_dir = callback.directory = "folder"
    with create_strategy(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    monkeypatch.setattr(fit_callbacks.topology, "num_workers", lambda strategy: 2)
    with pytest.raises(ValueError, match=rf"`{name}` supports one worker.* Received: {name}\("):
        fit_callbacks.prepare_callback(callback, model)


def test_a_callback_has_its_own_path_again_when_training_has_ended(monkeypatch, tmp_path):
    """Another worker than the chief, which is to load what the chief has written."""
    model = build(1, lambda: [keras.Input((4,)), keras.layers.Dense(1)])
    monkeypatch.setattr(fit_callbacks.topology, "num_workers", lambda strategy: 2)
    monkeypatch.setattr(fit_callbacks.topology, "is_chief", lambda strategy: False)
    given, seen = str(tmp_path / "{epoch}.weights.h5"), []
    writer = keras.callbacks.ModelCheckpoint(given, save_weights_only=True)
    during = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(writer.filepath)
    )
    own = fit_callbacks.OwnPaths()
    for _ in range(2):
        calls = keras.callbacks.CallbackList([writer, during, own])
        own.set_callbacks(calls.callbacks)
        fit_callbacks.prepare_callback(writer, model)
        writer.set_model(model)
        for method in ("on_train_begin", "on_test_begin", "on_test_end"):
            getattr(calls, method)()
        during.on_epoch_end(0, {})
        calls.on_train_end()
        assert writer.filepath == given
    assert seen[0] == seen[1] != given


def test_files_of_model_checkpoint_do_not_pile_up_where_nobody_reads_them(monkeypatch, tmp_path):
    model = build(1, lambda: [keras.Input((4,)), keras.layers.Dense(1)])
    monkeypatch.setenv(environment.PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setattr(fit_callbacks.topology, "num_workers", lambda strategy: 2)
    monkeypatch.setattr(fit_callbacks.topology, "is_chief", lambda strategy: False)
    callback = keras.callbacks.ModelCheckpoint(tmp_path / "kept" / "{epoch}.weights.h5")
    callback.set_model(model)
    fit_callbacks.prepare_callback(callback, model)
    callback.set_params({"epochs": 2, "steps": 1})
    for epoch in range(2):
        callback.on_epoch_end(epoch, {"loss": 1.0})
    assert not (tmp_path / "kept").exists()
    [folder] = tmp_path.glob("tfmulti_*")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("is_chief", [True, False])
def test_only_the_chief_sends_to_a_server(is_chief, monkeypatch):
    requests = pytest.importorskip("requests")
    model, sent = build(1, lambda: [keras.Input((4,)), keras.layers.Dense(1)]), []
    monkeypatch.setattr(requests, "post", lambda *args, **kwargs: sent.append(args))
    monkeypatch.setattr(fit_callbacks.topology, "num_workers", lambda strategy: 2)
    monkeypatch.setattr(fit_callbacks.topology, "is_chief", lambda strategy: is_chief)
    callback = keras.callbacks.RemoteMonitor("http://localhost:1")
    fit_callbacks.prepare_callback(callback, model)
    callback.on_epoch_end(0, {"loss": 1.0})
    assert len(sent) == is_chief


@pytest.mark.parametrize(
    "create", [lambda: tf.ragged.constant([[1], []]), lambda: tf.sparse.eye(2)]
)
def test_predictions_that_workers_cannot_gather_are_refused(monkeypatch, create):
    part, model = create(), keras.Sequential([keras.layers.Dense(1)])
    monkeypatch.setattr(topology, "num_workers", lambda strategy: 2)
    # A single batch is predicted without the other workers.
    wrapped_step._refuse_to_gather({"output": part}, model)
    marks.CALL.set(model, ("predict", False))
    with pytest.raises(ValueError, match="must be dense tensors.* Received: a .*Tensor.* Return"):
        wrapped_step._refuse_to_gather({"output": part}, model)


def test_train_on_batch_tells_of_local_batch_statistics_once():
    with create_strategy(2).scope():
        inner = [keras.layers.Dense(3), keras.layers.BatchNormalization(name="local")]
        model = keras.Sequential([keras.Input((2,)), *inner])
        model.compile("sgd", "mse")
    rows = np.ones((4, 2), "float32"), np.ones((4, 3), "float32")
    with pytest.warns(UserWarning, match="Unsynchronized batch normalization .*: local"):
        model.train_on_batch(*rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_on_batch(*rows)
