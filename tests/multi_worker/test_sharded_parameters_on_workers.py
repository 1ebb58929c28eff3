"""Sharded parameters on two workers: the result of copies of the weights, in less memory."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tfmulti
from benchmarks import sharded_state

HERE = Path(__file__).parent

import cases
import sharded_parameters_worker as worker

PROGRAM = "sharded_parameters_worker"
SLOW = tuple(name for name in worker.COMPARED if name not in ("adamw", "sgd"))
# AdamW makes rounding larger, on one device too.
CLOSE = {"adamw": 2e-5, "averages": 2e-5, "muon": 2e-6}


@pytest.fixture(scope="module", name="fast")
def fast_fixture(over_the_ring):
    _, seen = over_the_ring(PROGRAM)
    return seen


@pytest.fixture(scope="module", name="slow")
def slow_fixture(run_cases, tmp_path_factory):
    names = (*SLOW, "loaded", "swapped", "settings", "two optimizers", "skips")
    names += ("swapped to evaluate", "unfrozen", "kept", "assigned", "evaluated first")
    names += ("evaluated by another", "finalized", "in time", "no room")
    options = ["--mpi"] if cases.MPIEXEC.exists() else []
    return run_cases(tmp_path_factory.mktemp("sharded"), names, options=options)


@pytest.fixture(scope="module", name="life")
def life_fixture(run_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_cases(folder, ["life"])


def assert_assigned(seen):
    assert max(seen["a weight"], seen["a weight in a branch"]) < 1e-6
    assert "cannot be read in the branch that has assigned it" in seen["and read in a branch"]
    assert "cannot be assigned in a loop" in seen["in a loop"]
    assert "`weight.value` is a tensor. Received: `train_step`" in seen["by its value"]


@pytest.mark.slow
def test_a_step_assigns_a_weight_as_with_copies_or_is_told(slow):
    for each in slow:
        assert_assigned(each["assigned"])


def assert_alike(seen, name):
    for each in (worker_seen[name] for worker_seen in seen):
        assert each["sharded"] > 0
        # A call whose weights are gathered adds in another order than one whose are there.
        assert max(each["apart"]) <= CLOSE.get(name, 1e-6)
        assert max(each["predictions"]) <= 10 * CLOSE.get(name, 1e-6)
        np.testing.assert_allclose(each["losses"][1:], [each["losses"][0]] * 2, rtol=2e-6)


def test_sharded_parameters_give_the_result_of_copies_over_the_ring(fast):
    assert_alike(fast, "adamw")


def test_each_worker_holds_its_weights_and_their_slots(fast):
    for way in (1, 2):
        (copies, slots), *_ = fast[0]["adamw"]["held"]
        weights, own = zip(*(each["adamw"]["held"][way] for each in fast))
        # What is small is on both.
        assert copies <= sum(weights) < 1.1 * copies and max(weights) < 0.8 * copies
        assert slots <= sum(own) < 1.1 * slots


@pytest.mark.slow
def test_norms_in_an_update_of_several_steps_and_assigned_weights_over_the_ring(
    run_cases, tmp_path
):
    names = ["accumulation", "spectral"]
    seen = run_cases(tmp_path, [*names, "kept", "assigned"])
    for name in names:
        assert_alike(seen, name)
    # Only its owner reads a weight that a step assigns to itself.
    assert max(each["kept"]["stepped"] for each in seen) < 1e-6
    for each in seen:
        assert_assigned(each["assigned"])


@pytest.mark.slow
def test_a_compiled_model_is_loaded_and_cloned_with_a_sharded_optimizer(slow):
    for seen in (each["loaded"] for each in slow):
        assert max(seen["apart"]) <= CLOSE["adamw"]
        assert seen["steps"] == [6, 6, 3, 3]
    (copies, slots), *_ = slow[0]["loaded"]["held"]
    for way in (1, 3):
        weights, own = zip(*(each["loaded"]["held"][way] for each in slow))
        assert copies <= sum(weights) < 1.1 * copies
        assert slots <= sum(own) < 1.1 * slots


def assert_swapped(seen, name):
    for each in (worker_seen[name] for worker_seen in seen):
        assert max(each["apart"]) < 1e-6
        copies, *others = each["histories"]
        for other in others:
            for key, values in copies.items():
                np.testing.assert_allclose(other[key], values, rtol=2e-6)


@pytest.mark.slow
def test_a_callback_swaps_weights_and_their_averages(slow):
    assert_swapped(slow, "swapped")


@pytest.mark.slow
def test_what_cannot_be_is_told(fast):
    early = [each["refusals"]["early"] for each in fast]
    # On the owner too, which would otherwise go on alone.
    assert all("Received: a read of" in each for each in early)
    for told in (each["refusals"] for each in fast):
        assert "Leave compression out" in told["compress"]
        assert "need an optimizer that updates each on its owner" in told["whole"]
        assert "must be used in a strategy's scope" in told["no_scope"]
        assert "Received: Clipped._clip_gradients." in told["clipped"]
        assert "Received: SGD._clip_gradients." in told["clip_by_object"]
        assert "Leave the layer that assigns it out" in told["assign_within"]
        assert "/iteration, created outside it" in told["outside"]
        assert "model.save on the chief after `fit`" in told["exported"]
        assert "Call the layer on all rows at once" in told["train_in_a_loop"]
        # It creates variables, on the chief alone.
        assert told["saved_in_scope"] == "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_optimizer_and_model_gives_the_result_of_copies(slow, case):
    assert_alike(slow, case)


@pytest.mark.slow
def test_eager_steps_several_steps_and_half_precision(slow):
    for seen in slow:
        assert max(seen["settings"].values()) < 1e-6


@pytest.mark.slow
def test_a_callback_swaps_averages_to_evaluate(slow):
    assert_swapped(slow, "swapped to evaluate")


@pytest.mark.slow
def test_an_evaluation_before_weights_are_sharded_does_not_keep_them(slow):
    for copies, sharded in (each["evaluated first"] for each in slow):
        assert abs(copies[-1] - copies[0]) > 0.1
        np.testing.assert_allclose(sharded, copies, rtol=2e-6)


@pytest.mark.slow
def test_averages_that_end_a_training_replace_gathered_weights(slow):
    for seen in (each["finalized"] for each in slow):
        assert seen["apart"] < 1e-6 and seen["moved"] > 0


@pytest.mark.slow
def test_another_model_evaluates_sharded_weights_but_does_not_train_them(slow):
    for seen in (each["evaluated by another"] for each in slow):
        np.testing.assert_allclose(*seen["losses"], rtol=2e-6)
        for told in seen["told"]:
            assert "need an optimizer that updates each on its owner" in told


@pytest.mark.slow
def test_a_layer_that_is_called_for_each_step_of_time_gathers_its_weight_once(slow):
    for seen in (each["in time"] for each in slow):
        for apart, gathers in seen:
            # In all traces together fewer than there are steps.
            assert apart < 1e-6 and 0 < gathers < 8


@pytest.mark.slow
def test_a_full_disk_as_fit_ends_loses_no_run(slow):
    chief, other = (each["no room"] for each in slow)
    assert chief["told"] == [] and chief["read"] == "nothing"
    assert "Training goes on" in other["told"][0]
    assert "No space left on device" in other["read"]
    assert max(chief["apart"], other["apart"]) < 1e-6


@pytest.mark.slow
def test_statistics_of_a_layer_that_was_frozen_and_earlier_optimizers(slow):
    for seen in (each["unfrozen"] for each in slow):
        assert seen["apart"] < 1e-5
        # Those of earlier compiles are gone, with their slots.
        assert seen["alive"] == [False, False, True]


@pytest.mark.slow
def test_values_that_were_gathered_are_stale_after_a_step_and_known_after_a_file(slow):
    for seen in (each["kept"] for each in slow):
        # After each epoch, though it was gathered after the one before, and after another step.
        assert len(seen["told"]) == 3
        assert all("Call tfmulti.gather_optimizer_state(model)" in told for told in seen["told"])
        assert max(seen["stepped"], seen["loaded"]) < 1e-6


@pytest.mark.slow
def test_two_optimizers_and_updates_that_are_skipped(slow):
    for seen in slow:
        assert seen["two optimizers"]["apart"] < 2e-6
        assert seen["skips"]["apart"] < 1e-6
        assert seen["skips"]["skipped"][0] == seen["skips"]["skipped"][1] > 0


@pytest.mark.slow
def test_checkpoints_callbacks_and_files(life):
    folder, seen = life
    for each in (worker_seen["life"] for worker_seen in seen):
        assert each.pop("trained on") == 1
        assert max(each.values()) < 1e-6, each
    models = [keras.models.load_model(folder / f"{name}.keras") for name in ("copies", "sharded")]
    for attribute in ("variables", "optimizer.variables"):
        one, other = (_resolve(model, attribute) for model in models)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def _resolve(model, path):
    for name in path.split("."):
        model = getattr(model, name)
    return model


@pytest.mark.slow
def test_four_workers_over_mpi(run_over_mpi, tmp_path):
    seen = run_over_mpi(tmp_path, ["sgd", "table"], num_workers=4)
    for name in ("sgd", "table"):
        assert_alike(seen, name)


@pytest.mark.slow
@pytest.mark.usefixtures("mpiexec")
@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_worker_needs_memory_for_its_own_weights_and_slots(num_workers):
    kinds = (None, "state", "parameters")
    copies, state, parameters = (
        sharded_state.measure(12, 2048, num_workers, kind, "mpi") for kind in kinds
    )
    part = 1 - 1 / num_workers
    assert copies["bytes"] - state["bytes"] > 0.8 * copies["slots"] * part
    # The rest of the weights, and of the gradients; less the largest weight, which is gathered.
    assert state["bytes"] - parameters["bytes"] > 0.8 * state["slots"] * part / 2


def test_replicas_of_one_worker_are_told():
    strategy = tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        with pytest.raises(ValueError, match="workers with one replica each"):
            tfmulti.DistributedOptimizer("adam", shard="parameters")
        with (
            pytest.raises(ValueError, match="workers with one replica each"),
            tfmulti.sharded_parameters(),
        ):
            pass


def test_one_device_trains_as_ever():
    strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
    models = [worker.build(strategy, shard=shard) for shard in (None, "parameters")]
    assert worker.fit(models[0]) == worker.fit(models[1])
