"""The largest batch that fits, found by trying; and the numbers that a run comes to."""

import dataclasses

import keras
import numpy as np
import pytest
from replicas import create_strategy, not_on_gpu

import tfmulti
from tfmulti.runtime import memory
from tfmulti.train import batch_size as search
from tfmulti.train import models, run_reporter
from tfmulti.train.batch_size import SizeTrial
from tfmulti.train.config import TrainConfig


def machine(room, cap=100_000):
    """A process that can hold so many examples; and the lists of sizes that it was asked for."""
    asked = []

    def attempt(sizes):
        asked.append(sizes)
        sizes = [min(size, cap) for size in sizes]
        fit = [size for size in sizes if size <= room]
        failed = next((size for size in sizes if size > room), None)
        return SizeTrial(max(fit, default=0), 0, failed, cap)

    return attempt, asked


@pytest.mark.parametrize(
    ("room", "found"), [(100, 96), (8, 8), (7, 7), (1, 1), (3, 3), (1000, 960), (10**6, 8192)]
)
def test_the_largest_that_fits_is_found(room, found):
    attempt, asked = machine(room)
    best = search.search(attempt)
    assert best.size == found
    assert best.size <= room
    # It is at least seven eighths of the room, or as large as it may be.
    assert best.size >= min(room, search.LARGEST) * 7 / 8
    assert len(asked) <= 6


def test_a_small_data_set_bounds_it():
    attempt, _ = machine(10**6, cap=89)
    assert search.search(attempt).size == 89


def test_where_one_example_does_not_fit_it_is_said():
    with pytest.raises(RuntimeError, match="One example per replica must fit in memory"):
        search.search(machine(0)[0])


AUTO = TrainConfig(strategy="one_device", model="mlp", per_replica_batch_size="auto", epochs=1)


@pytest.mark.slow
@not_on_gpu("is about the memory of the host")
def test_a_process_of_its_own_trains_and_tells_its_memory():
    tried = search.try_in_child_process(AUTO, [8, 16, 8192], 1, 1, None)
    # 1,437 digits, of which an epoch keeps eight steps.
    assert (tried.size, tried.cap, tried.too_large) == (179, 179, None)
    assert tried.peak > 100e6


@pytest.mark.slow
@not_on_gpu("is about the memory of the host")
def test_a_limit_ends_the_process_and_another_error_is_told():
    tried = search.try_in_child_process(AUTO, [8], 1, 1, int(60e6))
    assert (tried.size, tried.too_large) == (0, 8)
    wrong = dataclasses.replace(AUTO, model="math:sqrt")
    with pytest.raises(
        RuntimeError, match="runs some training steps, which must not fail. Received: "
    ):
        search.try_in_child_process(wrong, [8], 1, 1, None)


def test_all_workers_take_the_smallest(monkeypatch):
    strategy = create_strategy(2)
    found = SizeTrial(96, 10**9, 128, 500)
    monkeypatch.setattr(search, "_find", lambda *_: (found, 2 * 10**9))
    # As if another worker had found 64.
    monkeypatch.setattr(search.coordination, "min_and_max", lambda _, n: (min(n, 64), min(n, 64)))
    lines = []
    config = search.resolve_batch_size(AUTO, strategy, lines.append)
    assert config.resolve_global_batch_size(2) == 128
    assert lines == ["per_replica_batch_size=auto: 64 (as another worker found)"]


def test_a_run_that_goes_on_keeps_its_batch_size(tmp_path, monkeypatch):
    strategy = create_strategy(1)
    train = tfmulti.distribute_train(tfmulti.load_dataset("digits")[0], strategy, 100, seed=0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    saver = tfmulti.callbacks.Checkpoint(tmp_path / "checkpoints", train)
    model.fit(train, verbose=0, callbacks=[saver])
    config = dataclasses.replace(AUTO, workdir=str(tmp_path))
    never = dataclasses.replace(config, resume="never")
    assert search._kept_batch_size(never) == 0
    monkeypatch.setenv("TFMULTI_RESTARTS", "1")
    for each in (config, never):
        lines = []
        kept = search.resolve_batch_size(each, strategy, lines.append)
        assert kept.global_batch_size == 100
        assert lines == ["per_replica_batch_size=auto: global batch size 100, as in the checkpoint"]


@not_on_gpu("a GPU has memory of its own")
def test_the_limit_is_given_or_half_of_what_there_is():
    strategy = create_strategy(1)
    limited = dataclasses.replace(AUTO, memory_limit="2GB")
    assert search.find_limit(limited, strategy) == 2 * 10**9
    assert search.find_limit(AUTO, strategy) == memory.available() // 2


@pytest.mark.parametrize(
    "settings",
    [
        {"per_replica_batch_size": "many"},
        {"per_replica_batch_size": 2.5},
        {"per_replica_batch_size": True},
        {"per_replica_batch_size": 0},
        {"per_replica_batch_size": "auto", "global_batch_size": 8},
        {"per_replica_batch_size": "auto", "memory_limit": "4"},
        {"per_replica_batch_size": 8, "memory_limit": "4GB"},
        {"memory_limit": "4GB"},
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings):
    with pytest.raises(ValueError, match="Received: "):
        TrainConfig(**settings)


def test_auto_is_no_number_by_itself():
    with pytest.raises(ValueError, match="must be a number here"):
        AUTO.resolve_global_batch_size(2)


def test_a_container_may_have_less_than_its_host(tmp_path):
    # A batch system limits a group within others, not the root.
    inner = tmp_path / "sys/fs/cgroup/job_7/step_0"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job_7/step_0\n")
    assert memory.available(tmp_path) == 16_000_000 * 1024
    (inner / "memory.max").write_text("max\n")
    assert memory.available(tmp_path) == 16_000_000 * 1024
    (inner.parent / "memory.max").write_text("1000000\n")
    assert memory.available(tmp_path) == 1_000_000


def numbers_of(num_replicas=2, num_workers=1, author_compiles=False, **settings):
    strategy = create_strategy(num_replicas)
    config = TrainConfig(strategy="mirrored", **settings)
    size = config.resolve_global_batch_size(num_replicas)
    data = np.zeros((100, 4), "float32"), np.zeros(100, "int64")
    train = tfmulti.distribute_train(data, strategy, size, seed=0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        if author_compiles:
            model.compile(keras.optimizers.SGD(0.5), "mse")
        rate = models.compile_model(model, config, train)
    return run_reporter.RunSettings(config, train.plan, num_workers, model, rate)


def test_the_numbers_of_a_run_and_both_conventions():
    made = numbers_of(
        2,
        per_replica_batch_size=16,
        optimizer="sgd",
        learning_rate=0.1,
        learning_rate_scaling="linear",
        base_batch_size=8,
        warmup_epochs=2.0,
        epochs=5,
    )
    assert (made.per_replica_batch_size, made.per_worker_batch_size) == (16, 32)
    assert (made.base_learning_rate, made.learning_rate) == (0.1, pytest.approx(0.4))
    rows = made.rows()
    assert "PyTorch" in rows["batch per replica"]
    assert "tf.distribute" in rows["global batch"]
    assert rows["learning rate"] == "0.4 (sgd): 0.1 for a base batch of 8, linear rule"
    assert rows["warm-up"] == "2 epochs"
    assert rows["steps"] == "20: 5 epochs of 4, 100 examples"


def test_the_numbers_of_several_workers_and_uneven_replica_batches():
    made = numbers_of(4, 2, global_batch_size=30, gradient_accumulation_steps=3)
    assert (made.per_replica_batch_size, made.per_worker_batch_size) == (8, 16)
    rows = made.rows()
    assert rows["batch per replica"].startswith("at most 8 ")
    assert rows["batch per worker"] == "at most 16, 2 replicas"
    assert rows["batch per update"] == "90 (3 steps)"


def test_the_rate_of_a_model_that_its_author_compiled():
    made = numbers_of(author_compiles=True)
    assert (made.base_learning_rate, made.learning_rate) == (None, 0.5)
    assert made.rows()["learning rate"] == "0.5 (sgd), as the model was compiled"
