"""`--estimate_memory`: what a worker would need, beside what it then takes."""

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmulti.runtime import memory
from tfmulti.train import memory_estimate
from tfmulti.train.config import TrainConfig

HERE = Path(__file__).parent
UNITS = 256


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Rich breaks the cells of a table that is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "160")


def blocks(train):
    """Four blocks of four dense layers."""
    each = [[layers.Dense(UNITS, activation="gelu") for _ in range(4)] for _ in range(4)]
    parts = [keras.Sequential([keras.Input((UNITS,)), *inner]) for inner in each]
    return keras.Sequential([keras.Input((UNITS,)), *parts, layers.Dense(3)])


def feed_forward(train):
    """Blocks of a wide layer, of which much is kept for gradients, and a narrow one."""
    given = found = keras.Input((UNITS,))
    for _ in range(4):
        block = [layers.Dense(16 * UNITS, activation="gelu"), layers.Dense(UNITS)]
        inner = keras.Sequential([keras.Input((UNITS,)), *block])
        found = layers.Add()([found, inner(found)])
    return keras.Model(given, layers.Dense(3)(found))


def one_large(train):
    """A kernel that is larger than all else."""
    return keras.Sequential([keras.Input((UNITS,)), layers.Dense(8192), layers.Dense(3)])


def many_weights(train):
    """50 million: the weights, slots and gradients are most of the memory."""
    dense = [layers.Dense(2048, activation="relu") for _ in range(12)]
    return keras.Sequential([keras.Input((UNITS,)), *dense, layers.Dense(3)])


def recurrent(train):
    reshape = layers.Reshape((8, UNITS // 8))
    return keras.Sequential([keras.Input((UNITS,)), reshape, layers.LSTM(4), layers.Dense(3)])


@functools.cache
def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(24_576, UNITS)).astype("float32")
    y = random.integers(0, 3, len(x))
    return (x, y), (x[:64], y[:64])


def config(**settings):
    defaults = {"model": "test_memory_estimate:blocks", "dataset": "test_memory_estimate:rows"}
    settings = {**defaults, "optimizer": "adam", "global_batch_size": 64, **settings}
    return TrainConfig(**{"estimate_memory": 2, **settings})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("optimizer", "share"), [("adam", 0.5), ("lamb", 0.98)])
def test_slots_of_a_large_variable_are_halved_by_rows_if_the_optimizer_allows_it(optimizer, share):
    found = memory_estimate.estimate(
        config(model="test_memory_estimate:one_large", optimizer=optimizer)
    )
    assert found["state"].slots / found["copies"].slots == pytest.approx(share, abs=0.02)
    assert found["parameters"].slots > 0.9 * found["copies"].slots


@pytest.mark.slow
def test_sums_of_gradients_are_not_divided_with_sharded_state():
    found = memory_estimate.estimate(config(gradient_accumulation_steps=2, estimate_memory=4))
    # Of Adam's three numbers for each weight, two are divided.
    share = found["state"].slots / found["copies"].slots
    assert share == pytest.approx((2 / 4 + 1) / 3, abs=0.05)


@pytest.mark.slow
def test_sharded_state_halves_slots_and_the_rest_is_the_same():
    found = memory_estimate.estimate(config())
    copies, sharded = found["copies"], found["state"]
    num_weights = 16 * (UNITS + 1) * UNITS + 3 * (UNITS + 1)
    assert copies.weights == 4 * num_weights
    # The iterations and the rate beside them.
    assert 8 * num_weights <= copies.slots <= 8 * num_weights + 16
    assert 0.5 <= sharded.slots / copies.slots < 0.6
    # The gradients of other owners are gone once they are sent.
    assert sharded.step < copies.step and sharded.process == copies.process
    assert copies.peak > sharded.peak > sharded.process > 0


@pytest.mark.slow
def test_sharded_parameters_halve_the_weights_too():
    found = memory_estimate.estimate(config(estimate_memory=4))
    copies, state, sharded = (found[name] for name in memory_estimate.SHARDED)
    assert sharded.slots == state.slots
    # The weights below 16 KiB are on every worker.
    assert 0.25 <= sharded.weights / state.weights < 0.35
    assert sharded.step < copies.step


@pytest.mark.slow
def test_checkpointed_activations_need_less_and_a_larger_batch_more():
    kept, large, less = (
        memory_estimate.estimate(config(**settings))["copies"].step
        for settings in (
            {"global_batch_size": 2048},
            {"global_batch_size": 4096},
            {"global_batch_size": 4096, "checkpoint_activations": True},
        )
    )
    assert less < 0.6 * large
    assert 1.5 * kept < large < 2 * kept


def test_a_tensor_that_is_kept_counts_to_the_end():
    noted = []

    @tf.function(autograph=False)
    def function(x):
        first = tf.matmul(x, x)
        noted.append(first)
        second = tf.matmul(first, first)
        return tf.reduce_sum(tf.matmul(second, second))

    graph = function.get_concrete_function(tf.TensorSpec([10, 10])).graph
    assert memory_estimate.peak_of(graph) == 800
    assert memory_estimate.peak_of(graph, noted) == 1200


class Small(keras.Model):
    """Two layers, which cannot be checkpointed, of a model that is not built."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(4), layers.Dense(3)

    def call(self, x):
        return self.two(self.one(x))


def small(train):
    return Small()


def sequences():
    """Sequences of a length that is known only when they are read."""

    def read():
        for number in range(256):
            yield np.ones(5, "int32"), number % 3

    signature = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)
    dataset = tf.data.Dataset.from_generator(read, output_signature=signature)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(256))
    return dataset, dataset


class OfSequences(keras.Model):
    def __init__(self):
        super().__init__()
        self.table, self.dense = layers.Embedding(10, 4), layers.Dense(3)

    def call(self, x):
        return self.dense(tf.reduce_mean(self.table(x), axis=1))


def of_sequences(train):
    return OfSequences()


def compiled(train):
    model = blocks(train)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@pytest.mark.slow
def test_a_model_that_is_not_built_and_cannot_be_checkpointed_is_estimated(capsys):
    memory_estimate.show(config(model="test_memory_estimate:small"))
    lines = [line for line in capsys.readouterr().out.splitlines() if " kept " in line]
    assert [line.split()[1] for line in lines] == ["copies", "state", "parameters"]


def test_a_model_of_sequences_that_is_not_built_is_estimated(capsys):
    here = "test_memory_estimate"
    memory_estimate.show(config(model=f"{here}:of_sequences", dataset=f"{here}:sequences"))
    assert capsys.readouterr().out.count(" kept ") == 3


@pytest.mark.slow
def test_a_model_that_is_compiled_and_one_of_the_command_line_are_estimated(capsys):
    for settings in ({"model": "test_memory_estimate:compiled"}, {"model": "mlp"}):
        memory_estimate.show(config(optimizer=None, **settings))
        shown = capsys.readouterr().out
        assert shown.count("checkpointed") == 3 and "cannot" not in shown


def test_a_batch_size_that_is_to_be_found_is_refused():
    with pytest.raises(ValueError, match="needs the number of examples. Received: estimate_mem"):
        TrainConfig(per_replica_batch_size="auto", estimate_memory=2)


class OwnStep(keras.Sequential):
    """A step in a function, with an optimizer of its own; Keras compiles it with another one."""

    def __init__(self):
        super().__init__([keras.Input((UNITS,)), layers.Dense(3)])
        self.own = keras.optimizers.Adam()

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
        weights = self.trainable_variables
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"loss": tf.reduce_mean(loss)}


def own_step(train):
    model = OwnStep()
    model.compile()
    return model


def test_slots_of_an_own_optimizer_count_and_an_own_function_is_said_to_be_left_out():
    given = {"optimizer": None, "estimate_memory": 1}
    found = memory_estimate.estimate(config(model="test_memory_estimate:own_step", **given))
    # Adam's two for each weight, and that of the default RMSprop, which Keras builds too.
    assert found["copies"].slots == pytest.approx(3 * found["copies"].weights, rel=0.02)
    assert found["copies"].has_inner_graphs
    plain = memory_estimate.estimate(config(model="test_memory_estimate:compiled", **given))
    assert not plain["copies"].has_inner_graphs


@pytest.mark.slow
def test_loops_are_said_to_be_left_out(capsys):
    memory_estimate.show(config(model="test_memory_estimate:recurrent", estimate_memory=1))
    shown = capsys.readouterr().out
    assert "Memory of each of 1 worker" in shown and "checkpointed" in shown
    assert "what they keep is not counted" in shown


DATA = ["--dataset=test_memory_estimate:rows", "--optimizer=adam", "--epochs=1"]
FLAGS = ["--model=test_memory_estimate:blocks", "--global_batch_size=8192", *DATA]
WIDE = ["--model=test_memory_estimate:feed_forward", "--global_batch_size=4096", *DATA]
MANY_WEIGHTS = ["--model=test_memory_estimate:many_weights", "--global_batch_size=1024", *DATA]
ENVIRON = {"PYTHONPATH": f"{HERE}:{HERE.parent}", "COLUMNS": "160"}


def estimated_bytes(sharded, checkpointed, *flags):
    done = subprocess.run(
        [sys.executable, "-m", "tfmulti.train", *flags],
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        check=True,
    )
    name = "checkpointed" if checkpointed else "kept"
    [line] = [each for each in done.stdout.splitlines() if sharded in each and name in each]
    number, unit = line.replace("│", " ").split()[-2:]
    return float(number) * {"MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_run_takes_what_was_estimated(checkpointed):
    flags = [*FLAGS, "--strategy=one_device", *checkpointing(checkpointed)]
    command = [sys.executable, "-m", "tfmulti.train", *flags]
    taken = 0
    with subprocess.Popen(
        command, env={**os.environ, **ENVIRON}, stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            taken = max(taken, memory.peak_of(process.pid))
            time.sleep(0.05)
    assert process.returncode == 0
    estimated = estimated_bytes("copies", checkpointed, *FLAGS, "--estimate_memory=1")
    assert 0.85 < estimated / taken < 1.15, (estimated, taken)


def checkpointing(checkpointed):
    return ["--checkpoint_activations"] if checkpointed else []


TRAIN_AND_TELL = """
from tfmulti.runtime import command_line, memory
from tfmulti.train.__main__ import main
def train():
    code = main()
    print("PEAK", memory.peak_of(), flush=True)
    return code
command_line.run_and_exit(train)
"""


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_workers_with_sharded_parameters_take_what_was_estimated(checkpointed, run_workers):
    """Their layers compute again for gradients, and keep less even without checkpointing."""
    flags = [*WIDE, "--shard=parameters", *checkpointing(checkpointed)]
    taken = taken_by_workers(run_workers, "mpi", flags)
    flags = [*WIDE, "--estimate_memory=2", "--communication=mpi"]
    estimated = estimated_bytes("parameters", checkpointed, *flags)
    assert 0.85 < estimated / taken < 1.15, (estimated, taken)


@pytest.mark.slow
@pytest.mark.parametrize("communication", ["mpi", "ring"])
@pytest.mark.parametrize("sharded", ["copies", "state", "parameters"])
def test_workers_take_what_was_estimated_for_many_weights(communication, sharded, run_workers):
    flags = MANY_WEIGHTS if sharded == "copies" else [*MANY_WEIGHTS, f"--shard={sharded}"]
    taken = taken_by_workers(run_workers, communication, flags)
    flags = [*MANY_WEIGHTS, "--estimate_memory=2", f"--communication={communication}"]
    estimated = estimated_bytes(sharded, False, *flags)
    assert 0.85 < estimated / taken < 1.15, (estimated, taken)


def taken_by_workers(run_workers, communication, flags) -> int:
    """Returns the most bytes that one of two workers took."""
    flags = [*flags, "--strategy=multi_worker", f"--communication={communication}"]
    options = ["--allocator=default", *(["--mpi"] if communication == "mpi" else [])]
    told = run_workers(2, ["-c", TRAIN_AND_TELL, *flags], env=ENVIRON, options=options)
    return max(int(text.split("PEAK ")[1].split()[0]) for text in told)
