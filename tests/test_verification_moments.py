"""What comes and goes in a training is told before it begins; so are objects that steps share."""

import warnings

import keras
import pytest
import tensorflow as tf
import verification_later as later
from replicas import create_strategy

from tfmulti.verification.graph_search import find_shared_objects

ROWS, LABELS = later.sorted_classes()


def fit(model_of, num_replicas=3, on_difference="error", **settings):
    strategy = create_strategy(num_replicas, on_difference=on_difference, verify="auto")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_of()
        model.compile(keras.optimizers.SGD(0.1), **settings)
    model.fit(ROWS, LABELS, batch_size=8, shuffle=False, verbose=0)
    return model


def iterations(model):
    return tf.cast(model.optimizer.iterations, tf.float32)


def share_of_training(model):
    done = iterations(model) / 1000.0
    return tf.cast((done > 0.3) & (done < 0.5), tf.float32)


TERMS = {
    "a phase that comes round": lambda model: tf.cast(
        model.optimizer.iterations // 4 % 3 == 1, tf.float32
    ),
    "a share of the training": share_of_training,
    "a table": lambda model: tf.gather(
        tf.constant([0.0, 0.0, 1.0, 0.0]), tf.minimum(model.optimizer.iterations // 3, 3)
    ),
    "a schedule of Keras": lambda model: keras.optimizers.schedules.PiecewiseConstantDecay(
        [4, 8], [0.0, 1.0, 0.0]
    )(model.optimizer.iterations),
    "a wave": lambda model: tf.nn.relu(-tf.cos(iterations(model) * 0.65)),
    "a gate by an average": lambda model: tf.sigmoid(20.0 * (6.0 - model.average)),
    "its own counter": lambda model: tf.switch_case(
        model.steps // 4 % 3, [lambda: 0.0, lambda: 1.0, lambda: 0.0]
    ),
}


def held(model, number):
    return model.add_weight(
        shape=(), initializer=keras.initializers.Constant(number), trainable=False
    )


class Changing(later.Step):
    """A loss with a term that is weighted by the moment of the training."""

    def __init__(self, weight_of, term=later.deviation):
        super().__init__(self.own_loss)
        self.weight_of, self.term = weight_of, term
        self.average = held(self, 10.0)
        self.steps = tf.Variable(1, trainable=False)

    def own_loss(self, model, y, losses, weights, outputs):
        return tf.reduce_mean(losses) + self.weight_of(self) * self.term(outputs)

    def train_step(self, data):
        logs = super().train_step(data)
        self.average.assign(0.8 * self.average + 0.2 * logs["own_loss"])
        self.steps.assign_add(1)
        return logs


@pytest.mark.slow
@pytest.mark.parametrize("name", TERMS)
def test_a_term_that_comes_and_goes_is_told_before_it_trains(name):
    with pytest.raises(ValueError, match="nothing has been trained yet.*, with "):
        fit(lambda: Changing(TERMS[name]))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TERMS)
def test_a_mean_that_comes_and_goes_is_no_false_alarm(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(lambda: Changing(TERMS[name], later.mean_square))


class Driver(later.Step):
    """Lowers the learning rate if the loss of the new weights has not fallen."""

    def __init__(self):
        super().__init__(later.mean)
        self.last = held(self, 1e9)

    def train_step(self, data):
        logs = super().train_step(data)
        x, y = data
        losses = keras.losses.sparse_categorical_crossentropy(y, self.net(x), from_logits=True)
        loss = tf.reduce_mean(losses)
        rate = self.optimizer.learning_rate
        rate.assign(rate * tf.where(loss < self.last, 1.05, 0.5))
        self.last.assign(loss)
        return logs


@pytest.mark.slow
def test_a_decision_by_local_rows_after_the_update_is_reported():
    with pytest.warns(UserWarning, match="decides by a number .*: Less at .*moments.py"):
        fit(Driver, on_difference="replicate")


@pytest.mark.slow
def test_replicas_that_decided_differently_are_told():
    with pytest.raises(ValueError, match="learning_rate, which differs between replicas"):
        fit(Driver)


class Sharing(later.Step):
    """Changes an object that is no variable."""

    def __init__(self, change):
        super().__init__(later.mean)
        self.change = change

    def train_step(self, data):
        x, y = data
        return super().train_step((x + self.change(x), y))


def of_an_iterator():
    data = iter(tf.data.Dataset.from_tensor_slices(0.1 * ROWS).repeat())
    return data, lambda x: next(data)


def of_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def count(x):
        keys = tf.cast(x[:, 0], tf.int64)
        seen = tf.ensure_shape(table.lookup(keys), [None])
        table.insert(keys, seen + 1.0)
        return 0.1 * seen[:, None]

    return table, count


def of_a_queue():
    queue = tf.queue.FIFOQueue(100, [tf.float32], [(4,)])
    queue.enqueue_many([ROWS])

    def draw(x):
        first = queue.dequeue()
        queue.enqueue(x[0])
        return 0.1 * first

    return queue, draw


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_an_iterator, of_a_table, of_a_queue])
@pytest.mark.parametrize("on_difference", ["error", "replicate"])
def test_an_object_that_all_replicas_would_change_is_refused_and_stays(make, on_difference):
    thing, change = make()
    with pytest.raises(ValueError, match="must be variables.*Received: .* at .*moments.py:"):
        fit(lambda: Sharing(change), on_difference=on_difference)
    if make is of_an_iterator:
        tf.debugging.assert_equal(next(thing), 0.1 * ROWS[0])
    else:
        assert thing.size() == (48 if make is of_a_queue else 0)


def in_a_branch(change):
    return lambda x: tf.cond(x[0, 0] > 0.0, lambda: change(x), lambda: x)


def in_a_loop(change):
    def changed(x):
        def body(number):
            change(x)
            return number + 1

        return tf.while_loop(lambda number: number < 1, body, [0])

    return changed


@pytest.mark.parametrize("within", [in_a_branch, in_a_loop, tf.function])
@pytest.mark.parametrize("make", [of_an_iterator, of_a_table, of_a_queue])
def test_an_object_that_a_part_of_the_step_changes_is_found(make, within):
    _, change = make()
    step = tf.function(within(change), autograph=False)
    graph = step.get_concrete_function(tf.TensorSpec((4, 4))).graph
    places = find_shared_objects(graph, num_local_replicas=2)
    assert places and all("moments.py:" in place for place in places)


@pytest.mark.slow
def test_a_table_that_is_only_read_is_exact():
    keys = tf.range(-9, 10, dtype=tf.int64)
    values = tf.lookup.KeyValueTensorInitializer(keys, tf.cast(keys, tf.float32))
    table = tf.lookup.StaticHashTable(values, 0.0)
    read = lambda x: 0.1 * table.lookup(tf.cast(x[:, :1], tf.int64))  # noqa: E731
    weights = [fit(lambda: Sharing(read), number).get_weights() for number in (1, 3)]
    for one, many in zip(*weights):
        tf.debugging.assert_near(one, many, atol=1e-6)


@pytest.mark.slow
def test_equal_results_by_chance_do_not_hide_state_that_is_in_no_variable():
    calls = [0]

    def loss(model, y, losses, weights, outputs):
        calls[0] += 1
        # The first comparison ends before.
        is_other = calls[0] > 12 and calls[0] % 2
        return tf.reduce_mean(losses) * (2.0 if is_other else 1.0)

    with pytest.warns(UserWarning, match="not verified: random: .*state that is in no variable"):
        fit(lambda: later.Step(loss), 2, run_eagerly=True)


class Summarizing(later.Step):
    """Writes to a file of events, by a condition of its own."""

    def __init__(self, folder):
        super().__init__(later.mean)
        self.writer = tf.summary.create_file_writer(str(folder))

    def train_step(self, data):
        with self.writer.as_default(), tf.summary.record_if(True):
            step = tf.cast(self.optimizer.iterations, tf.int64)
            tf.summary.scalar("largest", tf.reduce_max(tf.abs(data[0])), step)
        return super().train_step(data)


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_file_of_events_has_the_summaries_of_training_alone(tmp_path, run_eagerly):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = fit(lambda: Summarizing(tmp_path), 2, run_eagerly=run_eagerly)
    model.writer.close()
    (path,) = map(str, tmp_path.iterdir())
    records = tf.data.TFRecordDataset(path).as_numpy_iterator()
    events = map(tf.compat.v1.Event.FromString, records)
    assert [event.step for event in events if event.summary.value] == [0, 1, 2, 3, 4, 5]
