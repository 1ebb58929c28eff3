"""Tensor parallelism on workers: one device's result, each worker with its parts alone."""

from pathlib import Path

import keras
import numpy as np
import pytest

HERE = Path(__file__).parent

import tensor_worker as worker

PROGRAM = "tensor_worker"
# The others are tried in groups of two, in float32, or within other cases.
SLOW = tuple(x for x in worker.TRAINED if x not in ("both", "attention", "vocabulary", "averages"))


@pytest.fixture(scope="module", name="fast")
def fast_fixture(over_mpi):
    _, seen = over_mpi(PROGRAM)
    return seen


@pytest.fixture(scope="module", name="slow")
def slow_fixture(run_over_mpi, tmp_path_factory):
    names = (*SLOW, "halves", "exchanges", "refusals")
    return run_over_mpi(tmp_path_factory.mktemp("tensor"), names)


def assert_exact(seen, name, close=1e-12):
    for each in (worker_seen[name] for worker_seen in seen):
        assert max(each["weights"]) < close and max(each["history"]) < close, each


def test_split_layers_give_the_result_of_copies(fast):
    assert_exact(fast, "both")


def test_each_worker_holds_its_parts_alone(fast):
    for one, other in zip(*(each["both"]["held"] for each in fast)):
        assert one[0] + other[0] == one[1] == other[1] > 0
        # Two slots of each of Adam's two weights.
        assert one[2] == other[2] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_model_and_setting_gives_the_result_of_copies(slow, name):
    assert_exact(slow, name)


@pytest.mark.slow
def test_sums_of_halves_are_rounded_as_products_are(slow):
    assert all(each["halves"]["weights"] < 2**-7 for each in slow)


@pytest.mark.slow
def test_workers_exchange_inputs_and_outputs_of_attention_and_not_its_heads(slow):
    for each in (worker_seen["exchanges"] for worker_seen in slow):
        assert each["seen"] == ["all_gather", "reduce_scatter"]
        assert np.isfinite(each["loss"]).all()


@pytest.mark.slow
def test_what_cannot_be_split_is_told(slow):
    told = slow[0]["refusals"]
    assert "wide/kernel, with LoRA" in told["lora"]
    assert "Received: group=3, 2 workers" in told["groups of three"]
    assert "Received: group=1, 2 workers" in told["groups of one"]
    assert "1 along its column axis, and 2 workers" in told["narrow"]
    assert "must be called once for a model" in told["twice"]
    assert "shard='parameters'" in told["not sharded"]
    assert "/wide/kernel, assigned in `tf.while_loop`" in told["in a loop"]
    assert "Received: Lamb, and" in told["lamb"]
    assert "cannot cut a model whose layers are split" in told["pipeline"]
    assert "cannot split layers of a pipeline" in told["of a pipeline"]


@pytest.mark.slow
def test_evaluates_predicts_saves_and_resumes(run_over_mpi, tmp_path):
    seen = run_over_mpi(tmp_path, ["life"])
    for each in (worker_seen["life"] for worker_seen in seen):
        assert max(each.values()) < 1e-12, each
        assert each["resumed from divided"] == 0.0
    names = ("divided", "copies")
    divided, copies = (keras.models.load_model(tmp_path / f"{name}.keras") for name in names)
    one, other = ([*each.variables, *each.optimizer.variables] for each in (divided, copies))
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_four_workers_in_two_groups(run_over_mpi, tmp_path):
    names = ["attention", "vocabulary"]
    seen = run_over_mpi(tmp_path, names, num_workers=4, env={"GROUP": "2"})
    for name in names:
        assert_exact(seen, name)


@pytest.mark.slow
def test_float32_is_rounded_in_its_last_places(run_over_mpi, tmp_path):
    names = ["both", "vocabulary"]
    seen = run_over_mpi(tmp_path, names, env={"FLOATX": "float32"})
    for name in names:
        assert_exact(seen, name, close=1e-6)
