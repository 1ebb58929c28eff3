"""What Keras itself, of today and of version 2, tests of models under a strategy, on ours.

Keras 3 tests variables, `run`, its iterator, seeds and one `fit`; Keras 2 tested a dense, a
convolutional, an embedding, a siamese and a recurrent network, stateful ones too, for training,
evaluation and prediction, against no strategy at all.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from replicas import create_strategy

import tfmulti

NUM_REPLICAS = 2


@pytest.fixture(name="strategy")
def strategy_fixture():
    return create_strategy(NUM_REPLICAS)


def test_a_layers_variables_are_mirrored(strategy):
    with strategy.scope():
        dense = keras.layers.Dense(2)
        dense.build((4, 2))
    for variable in dense.variables:
        assert isinstance(variable, keras.Variable)
        assert isinstance(variable.value, tf.distribute.DistributedValues)
        assert type(variable.value).__name__ == "MirroredVariable"


def test_run_gives_each_replica_its_own(strategy):
    with strategy.scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.fill([8, 4], float(context.replica_id_in_sync_group))
    )
    run = tf.function(lambda data: model(data))
    first, second = strategy.experimental_local_results(strategy.run(run, args=(values,)))
    assert first.shape == second.shape == (8, 2)
    np.testing.assert_array_equal(first, np.zeros((8, 2)))
    np.testing.assert_allclose(second, np.ones((8, 4)) @ model.get_weights()[0], atol=1e-6)


def test_keras_iterator_gives_replica_batches(strategy):
    rng = np.random.default_rng(0)
    iterator = keras_trainer.TFEpochIterator(
        x=rng.random((100, 16)),
        y=rng.random((100, 4)),
        sample_weight=rng.random(100),
        batch_size=16,
        shuffle=True,
        distribute_strategy=strategy,
    )
    sizes = []
    for *_, batches in iterator:
        x, y, weights = next(batches)
        sizes.append([len(part) for part in x.values])
        assert [len(part) for part in y.values] == sizes[-1]
        assert [len(part) for part in weights.values] == sizes[-1]
    assert sizes == [[8, 8]] * 6 + [[2, 2]]


@pytest.mark.parametrize("aggregation", ["none", "sum", "mean"])
@pytest.mark.parametrize("synchronization", ["auto", "on_read"])
def test_variables_keep_what_was_asked(strategy, aggregation, synchronization):
    with strategy.scope():
        variable = keras.Variable(
            np.ones((4, 4)), aggregation=aggregation, synchronization=synchronization
        )
    assert variable.value.aggregation == getattr(tf.VariableAggregation, aggregation.upper())
    synchronized = {"auto": "ON_WRITE", "on_read": "ON_READ"}[synchronization]
    assert variable.value.synchronization == getattr(tf.VariableSynchronization, synchronized)


def test_the_state_of_seeds_begins_alike(strategy):
    with strategy.scope():
        generator = keras.random.SeedGenerator(42)
    states = strategy.run(lambda: generator.state.value)
    for state in strategy.experimental_local_results(states):
        np.testing.assert_array_equal(state, (42, 0))


@pytest.mark.parametrize("wrap", [tfmulti.DistributedOptimizer, lambda optimizer: optimizer])
def test_penalties_count_once(strategy, wrap):
    def fit(create):
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(
            1,
            use_bias=False,
            kernel_initializer="ones",
            kernel_regularizer=keras.regularizers.L1L2(0.01, 0.01),
        )
        model = keras.Model(inputs, layer(inputs))
        model.compile(create(keras.optimizers.SGD()), "mse")
        history = model.fit(np.ones((12, 1)), np.zeros((12, 1)), batch_size=12, verbose=0)
        return history.history["loss"], model.get_weights()[0]

    expected = fit(lambda optimizer: optimizer)
    with strategy.scope():
        actual = fit(wrap)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


def images(count):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, 8, 8, 3)).astype("float32"), rng.integers(0, 3, count)


def words(count):
    rng = np.random.default_rng(2)
    return rng.integers(0, 20, (count, 6)), rng.integers(0, 3, count)


def pairs(count):
    left, _ = words(count)
    same = np.random.default_rng(3).integers(0, 2, (count, 1)).astype("float32")
    return {"left": left, "right": left[::-1].copy()}, same


def dense():
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(5, "tanh"), classes()])


def convolutional():
    layers = [
        keras.layers.Conv2D(4, 3, strides=2, activation="tanh"),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Flatten(),
        classes(),
    ]
    return keras.Sequential(layers)


def embedding():
    return keras.Sequential(
        [keras.layers.Embedding(20, 4), keras.layers.GlobalAveragePooling1D(), classes()]
    )


def siamese():
    inputs = {name: keras.Input((6,), name=name) for name in ("left", "right")}
    embed = keras.layers.Embedding(20, 4)
    pool = keras.layers.GlobalAveragePooling1D()
    sides = [keras.layers.TimeDistributed(keras.layers.Dense(3))(embed(x)) for x in inputs.values()]
    similarity = keras.layers.Dot(axes=1, normalize=True)([pool(side) for side in sides])
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(similarity))


def recurrent():
    return keras.Sequential([keras.layers.Embedding(20, 4), keras.layers.LSTM(5), classes()])


def classes():
    return keras.layers.Dense(3, "softmax")


MODELS = {
    "dense": (dense, images, "sparse_categorical_crossentropy"),
    "convolutional": (convolutional, images, "sparse_categorical_crossentropy"),
    "embedding": (embedding, words, "sparse_categorical_crossentropy"),
    "siamese": (siamese, pairs, "binary_crossentropy"),
    "recurrent": (recurrent, words, "sparse_categorical_crossentropy"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["recurrent", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "recurrent")],
)
def test_networks_do_as_without_a_strategy(strategy, name):
    create, load, loss = MODELS[name]
    x, y = load(27)

    def work(wrap):
        keras.utils.set_random_seed(5)
        model = create()
        model.compile(wrap(keras.optimizers.SGD(0.1)), loss, metrics=["accuracy"])
        fitted = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
        predicted = model.predict(x, batch_size=8, verbose=0)
        return [*model.get_weights(), *fitted.values(), evaluated, predicted]

    expected = work(lambda optimizer: optimizer)
    with strategy.scope():
        actual = work(tfmulti.DistributedOptimizer)
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
