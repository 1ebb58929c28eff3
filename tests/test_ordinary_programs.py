"""Programs that train on one device as they stand train the same, or are told of."""

import collections
import contextlib
import random
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from replicas import create_strategy

import tfmulti
from tfmulti.verification import notices

NUM_ROWS, BATCH_SIZE = 21, 8  # The last batch has five rows.
LENGTHS = [1 + i % 5 for i in range(NUM_ROWS)]


def rows(seed, *shape):
    return np.random.RandomState(seed).randn(NUM_ROWS, *shape).astype("float32")


def batches(*parts):
    """A dataset of batches of one part, or of a tuple of them."""
    parts = parts if len(parts) > 1 else parts[0]
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH_SIZE)


def scope(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def compiled(strategy, make, loss=None, **settings):
    with scope(strategy):
        model = make()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, **settings)
    return model


def results(model, history=None):
    """Weights, and logs where a history is given."""
    found = {variable.path: variable.numpy() for variable in model.weights}
    return found | (history.history if history else {})


def assert_same(run, num_replicas=2):
    found = []
    for is_distributed in (False, True):
        strategy = create_strategy(num_replicas) if is_distributed else None
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        values = run(strategy)
        found.append({name: np.asarray(value, "float64") for name, value in values.items()})
    one, many = found
    assert list(one) == list(many)
    for name in one:
        np.testing.assert_allclose(many[name], one[name], rtol=1e-6, atol=1e-6, err_msg=name)


class Embedding(keras.Model):
    """Trains by steps of its own, of data of their own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def learn(self, loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Triplets(Embedding):
    def train_step(self, data):
        # Not inputs, targets and weights, nor are they as many.
        anchor, positive, negative, _ = data

        def loss_of():
            near = tf.square(self(anchor, training=True) - self(positive, training=True))
            far = tf.square(self(anchor, training=True) - self(negative, training=True))
            return tf.reduce_mean(tf.nn.softplus(tf.reduce_sum(near - far, axis=-1)))

        return self.learn(loss_of)


class Mixup(Embedding):
    def train_step(self, data):
        (x1, y1), (x2, y2) = data
        x, y = 0.3 * x1 + 0.7 * x2, 0.3 * y1 + 0.7 * y2
        logs = self.learn(lambda: self.compute_loss(x, y, self(x, training=True)))
        return logs | self.compute_metrics(x, y, self(x))


class Named(Embedding):
    def train_step(self, data):
        return super(Embedding, self).train_step((data["inputs"], data["targets"]))


class Codes(Embedding):
    """Makes its targets itself, of inputs alone; it has two parts, and no `call`."""

    call = keras.Model.call

    def __init__(self):
        keras.Model.__init__(self)
        self.encoder = keras.Sequential([keras.layers.Dense(2, "tanh")])
        self.decoder = keras.Sequential([keras.layers.Dense(4)])

    def train_step(self, x):
        return self.learn(lambda: tf.reduce_mean(tf.square(self.decoder(self.encoder(x)) - x)))


def of_pairs():
    x, y = (rows(0, 4), rows(1, 3)), (rows(2, 4), rows(3, 3))
    return tf.data.Dataset.zip((batches(*x), batches(*y)))


F1 = keras.metrics.F1Score
STEPS = {
    "triplets": (Triplets, lambda: batches(*(rows(i, 4) for i in range(3)), np.arange(21)), {}),
    "mixup": (Mixup, of_pairs, dict(loss="mse", metrics=lambda: ["mae", F1(name="f1")])),
    "names": (
        Named,
        lambda: batches({"inputs": rows(0, 4), "targets": rows(1, 3)}),
        dict(loss="mse"),
    ),
    "self-made targets": (Codes, lambda: batches(rows(0, 4)), {}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, verify", [*((name, "auto") for name in STEPS), ("mixup", "never")])
def test_data_that_only_a_step_understands(name, verify):
    make, data, settings = STEPS[name]

    def run(strategy):
        if strategy:
            strategy.verify = verify
        with scope(strategy):
            made = {k: v() if callable(v) else v for k, v in settings.items()}
        model = compiled(strategy, make, **made)
        return results(model, model.fit(data(), verbose=0))

    assert_same(run)


def test_such_data_on_a_strategy_of_one_device():
    def run(strategy):
        model = compiled(strategy, Triplets)
        return results(model, model.fit(STEPS["triplets"][1](), verbose=0))

    assert_same(run, num_replicas=1)


class Texts(keras.Model):
    """Takes ragged tensors for what they are."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(20, 4)
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        embedded = x.with_flat_values(self.embedding(x.flat_values))
        padded = x.to_tensor(shape=(None, 5))
        return self.dense(tf.reduce_sum(embedded, 1)) + 0.01 * self.dense(
            self.embedding(padded[:, 0])
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ragged_rows_in_a_model_that_is_not_built(num_replicas):
    values = np.random.RandomState(0).randint(1, 20, sum(LENGTHS)).astype("int32")
    ragged = tf.RaggedTensor.from_row_lengths(values, LENGTHS)

    def run(strategy):
        # On a GPU Keras would choose XLA, which cannot pad ragged rows.
        model = compiled(strategy, Texts, "mse", metrics=["mae"], jit_compile=False)
        return results(model, model.fit(batches(ragged, rows(1, 1)), verbose=0))

    assert_same(run, num_replicas)


class Noise(keras.layers.Layer):
    """Draws without a seed; what it draws makes no difference."""

    def call(self, x, training=False):
        x = x + 0.0 * keras.random.normal(ops.shape(x))
        return keras.random.dropout(x, 1e-12) if training else x


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["auto", "never"])
def test_random_numbers_without_a_seed(verify):
    def run(strategy):
        if strategy:
            strategy.verify = verify
        layers = lambda: keras.Sequential([Noise(), keras.layers.Dense(1)])  # noqa: E731
        model = compiled(strategy, layers, "mse")
        history = model.fit(rows(0, 4), rows(1, 1), BATCH_SIZE, shuffle=False, verbose=0)
        predicted = model.predict(rows(0, 4), verbose=0)
        # Layers that are made afterwards begin as on one device, and nothing is left behind. XLA
        # could not change a seed that is on several GPUs.
        after = compiled(None, layers, "mse", jit_compile=False)
        after.fit(rows(0, 4), rows(1, 1), BATCH_SIZE, shuffle=False, verbose=0)
        later = {f"later {k}": v for k, v in results(after).items()}
        return results(model, history) | later | {"predicted": predicted, "next": random.random()}

    assert_same(run)


@pytest.mark.slow
def test_random_numbers_that_nobody_draws_without_a_seed():
    def run(strategy):
        model = compiled(strategy, lambda: keras.Sequential([keras.layers.Dense(1)]), "mse")
        history = model.fit(rows(0, 4), rows(1, 1), BATCH_SIZE, shuffle=False, verbose=0)
        return results(model, history) | {"next": random.random()}

    assert_same(run)


def test_each_replica_draws_other_numbers_without_a_seed():
    class Draws(keras.layers.Layer):
        def call(self, x):
            return keras.random.uniform(ops.shape(x))

    strategy = create_strategy(2, verify="never")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Draws()])
    drawn = model.predict(rows(0, 4)[:8], verbose=0)
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("call", ["fit", "predict", "train_on_batch"])
def test_a_state_for_each_row_is_refused(call):
    def stateful():
        inputs = keras.Input(batch_shape=(8, 5, 3))
        outputs = keras.layers.LSTM(2, stateful=True, name="memory")(inputs)
        return keras.Model(inputs, keras.layers.Dense(1)(outputs))

    model = compiled(create_strategy(2), stateful, "mse")
    x, y = np.zeros((16, 5, 3), "float32"), np.zeros((16, 1), "float32")
    with pytest.raises(ValueError, match="`stateful=True` keeps a state .* Received: memory.* Use"):
        getattr(model, call)(*((x,) if call == "predict" else (x, y)))


def own_loop(strategy, outside):
    with scope(strategy):
        inputs = [] if not outside else [keras.Input((4,))]
        layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([*inputs, *layers])
        optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0)
    with contextlib.nullcontext() if outside else scope(strategy):
        for x, y in batches(rows(0, 4), rows(1, 1)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return results(model) | {"loss": loss}


@pytest.mark.parametrize("outside", [False, True])
def test_a_loop_of_ones_own_outside_of_replicas(outside):
    assert_same(lambda strategy: own_loop(strategy, outside), num_replicas=1)
    with pytest.raises(ValueError, match="applied in replica context. Received: adam.* Train"):
        own_loop(create_strategy(2), outside)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("within", [False, True])
def test_callbacks_that_take_gradients_and_read_numbers(within):
    """In the scope and outside of it: `fit` can be called in both."""

    def run(strategy):
        seen = {}

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                variables, optimizer = self.model.trainable_variables, self.model.optimizer
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self.model(rows(0, 4)) - rows(1, 1)))
                norms = [tf.norm(gradient) for gradient in tape.gradient(loss, variables)]
                numbers = [int(optimizer.iterations), int(optimizer.iterations.value)]
                numbers += [float(optimizer.learning_rate), float(optimizer.learning_rate.value)]
                numbers += [optimizer.iterations.numpy(), optimizer.learning_rate.numpy()]
                seen[str(epoch)] = [*norms, *numbers]

        model = compiled(strategy, lambda: keras.Sequential([keras.layers.Dense(1)]), "mse")
        with scope(strategy) if within else contextlib.nullcontext():
            model.fit(
                *(rows(0, 4), rows(1, 1), BATCH_SIZE),
                **dict(epochs=2, shuffle=False, verbose=0, callbacks=[Look()]),
            )
        return results(model) | seen

    assert_same(run)


@pytest.mark.slow
def test_an_eager_step_that_cannot_be_traced():
    class Eager(Embedding):
        def train_step(self, data):
            x, y = data["x"], data["y"]
            logs = self.learn(lambda: tf.reduce_mean(tf.square(self(x, training=True) - y)))
            return logs | {"is_small": float(float(logs["loss"]) < 0.0)}

    def run(strategy):
        model = compiled(strategy, Eager, run_eagerly=True)
        return results(model, model.fit(batches({"x": rows(0, 4), "y": rows(1, 3)}), verbose=0))

    assert_same(run)


@pytest.mark.slow
def test_one_strategy_after_another_draws_without_a_seed():
    def layers():
        return keras.Sequential([Noise(), keras.layers.Dense(1)])

    for num_replicas in (2, 3):
        model = compiled(create_strategy(num_replicas, verify="never"), layers, "mse")
        with model.distribute_strategy.scope():
            model.fit(rows(0, 4), rows(1, 1), BATCH_SIZE, verbose=0)


class MixedOver(keras.Model):
    """Mixup of each row with another one of the global batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        x, y = tfmulti.local_rows([self.mixed(part) for part in tfmulti.gather_batch((x, y))])
        return super().train_step((x, y))

    def mixed(self, whole):
        seed = tf.stack([7, tf.cast(self.optimizer.iterations, tf.int32)])
        order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(whole)[0]), seed)
        return 0.7 * whole + 0.3 * tf.gather(whole, order)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_rows_that_are_mixed_over_the_global_batch(num_replicas):
    def run(strategy):
        model = compiled(strategy, MixedOver, "mse")
        # The last batch has one row.
        data = tf.data.Dataset.from_tensor_slices((rows(0, 4), rows(1, 1))).batch(10)
        return results(model, model.fit(data, epochs=2, verbose=0))

    assert_same(run, num_replicas)


class Counting(keras.Model):
    """Updates at every second step, counted in Python."""

    def __init__(self):
        super().__init__()
        self.dense, self.steps = keras.layers.Dense(1), 0

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.steps += 1
        if self.steps % 2 == 0:
            return super().train_step(data)
        return {"loss": self.compute_loss(y=data[1], y_pred=self(data[0], training=True))}


def test_a_counter_in_python_is_refused_in_a_step_that_runs_eagerly():
    strategy = create_strategy(2)
    model = compiled(strategy, Counting, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="the attribute steps of Counting.*iterations"):
        model.fit(batches(rows(0, 4), rows(1, 1)), verbose=0)
    assert model.steps == 0


class Recording(keras.Sequential):
    """Keeps what it has seen in containers of Python."""

    def __init__(self):
        super().__init__([keras.layers.Dense(1)])
        self.losses_seen, self.by_name, self.kinds = [], {"last": [], "steps": 0}, set()
        self.latest = collections.deque(maxlen=3)

    def train_step(self, data):
        logs = super().train_step(data)
        loss = float(logs["loss"])
        self.losses_seen.append(loss)
        self.latest.append(loss)
        self.by_name["last"].append((loss,))
        self.by_name["steps"] += 1
        self.kinds.add(f"loss {len(self.kinds)}")
        return logs


@pytest.mark.slow
def test_containers_of_a_step_that_runs_eagerly_are_put_back_and_named():
    strategy = create_strategy(2, verify="always")
    model = compiled(strategy, Recording, "mse", run_eagerly=True)
    seen = []
    at_begin = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(
            [len(each) for each in (model.losses_seen, model.latest, model.kinds)]
            + [len(model.by_name["last"]), model.by_name["steps"]]
        )
    )
    with pytest.warns(UserWarning, match="changes losses_seen, by_name, .* of Recording.*log"):
        model.fit(batches(rows(0, 4), rows(1, 1)), verbose=0, callbacks=[at_begin])
    assert seen[0] == [0] * 5


@pytest.mark.slow
def test_stock_augmentation_does_not_shuffle_rows(recwarn):
    strategy = create_strategy(2, verify="always")
    with strategy.scope():
        layers = [keras.layers.RandAugment((0, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
        model.compile("sgd", "mse")
    model.fit(batches(rows(0, 8, 8, 3), rows(1, 1)), verbose=0)
    assert not [w for w in recwarn if "shuffles rows" in str(w.message)]


@pytest.mark.slow
def test_an_activity_regularizer_is_told_to_sum():
    strategy = create_strategy(2)
    with strategy.scope():
        layer = keras.layers.Dense(2, activity_regularizer=lambda x: 0.1 * ops.mean(ops.abs(x)))
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="activity regularizer returns by the number of rows"):
        model.fit(batches(rows(0, 4), rows(1, 2)), verbose=0)


def test_replicas_that_do_not_do_the_same_are_told_of():
    model = compiled(create_strategy(2), Counting, "mse")
    with pytest.raises(RuntimeError, match="All replicas must do the same.*a counter"):
        model.fit(batches(rows(0, 4), rows(1, 1)), verbose=0)


def test_replicas_that_merge_lists_of_different_lengths_are_told_of():
    """Where there are GPUs, gradients are reduced so."""
    values = []

    def step():
        values.append(tf.constant(1.0))
        merge = lambda strategy, given: given
        return tf.distribute.get_replica_context().merge_call(merge, args=(list(values),))

    with pytest.raises(RuntimeError, match="All replicas must do the same.*a counter"):
        create_strategy(2).run(step)


class Centred(MixedOver):
    def train_step(self, data):
        return keras.Model.train_step(self, (data[0] - ops.mean(data[0], axis=0), data[1]))


@pytest.mark.slow
def test_verification_leaves_no_warnings_of_tensorflow(caplog):
    model = compiled(create_strategy(2), Centred, "mse")
    tf.get_logger().addHandler(caplog.handler)
    with pytest.raises(ValueError, match="must give one device's result"):
        model.fit(batches(rows(0, 4), rows(1, 1)), verbose=0)
    tf.get_logger().removeHandler(caplog.handler)
    assert not caplog.records


def test_a_line_tells_of_long_verification(capsys):
    with notices.announced("train", seconds=0.0):
        for timer in threading.enumerate():
            if isinstance(timer, threading.Timer):
                timer.join()
    assert "verifying `train_step`" in capsys.readouterr().err
    with notices.announced("train"):
        pass
    assert not capsys.readouterr().err


class Pairwise(keras.Model):
    """Its outputs depend on other rows, under a loss of Keras's own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(3), keras.layers.Dense(3)

    def call(self, x):
        return ops.tensordot(self.left(x), self.right(x), 2) + ops.zeros_like(x[:, :1])


@pytest.mark.slow
def test_a_call_that_mixes_rows_is_named_and_not_a_loss():
    model = compiled(create_strategy(2), Pairwise, "mse")
    with pytest.raises(ValueError, match="Likely cause: local batch statistics, in .*call"):
        model.fit(batches(rows(0, 4), rows(1, 1)), verbose=0)


class Attends(keras.Model):
    """Builds layers that draw the seeds of their weights when they are built."""

    def __init__(self):
        super().__init__()
        self.attend = keras.layers.MultiHeadAttention(2, 4)
        self.out = keras.layers.Dense(3)

    def call(self, x):
        return self.out(self.attend(x, x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


@pytest.mark.slow
def test_a_model_that_is_built_by_its_own_step_starts_with_plain_keras_weights():
    def run(strategy):
        model = compiled(strategy, Attends)
        return results(model, model.fit(rows(0, 5, 4), rows(1, 5, 3), batch_size=8, verbose=0))

    assert_same(run)


class FirstCall(keras.Model):
    """Creates what it counts with in its first call, as a step of TensorFlow may."""

    def __init__(self, is_built):
        super().__init__()
        self.dense, self.count, self.mean = keras.layers.Dense(1), None, None
        if is_built:
            self.dense.build((None, 4))

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        if self.count is None:
            self.count = tf.Variable(0.0, trainable=False)
            self.mean = tf.Variable(lambda: tf.fill([4], 0.5), trainable=False)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.count.assign_add(1.0)
        return {"loss": loss, "count": self.count + tf.reduce_sum(self.mean)}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("is_built", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_variables_that_a_step_creates_in_its_first_call(is_built, num_replicas):
    def run(strategy):
        with scope(strategy):
            model = FirstCall(is_built)
            model.compile("adam")
        data = batches(rows(0, 4), rows(1, 1))
        return results(model, model.fit(data, epochs=2, verbose=0))

    assert_same(run, num_replicas)


class Subtracting(Embedding):
    """A step in which numbers of two types cannot meet, as Keras casts what arrays hold."""

    def train_step(self, data):
        x, y = data
        return self.learn(lambda: tf.reduce_sum(tf.square(self(x, training=True) - y)))

    def predict_step(self, data):
        return self(data) - data[:, :3]


@pytest.mark.slow
@pytest.mark.parametrize("floatx, dtype", [("float32", "float64"), ("float64", "float32")])
def test_arrays_of_another_precision_are_verified(floatx, dtype, recwarn):
    keras.config.set_floatx(floatx)
    try:
        model = compiled(create_strategy(2), Subtracting)
        with pytest.raises(ValueError, match="sums over the batch"):
            model.fit(rows(0, 4).astype(dtype), rows(1, 3).astype(dtype), verbose=0)
        model.predict(rows(0, 4).astype(dtype), verbose=0)
    finally:
        keras.config.set_floatx("float32")
    assert not [each for each in recwarn if "not verified" in str(each.message)]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return rows(0, 4)[8 * index : 8 * (index + 1)]


def test_a_step_of_predict_is_verified_with_batches_of_a_pydataset(recwarn):
    class First(Embedding):
        def predict_step(self, data):
            return self(data[0])

    with create_strategy(2).scope():
        model = First()
        model.compile("sgd", "mse")
    found = model.predict(Batches(), verbose=0)
    np.testing.assert_allclose(found, model(rows(0, 4)), atol=1e-6)
    assert not [each for each in recwarn if "not verified" in str(each.message)]
