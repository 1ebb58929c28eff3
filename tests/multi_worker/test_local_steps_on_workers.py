"""Local steps on workers: what one device computes of each worker's rows, averaged by NumPy."""

import collections
import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import tfmulti
from tfmulti.train import loop
from tfmulti.train.config import TrainConfig

HERE = Path(__file__).parent

import local_steps_worker as worker

PROGRAM = "local_steps_worker"
SLOW = (
    "scaled 4",
    "adamw 2",
    "momentum 3",
    "accumulation 4",
    "averages 4",
    "schedule 2",
    "rmsprop 100",
)


@pytest.fixture(scope="module", name="fast")
def fast_fixture(over_the_ring):
    return over_the_ring(PROGRAM)


@pytest.fixture(scope="module", name="slow")
def slow_fixture(run_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    return folder, run_cases(folder, SLOW)


@pytest.fixture(scope="module", name="own")
def own_fixture(run_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    parts = (
        ["own steps"],
        ["dice", "skips", "overflows", "metrics", "shared", "frozen"],
        ["alike"],
    )
    runs = [run_cases(folder, names) for names in parts]
    return [dict(collections.ChainMap(*found)) for found in zip(*runs)]


@pytest.fixture(scope="module", name="life")
def life_fixture(run_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    return folder, run_cases(folder, ["life"])


def saved(folder, name, num_workers=2):
    files = [np.load(folder / f"{name}_{number}.npz") for number in range(num_workers)]
    return [[file[f"arr_{place}"] for place in range(len(file.files))] for file in files]


def assert_is_local(folder, seen, case, num_workers=2):
    """All workers end with the same bits, which are those of local SGD."""
    name, _, every = case.partition(" ")
    expected, losses = worker.reference(name, int(every), num_workers)
    first, *others = saved(folder, case, num_workers)
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    for mine, theirs in zip(first, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
    for each in seen:
        # Running means are float32.
        np.testing.assert_allclose(each[case]["history"]["loss"], losses, rtol=1e-6)
        assert each[case]["history"] == seen[0][case]["history"]
        [told] = each[case]["told"]
        assert f"synchronize_every={every}" in told and "differs from that of one device" in told


def test_workers_train_apart_and_average(fast):
    assert_is_local(*fast, "adam 4")
    # It is something else than what one device computes.
    folder, _ = fast
    one, _ = saved(folder, "adam 4")
    whole, _ = worker.reference("adam", 1, num_workers=1)
    assert max(np.abs(a - b).max() for a, b in zip(one, whole)) > 1e-4


@pytest.mark.slow
def test_one_step_is_what_it_was_and_each_worker_draws_its_own_numbers(own):
    one, other = (each["alike"] for each in own)
    assert one["padded"] and other["padded"]
    assert one["same"] and other["same"] and one["counts"] and other["counts"]
    assert 8 < sum(one["mask"]) < 56 and one["mask"] != other["mask"]


@pytest.mark.slow
def test_what_does_not_go_together_is_told(fast):
    _, seen = fast
    for told in (each["refusals"] for each in seen):
        assert "all weights and slots on every worker" in told["shard"]
        assert "which sends no gradients" in told["compression"]
        assert "SGD with 4, SGD with 1" in told["unlike"]
        assert "in a custom training loop" in told["own loop"]
        assert "synchronize_every=4, shard='state'" in told["later"]
        assert "`synchronize_every` of an optimizer cannot be changed" in told["changed"]
        assert all("Received: " in each for each in told.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_optimizer_trains_apart(slow, case):
    assert_is_local(*slow, case)


@pytest.mark.slow
def test_steps_of_the_users_own(own):
    for each in own:
        for how, found in each["own steps"].items():
            expected = worker.own_reference(how)
            for mine, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12, err_msg=how)


@pytest.mark.slow
def test_a_loss_of_the_whole_batch_is_that_of_the_workers_rows(own):
    for each in own:
        for mine, theirs in zip(each["dice"], worker.dice_reference(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_metrics_of_the_users_own_see_the_rows_of_all_workers(own):
    one, other = (each["metrics"] for each in own)
    assert one == other
    np.testing.assert_allclose(one[1], one[0], rtol=1e-6)


@pytest.mark.slow
def test_layers_that_another_model_trains_are_averaged_before_they_are_used(own):
    one, other = (each["shared"] for each in own)
    assert one["apart"] != other["apart"] and one["alike"] == other["alike"]


@pytest.mark.slow
def test_a_layer_is_averaged_that_the_traced_step_changes_though_it_is_frozen_now(own):
    one, other = (each["frozen"] for each in own)
    assert one == other and one[0] != one[1]


@pytest.mark.slow
def test_an_update_is_skipped_on_all_workers(own):
    # One row in each of two epochs is not finite, and is one worker's.
    assert [each["skips"] for each in own] == [{"skipped": 2, "finite": True, "steps": 4}] * 2


def assert_scales_together(seen):
    one, other = (each["overflows"] for each in seen)
    assert one == other
    for how, found in one.items():
        # Of three steps in each of two epochs one is left out.
        assert found["updates"] == (2 if how == "accumulated" else 4)
        assert (found["scale"], found["skipped"], found["finite"]) == (2.0**28, 0, True)


@pytest.mark.slow
def test_the_loss_is_scaled_alike_on_all_workers(own):
    assert_scales_together(own)


@pytest.mark.slow
def test_it_resumes_bit_for_bit_between_two_averages(life):
    folder, seen = life
    assert all(each["life"]["resumes"] for each in seen)
    one, other = saved(folder, "whole")
    assert all(np.array_equal(a, b) for a, b in zip(one, other))


@pytest.mark.slow
def test_what_is_saved_or_evaluated_is_one_model(life):
    folder, seen = life
    one, other = (each["life"] for each in seen)
    for told in (one, other):
        assert "a save 1 local steps after the last average" in told["saved"]
        assert "tfmulti.average_weights(model)" in told["saved"]
    assert one["evaluated"] == other["evaluated"] and one["digest"] == other["digest"]
    assert one["tested"] == other["tested"] != one["digest"]
    first, second = saved(folder, "look")
    # After the first step workers differ; ModelCheckpoint averages after the second.
    assert not np.array_equal(first[0], second[0])
    model = worker.create(keras.optimizers.Adam(0.01), synchronized=False)
    model.load_weights(folder / "step_2.weights.h5")
    assert np.allclose(model.get_weights()[0], (first[1] + second[1]) / 2, rtol=0, atol=1e-12)
    weights = []
    for number in range(2):
        model.load_weights(folder / f"alone_{number}.weights.h5")
        weights.append(model.get_weights())
    assert all(np.array_equal(a, b) for a, b in zip(*weights))


@pytest.mark.slow
def test_three_workers_with_frozen_weights(run_cases, tmp_path):
    """Means of three equal numbers: what is the same on all workers keeps its bits."""
    seen = run_cases(tmp_path, ["adam 2"], num_workers=3)
    assert_is_local(tmp_path, seen, "adam 2", num_workers=3)


@pytest.mark.slow
def test_local_steps_over_mpi_are_those_over_the_ring(run_over_mpi, tmp_path):
    names = ("adam 4", "accumulation 2", "skips", "overflows", "life")
    seen = run_over_mpi(tmp_path, names)
    for name in names[:2]:
        assert_is_local(tmp_path, seen, name)
    assert all(each["life"]["resumes"] for each in seen)
    assert [each["skips"]["skipped"] for each in seen] == [2, 2]
    assert_scales_together(seen)


@pytest.mark.slow
def test_the_command_line_takes_local_steps(run_workers, tmp_path):
    """Workers end with the same weights, which is not what one device learns, but as good."""
    flags = ["--epochs=3", "--optimizer=momentum", "--checkpoint_steps=5"]
    command = ["-m", "tfmulti.train", *flags]
    local = ["--strategy=multi_worker", "--synchronize_every=4", f"--workdir={tmp_path}"]
    texts = run_workers(2, [*command, *local])
    result = json.loads((tmp_path / "result.json").read_text())
    digests = {digest for text in texts for digest in re.findall(r"sha256=([0-9a-f]{64})", text)}
    assert digests == {result["weights_sha256"]}
    assert result["metrics"]["val_accuracy"] > 0.9
    one = TrainConfig(strategy="one_device", optimizer="momentum", epochs=3)
    expected = loop.train_and_evaluate(one, print_fn=lambda line: None)
    assert abs(result["metrics"]["loss"] - expected["metrics"]["loss"]) > 1e-4
    assert result["metrics"]["val_loss"] < 2 * expected["metrics"]["val_loss"]


@pytest.mark.parametrize(
    "setting", [{"shard": "state"}, {"compression": "bfloat16"}, {"shard": "parameters"}]
)
def test_flags_that_do_not_go_together_are_told(setting):
    with pytest.raises(ValueError, match="`synchronize_every` above 1 needs.*Received: .*Leave"):
        TrainConfig(strategy="multi_worker", synchronize_every=2, **setting)
    assert TrainConfig(dtype_policy="mixed_float16", synchronize_every=2).synchronize_every == 2


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_is_told(number):
    with pytest.raises(ValueError, match="`synchronize_every` must be a whole number"):
        tfmulti.DistributedOptimizer("adam", synchronize_every=number)


def test_replicas_of_one_worker_are_told():
    strategy = tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope(), pytest.raises(ValueError, match="2 replicas in this process"):
        tfmulti.DistributedOptimizer("adam", synchronize_every=4)


def test_one_device_trains_as_ever():
    strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
    models = [worker.build(strategy, "adam", every) for every in (1, 4)]
    for model in models:
        model.fit(worker.data_of(strategy), epochs=2, verbose=0)
    assert worker.same(*models)
