"""Stages of a pipeline on the devices of one process: logical CPUs, or parts of one GPU."""

import collections
import contextlib
import sys
import threading
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

import tfmulti
from tfmulti import keras_compat

sys.path.append(str(Path(__file__).parent / "multi_worker"))

import pipeline_worker as worker

KIND = replicas.DEVICE
DEVICES = [f"{KIND}:1", f"{KIND}:2"]
FAST = ("dense",)
SLOW = tuple(name for name in worker.TRAINED if name not in FAST)


@pytest.fixture(autouse=True, name="floatx")
def floatx_fixture():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def create(case, devices=None, **settings):
    """Creates a model of one device, or in stages, with the same first values."""
    keras.utils.set_random_seed(1)
    strategy = replicas.create_strategy(1)
    several = isinstance(case.get("x"), dict)
    with strategy.scope():
        model = case["model"]()
        if devices:
            settings = {"micro_batches": 3, **case.get("pipeline", {}), **settings}
            model = tfmulti.pipeline(model, devices=devices, **settings)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            case.get("optimizer", lambda: keras.optimizers.SGD(0.1, momentum=0.9))(),
            {"class": loss, "sum": "mse"} if several else loss,
            metrics=None if several else ["accuracy"],
            # XLA, which stages go without, rounds in other places.
            **{} if devices else {"jit_compile": False},
            **case.get("compile", {}),
        )
    return model


def fit(model, case, epochs=2, **settings):
    data = worker.batches(model.distribute_strategy, case)
    if "callbacks" in case:
        evaluated = case.get("x", worker.NUMBERS), case.get("y", worker.CLASSES)
        settings |= {"callbacks": case["callbacks"](), "validation_data": evaluated}
    return model.fit(data, epochs=epochs, verbose=0, **settings).history


def assert_exact(case, tolerance=1e-12, **settings):
    one, stages = create(case), create(case, DEVICES, **settings)
    expected, found = fit(one, case), fit(stages, case)
    assert worker.apart(one, stages) <= tolerance
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance)
    return one, stages


def device_of(variable):
    return variable.value.device[-len(f"{KIND}:0") :]


@pytest.mark.parametrize("name", FAST)
def test_stages_give_the_result_of_one_device(name):
    _, stages = assert_exact(worker.TRAINED[name])
    held = collections.Counter(map(device_of, stages.trainable_variables))
    assert held == {f"{KIND}:1": 4, f"{KIND}:2": 4}
    for weight in stages.trainable_variables:
        start = weight.path.replace("/", "_")
        slots = [v for v in stages.optimizer.variables if v.name.startswith(start)]
        assert [device_of(slot) for slot in slots] == [device_of(weight)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_model_and_setting_gives_the_result_of_one_device(name):
    assert_exact(worker.TRAINED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "skips", "attention", "normalized", "penalties"])
def test_the_cut_alone_changes_no_bit(name):
    assert_exact(worker.TRAINED[name], tolerance=0, micro_batches=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "Muon", "Nadam", "Adafactor", "Lamb"])
def test_optimizers_update_weights_on_their_devices(kind):
    assert_exact({"model": worker.dense, "optimizer": lambda: getattr(keras.optimizers, kind)()})


@pytest.mark.parametrize("devices", [None, DEVICES])
def test_weights_excluded_from_decay_before_the_cut_stay_so(devices):
    with replicas.create_strategy(1).scope():
        model = worker.dense()
        optimizer = keras.optimizers.AdamW(0.0, weight_decay=0.5)
        biases = [v for v in model.trainable_variables if "bias" in v.path]
        optimizer.exclude_from_weight_decay(var_list=biases)
        if devices:
            model = tfmulti.pipeline(model, devices=devices)
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
    decayed = [v.path for v in model.trainable_variables if optimizer._use_weight_decay(v)]
    assert decayed == [v.path for v in model.trainable_variables if "kernel" in v.path]


def test_weights_keep_their_names_on_their_devices():
    def names(devices):
        keras.utils.clear_session()
        model = create(worker.TRAINED["dense"], devices)
        return {weight.value.name for weight in model.weights if weight.trainable}

    assert names(DEVICES) == names(None)


@contextlib.contextmanager
def running_graphs():
    """Yields the nodes of the graphs that devices run within the context, once it has ended."""
    nodes: list = []
    context.context().enable_run_metadata()
    yield nodes
    for graph in context.context().export_run_metadata().partition_graphs:
        nodes.extend(graph.node)
    context.context().disable_run_metadata()


@pytest.mark.slow
def test_weights_stay_on_their_devices_and_are_computed_with_there():
    model = create(worker.TRAINED["dense"], DEVICES)
    fit(model, worker.TRAINED["dense"], epochs=1)
    with running_graphs() as nodes:
        model.train_on_batch(worker.NUMBERS, worker.CLASSES)
    for kind, places in {
        "MatMul": set(DEVICES),
        "AssignVariableOp": {f"{KIND}:0", *DEVICES},
    }.items():
        assert {node.device[-5:] for node in nodes if node.op == kind} == places
    sent = [node.attr for node in nodes if node.op == "_Send"]
    sent = [each for each in sent if each["send_device"].s != each["recv_device"].s]
    sent = [each for each in sent if b"ControlEdges" not in each["tensor_name"].s]
    of_stages = [each for each in sent if each["send_device"].s[-5:].decode() in DEVICES]
    # For each of three micro-batches activations, outputs and a gradient; no weights.
    assert len(of_stages) == 9
    read = [each["tensor_name"].s for each in sent if b"ReadVariableOp" in each["tensor_name"].s]
    assert read and all(b"sgd" in name for name in read), "the learning rate, and no weights"


class Visits:
    """Which micro-batch has been at which layer, in which direction."""

    def __init__(self):
        self._events = collections.defaultdict(threading.Event)
        self.missed, self.number = [], 0

    def visit(self, here, awaited, number):
        """Notes a visit, and waits for one of another layer by another micro-batch."""
        number = int(number)
        self.number += 1
        self._events[(*here, number)].set()
        layer, step = awaited
        expected = (layer, here[1], number + step)
        if step and 0 <= expected[2] < 3 and not self._events[expected].wait(60):
            self.missed.append((here, expected))
        return np.float64(0)


class Visited(layers.Layer):
    """Hands its input on; each row is the number of its micro-batch."""

    def __init__(self, visits, forward, backward, **settings):
        super().__init__(**settings)
        self.visits, self.awaited = visits, {"forward": forward, "backward": backward}

    def note(self, direction, tensor, number):
        def visit(number, _):
            return self.visits.visit((self.name, direction), self.awaited[direction], number)

        # TensorFlow would leave out what nothing is computed of.
        zero = tf.numpy_function(visit, [number, tensor], tf.float64, stateful=False)
        return tensor + tf.ensure_shape(zero, [])

    def call(self, inputs):
        @tf.custom_gradient
        def hand_on(rows):
            number = rows[0, 0]
            return self.note("forward", rows, number), lambda gradient: self.note(
                "backward", gradient, number
            )

        return hand_on(inputs)

    def compute_output_shape(self, shape):
        return shape


def test_a_stage_computes_one_micro_batch_while_the_one_before_computes_the_next():
    visits, nobody = Visits(), ("", 0)
    with replicas.create_strategy(1, verify="never").scope():
        hidden = [
            layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            # The gradients of the last micro-batch come first.
            Visited(visits, nobody, ("second", -1), name="first"),
            Visited(visits, ("first", 1), nobody, name="second"),
            layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((1,)), *hidden])
        model = tfmulti.pipeline(model, stages="second", micro_batches=3, devices=DEVICES)
        model.compile("sgd", "mse")
    model.fit(np.arange(3.0)[:, None], np.ones((3, 1)), batch_size=3, shuffle=False, verbose=0)
    # Three micro-batches at two layers, forwards and back.
    assert visits.missed == [] and visits.number == 12


class Centered(layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), (layers.BatchNormalization,)])
@pytest.mark.filterwarnings("ignore:Unsynchronized batch normalization")
def test_a_layer_that_needs_the_whole_batch_is_told(others):
    def build():
        return worker.chain(
            layers.Dense(8), *(each() for each in others), Centered(), layers.Dense(8)
        )

    case = {"model": build}
    model = create(case, DEVICES)
    before = model.get_weights()
    with pytest.raises(ValueError, match="in 3 micro-batches.*Centered.*micro_batches=1"):
        fit(model, case)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.slow
def test_a_layer_that_needs_the_whole_batch_is_exact_with_one_micro_batch():
    case = {"model": lambda: worker.chain(layers.Dense(8), Centered(), layers.Dense(8))}
    assert_exact(case, tolerance=0, micro_batches=1)


class Adding(layers.Layer):
    """Adds a loss of one number for each row, one for each column, and one for all."""

    def call(self, inputs):
        self.add_loss(0.01 * tf.square(inputs))
        self.add_loss(0.01 * tf.reduce_mean(tf.square(inputs), axis=0))
        self.add_loss(0.01 * tf.reduce_mean(tf.square(inputs)))
        return inputs


@pytest.mark.slow
def test_losses_of_rows_that_a_layer_adds_are_added_up():
    assert_exact({"model": lambda: worker.chain(layers.Dense(8), Adding(), layers.Dense(8))})


class CountingInBranch(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        assign = lambda: (self.count.assign_add(1.0), True)[1]
        tf.cond(tf.reduce_sum(inputs) > -1e9, assign, lambda: False)
        return inputs


@pytest.mark.slow
def test_a_layer_that_assigns_a_variable_in_a_branch_is_refused():
    case = {"model": lambda: worker.chain(layers.Dense(8), CountingInBranch(), layers.Dense(8))}
    told = r"cannot assign a variable in a branch.* Received: \S+/variable"
    with pytest.raises(ValueError, match=f"3 micro-batches.*{told}"):
        fit(create(case, DEVICES), case)
    # Without verification the step itself tells it.
    with pytest.raises(keras_compat.AssignsInInnerGraph, match=told):
        fit(create(case, DEVICES, micro_batches=1), case)


@pytest.mark.slow
def test_a_layer_that_gathers_rows_is_refused():
    def build():
        return worker.chain(layers.Dense(8), worker.Centered(), layers.Dense(8))

    with pytest.raises(ValueError, match="3 micro-batches. .*gather_batch in a layer's call"):
        fit(create({"model": build}, DEVICES), {})
    # Without verification the step itself tells it.
    with pytest.raises(RuntimeError, match="Received: gather_batch in a layer's call"):
        fit(create({"model": build}, DEVICES, micro_batches=1), {})


@pytest.mark.slow
def test_batch_normalization_by_micro_batch_is_told():
    case = worker.TRAINED["normalized"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(create(case, DEVICES, micro_batches=3), case, epochs=1)
    assert any("each micro-batch alone" in str(each.message) for each in told)


@pytest.mark.slow
def test_dropout_draws_for_each_micro_batch_and_with_one_as_on_one_device():
    noisy = [layers.Dropout(0.5, seed=3), layers.Dense(32), layers.Dropout(0.5, seed=4)]
    case = {"model": lambda: worker.chain(*(type(x).from_config(x.get_config()) for x in noisy))}
    assert_exact(case, tolerance=0, micro_batches=1)
    strategy = replicas.create_strategy(1)
    with strategy.scope():
        hidden = [layers.Dropout(0.5, seed=3), layers.Rescaling(1.0)]
        model = keras.Sequential([keras.Input((64,)), *hidden])
        tfmulti.pipeline(model, micro_batches=2, devices=DEVICES)
    rows = strategy.run(tf.function(lambda: model(tf.ones((4, 64)), training=True))).numpy()
    assert (rows[:2] != rows[2:]).any()
    [seed] = model.variables
    assert seed.numpy().tolist() == [3, 1]


def test_a_model_whose_input_skips_a_stage_is_saved(tmp_path):
    given = keras.Input((8,))
    hidden = layers.Dense(8)(layers.Dense(8, "tanh")(given))
    case = {
        "model": lambda: keras.Model(given, layers.Dense(3)(layers.Concatenate()([hidden, given])))
    }
    stages = create(case, DEVICES)
    stages.save(tmp_path / "saved.keras")
    loaded = keras.models.load_model(tmp_path / "saved.keras")
    assert worker.apart(stages, loaded) == 0


@pytest.mark.slow
def test_evaluates_predicts_saves_and_exports(tmp_path):
    case = worker.TRAINED["dense"]
    one, stages = create(case), create(case, DEVICES)
    fit(one, case)
    fit(stages, case, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "best.keras")])
    data = worker.NUMBERS, worker.CLASSES
    expected = one.predict(worker.NUMBERS, verbose=0)
    np.testing.assert_allclose(one.evaluate(*data, verbose=0), stages.evaluate(*data, verbose=0))
    np.testing.assert_allclose(stages.predict(worker.NUMBERS, verbose=0), expected, atol=1e-12)
    np.testing.assert_allclose(stages.predict_on_batch(worker.NUMBERS), expected, atol=1e-12)
    np.testing.assert_allclose(stages(worker.NUMBERS), expected, atol=1e-12)
    for name in ("best.keras", "saved.keras"):
        stages.save(tmp_path / "saved.keras")
        loaded = keras.models.load_model(tmp_path / name)
        np.testing.assert_allclose(loaded.predict(worker.NUMBERS, verbose=0), expected, atol=1e-12)
    stages.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    found = exported.serve(tf.constant(worker.NUMBERS))
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.slow
def test_resumes_in_stages_and_without(tmp_path):
    case = worker.TRAINED["dense"]

    def fitted(where, epochs, devices):
        model = create(case, devices)
        data = worker.batches(model.distribute_strategy, case)
        checkpoint = tfmulti.callbacks.Checkpoint(tmp_path / where, data)
        model.fit(data, epochs=epochs, verbose=0, callbacks=[checkpoint])
        return model

    whole = fitted("whole", 4, DEVICES)
    fitted("stages", 2, DEVICES)
    fitted("one", 2, None)
    assert worker.apart(whole, fitted("stages", 4, DEVICES)) == 0
    assert worker.apart(whole, fitted("one", 4, DEVICES)) < 1e-12


def test_a_state_for_each_row_is_kept_with_one_micro_batch_and_else_refused():
    def build():
        recurrent = layers.SimpleRNN(8, stateful=True)
        return keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), recurrent, layers.Dense(3)])

    with pytest.raises(ValueError, match="simple_rnn.*, stateful=True, micro_batches=3. Use micro"):
        create({"model": build}, DEVICES)
    x, models = np.random.RandomState(0).rand(16, 5, 3), []
    for devices in (None, DEVICES):
        model = create({"model": build}, devices, **({"micro_batches": 1} if devices else {}))
        model.fit(x, np.arange(16) % 3, batch_size=4, shuffle=False, verbose=0)
        models.append(model)
    assert worker.apart(*models) <= 1e-12


def test_what_cannot_be_is_told():
    def told(**settings):
        with replicas.create_strategy(1).scope(), pytest.raises(ValueError) as caught:
            tfmulti.pipeline(worker.dense(), **settings)
        return str(caught.value)

    assert f"Received: devices=['{KIND}:1', '{KIND}:2'], 3 stages" in told(
        devices=DEVICES, stages=3
    )
    assert f"Received: devices=['{KIND}:1', '{KIND}:9']" in told(devices=[f"{KIND}:1", f"{KIND}:9"])
    assert f"Received: devices=['{KIND}:1', '{KIND}:1']" in told(devices=[f"{KIND}:1", f"{KIND}:1"])
    assert f"two devices or more, one for each stage. Received: devices=['{KIND}:1']" in told(
        devices=[f"{KIND}:1"]
    )
    assert f"devices='{KIND}:1'. Write devices=['{KIND}:1']" in told(devices=f"{KIND}:1")
    assert ", 3 stages" in told(devices=DEVICES, stages=np.int64(3))
    assert "a whole number from 2. Received: stages=2.0" in told(devices=DEVICES, stages=4 / 2)
    assert "Received: stages=1, 2 devices." in told(devices=DEVICES, stages=1)
    with replicas.create_strategy(1).scope():
        small = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        with pytest.raises(ValueError, match="with 1. Use fewer stages, on fewer workers or dev"):
            tfmulti.pipeline(small, devices=DEVICES)
    with replicas.create_strategy(2).scope(), pytest.raises(ValueError, match="with 2 replicas"):
        tfmulti.pipeline(worker.dense(), devices=DEVICES)


def test_devices_have_the_names_that_tensorflow_gives_them():
    full = [f"/job:localhost/replica:0/task:0/device:{name}" for name in DEVICES]
    with replicas.create_strategy(1).scope():
        model = tfmulti.pipeline(worker.dense(), devices=full)
    assert set(map(device_of, model.trainable_variables)) == set(DEVICES)
    for strange in ([f"/job:worker/replica:0/task:1/device:{KIND}:1", f"{KIND}:2"], [1, 2], 2, []):
        with replicas.create_strategy(1).scope(), pytest.raises(ValueError, match="`devices` must"):
            tfmulti.pipeline(worker.dense(), devices=strange)


def noisy_twice(layer):
    given = keras.Input((64,))
    return keras.Model(given, layer(layers.Dense(64)(layers.Dense(64)(layer(given)))))


@pytest.mark.parametrize(
    ("layer", "state"),
    [(layers.Dropout, {"rate": 0.5}), (layers.BatchNormalization, {})],
)
def test_state_that_two_stages_change_is_told_at_once(layer, state):
    with replicas.create_strategy(1).scope():
        model = noisy_twice(layer(**state))
        own = model.call
        with pytest.raises(ValueError, match="cannot update the same state.*(seed_gen|moving_m)"):
            tfmulti.pipeline(model, devices=DEVICES)
    # The model is as it was.
    assert model.call == own
    assert {device_of(variable) for variable in model.variables} == {f"{KIND}:0"}


@pytest.mark.slow
def test_state_that_two_stages_have_and_do_not_change_is_no_error():
    with replicas.create_strategy(1).scope():
        frozen = layers.BatchNormalization(trainable=False)
        model = tfmulti.pipeline(noisy_twice(frozen), devices=DEVICES)
        model.compile("sgd", "mse")
    assert model.fit(worker.NUMBERS, worker.NUMBERS, verbose=0).history["loss"]


@pytest.mark.slow
def test_state_that_two_stages_come_to_change_is_told():
    with replicas.create_strategy(1).scope():
        frozen = layers.BatchNormalization(trainable=False)
        model = tfmulti.pipeline(noisy_twice(frozen), devices=DEVICES)
        frozen.trainable = True
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="moving_mean"):
        model.fit(worker.NUMBERS, worker.NUMBERS, verbose=0)


@pytest.mark.slow
def test_no_device_has_the_whole_model_while_it_is_created():
    strategy, large = tfmulti.create_strategy("one_device", devices=[f"{KIND}:3"]), 64
    with strategy.scope(), tfmulti.sharded_parameters():
        keras.utils.set_random_seed(1)
        hidden = [layers.Dense(large, name=f"layer_{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((large,)), *hidden])
        assert {device_of(layer.kernel) for layer in hidden} == {f"{KIND}:0"}
        tfmulti.pipeline(model, stages="layer_2", devices=DEVICES)
        other = keras.Sequential([keras.Input((large,)), layers.Dense(large)])
    places = [device_of(layer.kernel) for layer in hidden]
    assert places == [f"{KIND}:1", f"{KIND}:1", f"{KIND}:2"]
    assert device_of(other.layers[0].kernel) == f"{KIND}:3"
    keras.utils.set_random_seed(1)
    expected = keras.Sequential([keras.Input((large,)), *(layers.Dense(large) for _ in range(3))])
    assert worker.apart(model, expected) == 0


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="must be a Keras model. Received: model='x'"):
        tfmulti.pipeline("x", devices=[f"{KIND}:0"])


def test_a_layer_that_assigns_a_weight_in_its_call_is_refused():
    with replicas.create_strategy(1).scope():
        hidden = [layers.SpectralNormalization(layers.Dense(4)) for _ in range(2)]
        model = keras.Sequential([keras.Input((4,)), *hidden])
        with pytest.raises(
            ValueError, match="cannot assign to a weight .* Received: .*dense/kernel"
        ):
            tfmulti.pipeline(model, devices=[f"{KIND}:0", f"{KIND}:1"])


class Halving(layers.Layer):
    """Assigns its weight in each call."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.scale.assign(self.scale / 2)
        return x * self.scale


def test_a_layer_of_the_users_own_that_does_so_is_refused_before_it_trains():
    with replicas.create_strategy(1).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Halving(), layers.Dense(1)])
        tfmulti.pipeline(model, devices=[f"{KIND}:0", f"{KIND}:1"])
        model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(ValueError, match="cannot assign to a weight"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)


class Scale(layers.Layer):
    """Its variable is TensorFlow's, which Keras does not know."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = tf.Variable(2.0)

    def call(self, x):
        return x * tf.cast(self.scale, x.dtype)


@pytest.mark.parametrize("by", ["layer", "closure"])
def test_a_variable_that_is_no_weight_is_refused_by_its_name(by):
    with replicas.create_strategy(1, verify="never").scope():
        scale = keras.Variable(2.0, name="own")
        layer = Scale(name="it") if by == "layer" else layers.Lambda(lambda x: x * scale, name="it")
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layer, layers.Dense(1)])
        tfmulti.pipeline(model, devices=[f"{KIND}:0", f"{KIND}:1"])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="that are its weights. .*, read in .*it.*add_weight"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def test_activations_are_checkpointed_by_the_pipeline_alone():
    with replicas.create_strategy(1).scope():
        dense = [layers.Dense(4) for _ in range(4)]
        model = keras.Sequential([keras.Input((4,)), *dense])
        staged = tfmulti.pipeline(
            keras.models.clone_model(model), devices=[f"{KIND}:0", f"{KIND}:1"]
        )
        with pytest.raises(ValueError, match="which tfmulti.pipeline has cut"):
            tfmulti.checkpoint_activations(staged)
        for name in ("dense*", None):
            again = tfmulti.checkpoint_activations(keras.models.clone_model(model), name)
            with pytest.raises(ValueError, match="whose activations are checkpointed"):
                tfmulti.pipeline(again, devices=[f"{KIND}:0", f"{KIND}:1"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draws", [tf.random.normal, keras.random.normal])
@pytest.mark.parametrize("again", [True, False])
def test_a_stage_that_runs_again_draws_the_same_numbers_or_is_refused(draws, again):
    """The gradient of a sample belonged to other noise than the sample."""
    with replicas.create_strategy(1, verify="never").scope():
        noisy = layers.Lambda(lambda x: x + draws(tf.shape(x), dtype=x.dtype))
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), noisy, layers.Dense(1)])
        devices = [f"{KIND}:0", f"{KIND}:1"]
        tfmulti.pipeline(model, devices=devices, checkpoint_activations=again)
        model.compile("sgd", "mse")
    is_refused = again and draws is tf.random.normal
    with (
        pytest.raises(ValueError, match="same both times. .*, which uses RandomStandardNormal")
        if (is_refused)
        else contextlib.nullcontext()
    ):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [worker.OfSteepWeights, worker.Penalized])
def test_a_second_derivative_is_refused(kind):
    case = {"model": lambda: worker.stepping(kind)}
    with pytest.raises(RuntimeError, match="A pipeline does not support second derivatives"):
        fit(create(case, DEVICES), case)


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(make, devices, optimizer, loss):
    """A model on one device, or in stages on several."""
    keras.utils.set_random_seed(1)
    with replicas.create_strategy(1).scope():
        model = make()
        if devices:
            model = tfmulti.pipeline(model, devices=devices, micro_batches=3)
        model.compile(optimizer, loss, jit_compile=False)
    return model


def test_inputs_are_found_by_their_names():
    def two_inputs():
        # Their order is not that of their names.
        user, item = keras.Input((8,), name="user"), keras.Input((8,), name="item")
        one = layers.Concatenate()([layers.Dense(8)(user), item])
        return keras.Model([user, item], layers.Dense(3)(layers.Dense(8)(one)))

    x = {"user": worker.NUMBERS[:, :8], "item": worker.NUMBERS[:, 8:16]}
    # A feature of strings that no input takes is none of the pipeline's.
    x["a"] = tf.constant(["text"] * len(worker.NUMBERS))
    models = []
    for devices in (None, DEVICES):
        model = compiled(two_inputs, devices, "sgd", CROSS_ENTROPY)
        model.fit(x, worker.CLASSES, batch_size=16, shuffle=False, verbose=0)
        models.append(model)
    assert worker.apart(*models) <= 1e-12


@pytest.mark.slow
def test_normalization_that_is_unfrozen_later_updates_its_statistics():
    models = []
    for devices in (None, DEVICES):
        keras.utils.set_random_seed(1)
        with replicas.create_strategy(1).scope():
            model = worker.normalized()
            norms = [x for x in model.layers if isinstance(x, layers.BatchNormalization)]
            for each in norms:
                each.trainable = False
            if devices:
                model = tfmulti.pipeline(model, devices=devices, micro_batches=1)
        for trainable in (False, True):
            for each in norms:
                each.trainable = trainable
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, jit_compile=False)
            rows = worker.NUMBERS, worker.CLASSES
            model.fit(*rows, batch_size=16, shuffle=False, verbose=0)
        assert all(np.abs(each.moving_mean.numpy()).max() > 1e-3 for each in norms)
        models.append(model)
    assert worker.apart(*models) <= 1e-12


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_penalty_that_a_layer_gets_between_two_compiles_holds_in_its_stage(eager):
    models = []
    for devices in (None, DEVICES):
        keras.utils.set_random_seed(1)
        with replicas.create_strategy(1, verify="never").scope():
            model = worker.dense()
            if devices:
                model = tfmulti.pipeline(model, devices=devices, micro_batches=1)
        for penalty in (None, keras.regularizers.L2(0.1)):
            model.layers[1].activity_regularizer = penalty
            model.compile("sgd", CROSS_ENTROPY, jit_compile=False, run_eagerly=eager)
            rows = worker.NUMBERS, worker.CLASSES
            model.fit(*rows, batch_size=16, shuffle=False, verbose=0)
        models.append(model)
    assert worker.apart(*models) <= 1e-12


@pytest.mark.slow
def test_dropout_that_begins_at_a_later_compile_draws_anew_at_each_step():
    with replicas.create_strategy(1, verify="never").scope():
        drop = layers.Dropout(0.5, seed=3)
        model = keras.Sequential([keras.Input((64,)), drop, layers.Dense(8), layers.Dense(3)])
        tfmulti.pipeline(model, devices=DEVICES, micro_batches=2)
    for rate, number in ((0.0, 0), (0.5, 3)):
        drop.rate = rate
        model.compile("sgd", CROSS_ENTROPY)
        model.fit(worker.NUMBERS, worker.CLASSES, batch_size=16, shuffle=False, verbose=0)
        assert drop.seed_generator.state.numpy().tolist() == [3, number]


def test_a_layer_that_is_added_after_the_cut_is_refused():
    with replicas.create_strategy(1).scope():
        model = tfmulti.pipeline(worker.dense(), devices=DEVICES)
        model.add(layers.Dense(3, name="added"))
        model.compile("sgd", CROSS_ENTROPY)
    with pytest.raises(ValueError, match="must keep its layers.*added"):
        model.fit(worker.NUMBERS, worker.CLASSES, verbose=0)


def test_lora_that_is_enabled_after_the_cut_is_refused():
    with replicas.create_strategy(1).scope():
        model = tfmulti.pipeline(worker.dense(), devices=DEVICES)
        model.layers[0].enable_lora(2)
        model.compile("sgd", CROSS_ENTROPY)
    with pytest.raises(ValueError, match="must keep its weights.*lora.*before `pipeline`"):
        model.fit(worker.NUMBERS, worker.CLASSES, verbose=0)


@pytest.mark.slow
def test_lora_that_is_enabled_before_the_cut_trains():
    with replicas.create_strategy(1).scope():
        model = worker.dense()
        model.layers[0].enable_lora(2)
        model = tfmulti.pipeline(model, devices=DEVICES)
        model.compile("sgd", CROSS_ENTROPY)
    model.train_on_batch(worker.NUMBERS, worker.CLASSES)


@pytest.mark.slow
def test_a_weight_that_no_loss_depends_on_is_not_updated():
    """Not even by weight decay, which Keras applies to each weight that has a gradient."""

    def two_heads():
        given = keras.Input((8,))
        one = layers.Dense(8)(layers.Dense(8)(given))
        heads = layers.Dense(3, name="a")(one), layers.Dense(3, name="b")(one)
        return keras.Model(given, heads)

    models, rows = [], worker.NUMBERS[:, :8]
    for devices in (None, DEVICES):
        optimizer = keras.optimizers.AdamW(weight_decay=0.1)
        model = compiled(two_heads, devices, optimizer, [CROSS_ENTROPY, None])
        before = model.get_layer("b").kernel.numpy()
        with pytest.warns(UserWarning, match="Gradients do not exist for variables .*b/kernel"):
            model.fit(rows, [worker.CLASSES] * 2, batch_size=16, shuffle=False, verbose=0)
        np.testing.assert_array_equal(model.get_layer("b").kernel.numpy(), before)
        models.append(model)
    assert worker.apart(*models) <= 1e-12


def test_a_model_that_shares_layers_predicts_with_their_weights_once_they_have_moved():
    strategy, rows = replicas.create_strategy(1), np.ones((2, 4))
    with strategy.scope():
        given = keras.Input((4,))
        hidden = layers.Dense(4)(given)
        encoder = keras.Model(given, hidden)
    # In a scope TensorFlow would trace for that scope.
    before = encoder.predict(rows, verbose=0)
    with strategy.scope():
        model = tfmulti.pipeline(keras.Model(given, layers.Dense(1)(hidden)), devices=DEVICES)
    model.set_weights([2 * weight for weight in model.get_weights()])
    np.testing.assert_array_equal(encoder.predict(rows, verbose=0), 2 * before)


class Balanced(layers.Layer):
    """Keeps a loss in an attribute."""

    def call(self, x):
        self.balance = keras.ops.mean(keras.ops.square(x))
        return x


class AddsBalance(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) + self.get_layer("gate").balance


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_of_a_tensor_that_a_layer_keeps_is_refused_by_its_name(micro_batches):
    # The check of two micro-batches would tell the same in its own words.
    with replicas.create_strategy(1, verify="never").scope():
        given = keras.Input((4,))
        hidden = Balanced(name="gate")(layers.Dense(4)(given))
        model = AddsBalance(given, layers.Dense(1)(layers.Dense(4)(hidden)))
        tfmulti.pipeline(model, micro_batches=micro_batches, devices=DEVICES)
        model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="Received: gate.balance, of which code outside"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def test_a_tensor_that_a_layer_keeps_is_read_without_a_gradient():
    class Reads(keras.Model):
        def compute_metrics(self, *args, **kwargs):
            logs = super().compute_metrics(*args, **kwargs)
            return {**logs, "balance": self.get_layer("gate").balance}

    with replicas.create_strategy(1).scope():
        given = keras.Input((4,))
        hidden = layers.Dense(4)(Balanced(name="gate")(given))
        model = Reads(given, layers.Dense(1)(hidden))
        tfmulti.pipeline(model, micro_batches=1, devices=DEVICES)
        model.compile("sgd", "mse")
    assert model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0).history["balance"] == [1]
