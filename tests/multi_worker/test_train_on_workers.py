"""The command line on real workers on loopback."""

import json
import re
import sys

import keras
import numpy as np
import pytest

from tfmulti.runtime import processes
from tfmulti.train import loop
from tfmulti.train.config import TrainConfig

DIGEST = re.compile(r"^worker (\d): weights_sha256=([0-9a-f]{64})$", re.MULTILINE)

EVENTS = [
    "began: 3 epochs",
    "epoch 1/3 done",
    "saved step 23",
    "epoch 2/3 done",
    "saved step 46",
    "epoch 3/3 done",
    "saved step 69",
    "training has ended",
    "weights_sha256",
]


def told_by(name, text):
    """The beginnings of a worker's lines; before most of them the launcher writes its name."""
    lines = [line.removeprefix(f"{name}: ") for line in text.splitlines()]
    return [re.match(r"[\w ]+(: 3 epochs|/3 done)?", line)[0] for line in lines]


def weights_of(folder):
    model = keras.models.load_model(folder / "model.keras")
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_device")
    config = TrainConfig(strategy="one_device", optimizer="sgd", epochs=3, workdir=str(folder))
    loop.train_and_evaluate(config, print_fn=lambda line: None)
    return folder


@pytest.mark.parametrize(
    ("num_workers", "logical_cpus"), [(2, 0), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_workers_end_where_one_device_ends(
    run_workers, tmp_path, one_device, num_workers, logical_cpus
):
    command = ["-m", "tfmulti.train", "--strategy=multi_worker", "--optimizer=sgd", "--epochs=3"]
    flags = [f"--workdir={tmp_path}", f"--logical_cpus={logical_cpus}", "--audit_shards"]
    done = run_workers(num_workers, [*command, *flags])
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["num_workers"], result["num_replicas"]) == (
        num_workers,
        num_workers * max(logical_cpus, 1),
    )
    digests = [DIGEST.search(text) for text in done]
    assert [int(found[1]) for found in digests] == list(range(num_workers))
    assert {found[2] for found in digests} == {result["weights_sha256"]}
    np.testing.assert_allclose(weights_of(tmp_path), weights_of(one_device), rtol=0, atol=1e-6)
    expected = json.loads((one_device / "result.json").read_text())
    assert result["examples"] == expected["examples"]
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, abs=1e-6)
    # Progress and the table are the chief's; the others tell of their events.
    assert "validation accuracy" in done[0]
    assert done[0].count("each row once") == 3
    assert re.findall(r"^Epoch (\d)/3 - ", done[0], re.MULTILINE) == ["1", "2", "3"]
    assert done[0].replace("\n", "").isprintable()
    for number, text in enumerate(done[1:], start=1):
        assert told_by(f"worker {number}", text) == EVENTS
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".finished",
        "history.csv",
        "logs",
        "model.keras",
        "result.json",
    ]


@pytest.mark.slow
def test_a_chief_with_workers(tmp_path, free_ports):
    ports = free_ports(2)
    cluster = {"chief": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    configs = [
        json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        for kind in ("chief", "worker")
    ]
    command = [sys.executable, "-m", "tfmulti.train", "--epochs=1", f"--workdir={tmp_path}"]
    chief, worker = processes.run_together(command, [{"TF_CONFIG": each} for each in configs])
    assert (chief.how, worker.how) == ("done", "done"), chief.stderr + worker.stderr
    assert "chief 0: weights_sha256=" in chief.stdout
    assert "worker 0: weights_sha256=" in worker.stdout
    assert json.loads((tmp_path / "result.json").read_text())["num_workers"] == 2


USERS_CODE = """
import random
import keras, numpy as np, tensorflow as tf

def data():
    rng = np.random.RandomState(0)
    x = {"a": rng.randn(37, 3).astype("float32"), "b": rng.randn(37, 2).astype("float32")}
    y = x["a"].sum(1) - x["b"].sum(1)
    return (x, y), (x, y)

class CustomStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.dense(keras.ops.concatenate([x["a"], x["b"]], axis=1))

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        error = tf.square(tf.cast(y, tf.float32) - self(x)[:, 0])
        self.tracker.update_state(error)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        x, y = data
        self.tracker.update_state(tf.square(tf.cast(y, tf.float32) - self(x)[:, 0]))
        return {"loss": self.tracker.result()}

def model(train):
    # Another seed on every worker must not matter.
    keras.utils.set_random_seed(random.SystemRandom().randrange(2**31))
    own = CustomStep()
    own.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), keras.losses.MeanSquaredError())
    return own
"""


@pytest.mark.slow
def test_a_users_own_train_step_with_different_seeds(run_workers, tmp_path):
    (tmp_path / "theirs.py").write_text(USERS_CODE)
    flags = ["--model=theirs:model", "--dataset=theirs:data", "--global_batch_size=8"]
    command = ["-m", "tfmulti.train", "--epochs=2", f"--workdir={tmp_path / 'out'}", *flags]
    done = run_workers(2, command, env={"PYTHONPATH": str(tmp_path)})
    digests = {DIGEST.search(text)[2] for text in done}
    assert len(digests) == 1
