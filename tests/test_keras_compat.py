"""Each canary fails when upstream no longer needs the cure: then take the cure out."""

import inspect
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.data.ops import multi_device_iterator_ops

import tfmulti
from tfmulti import keras_compat
from tfmulti.keras_compat import without_tuning


def stock(num_replicas=2):
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def ours(num_replicas=2):
    names = [f"CPU:{i}" for i in range(num_replicas)]
    return tfmulti.create_strategy("mirrored", devices=names)


def compiled(strategy, optimizer, layers=None, **kwargs):
    with strategy.scope():
        model = keras.Sequential(layers or [keras.layers.Dense(2)])
        model.compile(optimizer(), "mse", **kwargs)
    return model


def rows(count):
    rng = np.random.RandomState(0)
    return rng.randn(count, 4).astype("float32"), rng.randn(count, 2).astype("float32")


class Container(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(data[0]) - data[1]) ** 2)
        variables = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_canary_a_first_batch_that_does_not_divide():
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="same size|shape"):
        compiled(stock(), keras.optimizers.SGD).fit(*rows(15), batch_size=15, verbose=0)
    compiled(ours(), keras.optimizers.SGD).fit(*rows(15), batch_size=15, verbose=0)


def test_canary_a_model_without_call():
    def fit(strategy):
        with strategy.scope():
            model = Container()
            model.compile("sgd")
        model.fit(*rows(8), batch_size=4, verbose=0)

    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        fit(stock())
    fit(ours())


def test_canary_a_python_generator_loses_batches_to_building():
    def steps_of(strategy):
        x, y = rows(80)
        model = compiled(strategy, keras.optimizers.SGD)
        steps = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(1)
        )
        batches = ((x[i : i + 4], y[i : i + 4]) for i in range(0, 80, 4))
        model.fit(batches, verbose=0, callbacks=[count])
        return len(steps)

    assert steps_of(stock()) < 20
    assert steps_of(ours()) == 20


@pytest.mark.parametrize(
    "settings",
    [{"gradient_accumulation_steps": 2}, {"use_ema": True, "ema_overwrite_frequency": 2}],
)
def test_canary_merge_call_within_a_condition(settings):
    def optimizer():
        return keras.optimizers.SGD(0.1, **settings)

    with pytest.raises(RuntimeError, match="merge_call"):
        compiled(stock(), optimizer).fit(*rows(8), batch_size=4, verbose=0)
    distributed = compiled(ours(), lambda: tfmulti.DistributedOptimizer(optimizer()))
    distributed.fit(*rows(8), batch_size=4, verbose=0)


def test_canary_a_dataset_must_hand_over_its_variant():
    with pytest.raises(TypeError):
        type("Ours", (tf.data.Dataset,), {"_inputs": list, "element_spec": None})()
    assert keras_compat.variant_tensor(tf.data.Dataset.range(1)).dtype == tf.variant


def test_canary_batch_statistics_count_every_row():
    # Upstream's moments know no filler rows.
    assert "share" not in inspect.getsource(inspect.unwrap(keras_nn._compute_moments_sync))


def test_canary_one_number_for_a_loss_is_taken_twice():
    def loss(y, prediction):
        return tf.reduce_mean(tf.square(y - prediction))

    def train(strategy, optimizer):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(2)])
            model.compile(optimizer(), loss)
        model.fit(*rows(8), batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()[0]

    one = train(ours(1), lambda: keras.optimizers.SGD(0.1))
    two = train(ours(), lambda: tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    upstream = train(stock(), lambda: keras.optimizers.SGD(0.1))
    np.testing.assert_allclose(two, one, atol=1e-6)
    assert np.abs(upstream - one).max() > 1e-3


def test_canary_dropout_is_the_same_on_all_replicas():
    def masks(strategy):
        with strategy.scope():
            generator = keras.random.SeedGenerator(3)
        seeds = tf.function(lambda: strategy.run(generator.next))()
        return [seed.numpy().tolist() for seed in strategy.experimental_local_results(seeds)]

    first, second = masks(stock())
    assert first == second
    first, second = masks(ours())
    assert first != second


def test_canary_xla_does_not_span_devices():
    model = compiled(stock(), keras.optimizers.SGD, jit_compile=True)
    with pytest.raises((tf.errors.OpError, ValueError)):
        model.fit(*rows(8), batch_size=4, verbose=0)


def test_canary_a_share_of_sparse_rows_cannot_be_empty():
    rows_of = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(3)))

    def last(strategy):
        iterator = iter(strategy.experimental_distribute_dataset(rows_of.batch(2)))
        next(iterator)
        return strategy.experimental_local_results(next(iterator))

    with pytest.raises(tf.errors.OpError, match="at least 1 serialized tensor"):
        last(stock())
    assert [int(share.dense_shape[0]) for share in last(ours())] == [1, 0]


def test_canary_a_function_of_datasets_is_counted_by_replicas():
    def dataset(context):
        return tf.data.Dataset.from_tensor_slices(rows(12)).batch(2)

    strategy = stock()
    assert int(strategy.distribute_datasets_from_function(dataset).cardinality) == 6
    strategy, steps = ours(), []
    model = compiled(strategy, lambda: tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran out of data")
        data = strategy.distribute_datasets_from_function(dataset)
        model.fit(data, epochs=2, verbose=0, callbacks=[count])
    assert len(steps) == 6


@pytest.mark.parametrize("name", ["ModelCheckpoint", "CSVLogger", "TensorBoard"])
def test_canary_stock_callbacks_know_no_chief(name):
    source = inspect.getsource(inspect.getmodule(getattr(keras.callbacks, name)))
    assert "should_checkpoint" not in source
    assert "chief" not in source


def test_canary_stock_workers_take_one_cpu():
    assert tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


def tuned_by(datasets):
    return [dataset.options().autotune.enabled for dataset in datasets]


def test_no_dataset_keeps_fit_waiting_for_its_tuning_thread(monkeypatch):
    """The user's own, and those that the strategy adds for its devices."""
    made, given = [], []
    strategy = ours()
    create, distribute = multi_device_iterator_ops._create_device_dataset, without_tuning

    def note(function, kept):
        def call(*args, **kwargs):
            kept.append(function(*args, **kwargs))
            return kept[-1]

        return call

    name = "_create_device_dataset"
    monkeypatch.setattr(multi_device_iterator_ops, name, note(create, made))
    monkeypatch.setattr(keras_compat, "without_tuning", note(distribute, given))
    data = tf.data.Dataset.from_tensor_slices(rows(8)).repeat().batch(4)
    compiled(strategy, keras.optimizers.SGD).fit(data, steps_per_epoch=2, verbose=0)
    assert len(made) >= 2 and set(tuned_by(made)) == {False}
    assert given and set(tuned_by(given)) == {False}


def test_whoever_asks_for_tuning_has_it():
    options = tf.data.Options()
    options.autotune.enabled = True
    assert tuned_by([without_tuning(tf.data.Dataset.range(3).with_options(options))]) == [True]


def test_canary_datasets_of_devices_are_tuned():
    ours()
    create = inspect.unwrap(multi_device_iterator_ops._create_device_dataset)
    assert "autotune" not in inspect.getsource(create)


def test_canary_workers_add_by_tensorflows_collectives_alone():
    options = inspect.signature(tf.distribute.MultiWorkerMirroredStrategy.__init__).parameters
    assert set(options) == {"self", "cluster_resolver", "communication_options"}
    implementations = tf.distribute.experimental.CommunicationImplementation
    assert {each.name for each in implementations} == {"AUTO", "RING", "NCCL"}


def test_the_private_names_are_there():
    for name in ("_maybe_symbolic_build", "_symbolic_build", "_make_function"):
        assert hasattr(keras_trainer.TensorFlowTrainer, name)
    fit = inspect.signature(keras_trainer.TensorFlowTrainer._maybe_symbolic_build)
    assert list(fit.parameters) == ["self", "iterator", "data_batch"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_compat.check_versions()


def test_versions_that_were_not_tried_are_told():
    with pytest.warns(UserWarning, match="was tried with keras 3.12 to 3.15.*This is keras 3.99.0"):
        keras_compat.check_versions({"keras": "3.99.0", "tensorflow": tf.__version__})


@pytest.mark.parametrize(
    "name", [(keras.Model, "_nothing", ()), (keras.Model, "_symbolic_build", ("nothing",))]
)
def test_a_missing_private_name_is_an_error_with_versions(name):
    with pytest.raises(RuntimeError, match=rf"not here: {name[1]}. Received: keras .*tried"):
        keras_compat.check_versions(names=[name])


def test_installing_twice_changes_nothing():
    ours()
    first = keras_trainer.TensorFlowTrainer._maybe_symbolic_build, keras_nn._compute_moments_sync
    ours()
    second = keras_trainer.TensorFlowTrainer._maybe_symbolic_build, keras_nn._compute_moments_sync
    assert first == second


def test_stock_strategies_stay_as_they_are():
    ours()
    model = compiled(stock(), keras.optimizers.SGD)
    model.fit(*rows(8), batch_size=4, verbose=0)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        compiled(stock(), keras.optimizers.SGD).fit(*rows(15), batch_size=15, verbose=0)


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_keras_steps_are_recognized(kind, monkeypatch):
    seen = []
    original = keras_compat.step_of

    def step_of(fn):
        seen.append(original(fn))
        return seen[-1]

    monkeypatch.setattr(keras_compat, "step_of", step_of)
    model = compiled(ours(), keras.optimizers.SGD)
    x, y = rows(8)
    calls = {"train": model.fit, "test": model.evaluate}
    if kind == "predict":
        model.predict(x, batch_size=4, verbose=0)
    else:
        calls[kind](x, y, batch_size=4, verbose=0)
    assert {found for found, _ in seen} == {kind}
    assert all(found_model is model for _, found_model in seen) or kind == "predict"


def test_a_users_own_function_is_not_a_step():
    assert keras_compat.step_of(lambda data: data) == (None, None)
