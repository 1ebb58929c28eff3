"""What no row of the first batch shows: other signs and lengths, and ratios of few rows."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti

ROWS, BATCH_SIZE, WIDTH = 24, 8, 4


class Step(keras.Model):
    """Trains with a loss of features, outputs and errors."""

    def __init__(self, loss_of, rank=2):
        super().__init__()
        self.net, self.loss_of = keras.layers.Dense(1), loss_of
        self.learned = self.add_weight(shape=(), initializer="ones")
        self.build([None] * (rank - 1) + [WIDTH])

    def call(self, x, training=False):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            errors = tf.reshape(tf.square(outputs - y), [tf.shape(x)[0], -1])
            loss = self.loss_of(x, tf.reduce_mean(errors, 1, keepdims=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


def fit(loss_of, data, rank=2):
    strategy = tfmulti.create_strategy(
        "mirrored", devices=["CPU:0", "CPU:1"], on_difference="error"
    )
    with strategy.scope():
        model = Step(loss_of, rank)
        model.compile(keras.optimizers.SGD(0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, verbose=0)
    return [str(each.message) for each in caught if "tfmulti" in str(each.message)]


def positive_at_first():
    random = np.random.RandomState(0)
    x = random.randn(ROWS, WIDTH).astype("float32")
    x[:BATCH_SIZE] = np.abs(x[:BATCH_SIZE])
    y = random.randn(ROWS, 1).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)


def of_negative_rows(x, errors):
    counted = tf.cast(tf.reduce_sum(x, 1, keepdims=True) < -1.0, errors.dtype)
    return tf.reduce_sum(counted * errors) / (1e-6 + tf.reduce_sum(counted)) + errors_of(errors)


def errors_of(errors):
    return 0.01 * tf.reduce_mean(errors)


@pytest.mark.slow
def test_rows_of_a_sign_that_the_first_ones_do_not_have():
    with pytest.raises(ValueError, match="one device's result.*with opposite signs"):
        fit(of_negative_rows, positive_at_first())


def of_lengths(*lengths):
    def batches():
        random = np.random.RandomState(0)
        for length in lengths:
            x = random.randn(BATCH_SIZE, length, WIDTH).astype("float32")
            yield x, x[..., :1]

    specs = tuple(tf.TensorSpec([None, None, size], tf.float32) for size in (WIDTH, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=specs)


def largest_of_long_ones(x, errors):
    is_short = tf.shape(x)[1] < 40
    return tf.cond(is_short, lambda: tf.reduce_mean(errors), lambda: tf.reduce_max(errors))


@pytest.mark.slow
def test_sequences_of_a_length_that_the_first_batch_does_not_have():
    # 40 is ten times as long as the first sequences: the step compares lengths with it.
    with pytest.raises(ValueError, match="one device's result.*with sequences of length 40"):
        fit(largest_of_long_ones, of_lengths(4, 4, 50), rank=3)


def mean_of_steps(x, errors):
    return tf.reduce_mean(errors)


@pytest.mark.slow
def test_sequences_of_several_lengths_raise_no_alarm():
    assert not fit(mean_of_steps, of_lengths(4, 7, 5), rank=3)


def of_equal_columns(x, errors):
    counted = tf.cast(x[:, :1] == x[:, 1:2], errors.dtype)
    return tf.reduce_sum(counted * errors) / (1e-6 + tf.reduce_sum(counted)) + errors_of(errors)


def in_the_end_a_root(x, errors):
    never = tf.reduce_max(tf.cast(x > 1e30, errors.dtype))
    return errors_of(errors) + never * tf.sqrt(0.1 + tf.reduce_mean(errors))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_of, operation", [(of_equal_columns, "RealDiv"), (in_the_end_a_root, "Sqrt")]
)
def test_ratios_and_roots_of_what_no_row_shows_are_warned_of_with_their_line(loss_of, operation):
    [told] = [text for text in fit(loss_of, positive_at_first()) if "from its own rows" in text]
    assert "divides by a number" in told
    assert f"{operation} at " in told and "test_verification_unseen.py:" in told


def of_rows_below(limit):
    return lambda x, errors: tf.reduce_mean(tf.boolean_mask(errors, x[:, 0] < limit))


def test_means_of_selected_rows_are_warned_of_with_their_line():
    # All rows are below the limit.
    [told] = fit(of_rows_below(1e30), positive_at_first())
    assert "divides by a number" in told
    assert "Mean at " in told and "test_verification_unseen.py:" in told


def put_back(x, errors):
    """Gives each row to one of two experts, and takes the means of all rows."""
    expert = tf.cast(x[:, 0] > 0, tf.int32)
    parts = tf.dynamic_partition(errors, expert, 2)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), expert, 2)
    stitched = tf.dynamic_stitch(places, [parts[0], 2 * parts[1]])
    together = tf.concat(parts, 0)
    where = tf.where(x[:, 0] > 0)
    scattered = tf.tensor_scatter_nd_update(errors, where, 2 * tf.gather_nd(errors, where))
    new = tf.scatter_nd(where, tf.gather_nd(errors, where), tf.shape(errors, tf.int64))
    return sum(map(tf.reduce_mean, (stitched, together, scattered, new)))


def of_steps_of_rows(x, errors):
    """Takes the mean over some steps of each row."""
    columns = tf.boolean_mask(x * errors, [True, False, True, True], axis=1)
    return tf.reduce_mean(tf.reduce_mean(columns, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss_of", [put_back, of_steps_of_rows])
def test_means_of_all_rows_are_not_warned_of_where_some_were_selected(loss_of):
    assert not fit(loss_of, positive_at_first())


class MeanOfSome(keras.Model):
    """Evaluates the mean error of some rows, which come late in sorted data."""

    def __init__(self):
        super().__init__()
        self.dense, self.some = keras.layers.Dense(1), keras.metrics.Mean(name="some")

    def call(self, x):
        return self.dense(x)

    def test_step(self, data):
        x, y = data
        self.some.update_state(of_equal_columns(x, tf.square(self(x) - y)))
        return {"some": self.some.result()}


@pytest.mark.slow
def test_ratios_of_an_evaluation_are_warned_of(recwarn):
    with tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = MeanOfSome()
        model.compile()
    model.evaluate(positive_at_first(), verbose=0)
    told = [str(each.message) for each in recwarn if "from its own rows" in str(each.message)]
    assert len(told) == 1 and told[0].startswith("`test_step` divides by a number"), told
    assert "test_verification_unseen.py:" in told[0]


def by_features_and_rows(x, errors):
    """Divides by what has rows, by numbers of the data, and by all replicas' rows."""
    errors = errors / (1.0 + tf.reduce_max(tf.abs(x), 1, keepdims=True))
    everything = tf.reduce_sum(tf.abs(tfmulti.gather_batch(x)))
    return tf.reduce_mean(errors) / tf.sqrt(tf.cast(tf.shape(x)[1], errors.dtype)) / everything


@pytest.mark.slow
def test_other_divisions_are_not_warned_of():
    told = fit(by_features_and_rows, positive_at_first())
    assert not [text for text in told if "from its own rows" in text], told


@pytest.mark.slow
def test_a_vector_of_many_weights_that_a_callback_changes():
    strategy = tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = tf.Variable(tf.zeros([100]), trainable=False)
        model = Step(
            lambda x, errors: (
                tf.reduce_mean(errors) + tf.reduce_sum(weights) * tf.reduce_max(errors)
            )
        )
        model.weights_of_terms = weights
        model.compile(keras.optimizers.SGD(0.01))

    class Change(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            weights.assign(tf.fill([100], 0.01 * epoch))

    with pytest.warns(UserWarning, match="Every replica computes `train_step`"):
        model.fit(positive_at_first(), epochs=2, verbose=0, callbacks=[Change()])


def test_a_trained_number_that_passes_a_limit_later():
    strategy = tfmulti.create_strategy(
        "mirrored", devices=["CPU:0", "CPU:1"], on_difference="error"
    )
    with strategy.scope():
        model = Step(None)
        model.compile(keras.optimizers.SGD(0.1))

    def gated(x, errors):
        hard = tf.where(model.learned.value > 1.02, tf.reduce_max(errors), 0.0)
        return tf.reduce_mean(errors) + hard - 0.2 * model.learned

    model.loss_of = gated
    with pytest.raises(ValueError, match="one device's result.*variables at 1.03"):
        model.fit(positive_at_first(), verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_arrays_that_an_eager_step_changes_are_told_and_put_back(in_place):
    class Counting(Step):
        def train_step(self, data):
            if in_place:
                self.seen += 1.0
            else:
                self.seen = self.seen + 1.0
            return super().train_step(data)

    strategy = tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model = Counting(mean_of_steps)
        model.seen = np.zeros(3)
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    with pytest.raises(ValueError, match="Received: the attribute seen"):
        model.fit(positive_at_first(), verbose=0)
    np.testing.assert_array_equal(model.seen, np.zeros(3))


@pytest.mark.slow
def test_layers_of_keras_that_mix_rows_are_warned_of():
    strategy = tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        mixed = [keras.layers.MixUp(0.2), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((4, 4, 3)), *mixed])
        model.compile("sgd", "mse")
    x = np.random.RandomState(0).randn(16, 4, 4, 3).astype("float32")
    with pytest.warns(UserWarning, match="shuffles rows at random"):
        model.fit(x, x[:, 0, 0], batch_size=8, verbose=0)
