"""Pipelines on workers: one device's result, each worker with its stage alone."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent

import pipeline_worker as worker

PROGRAM = "pipeline_worker"
ON_FOUR = ("few rows", "skips", "several", "masked")
# Those of four workers are cut into two stages there, too.
SLOW = tuple(x for x in worker.TRAINED if x not in ("dense", "one micro-batch", *ON_FOUR))


@pytest.fixture(scope="module", name="fast")
def fast_fixture(over_mpi):
    _, seen = over_mpi(PROGRAM)
    return seen


@pytest.fixture(scope="module", name="slow")
def slow_fixture(run_over_mpi, tmp_path_factory):
    names = (*SLOW, "life", "chosen differences", "beside normalization")
    names += ("state in half precision",)
    return run_over_mpi(tmp_path_factory.mktemp("pipeline"), names)


def assert_exact(seen, name):
    for each in (worker_seen[name] for worker_seen in seen):
        assert max(each["weights"]) < 1e-12 and max(each["history"]) < 1e-12


def test_stages_give_the_result_of_copies(fast):
    assert_exact(fast, "dense")


def test_each_worker_holds_the_weights_of_its_stage_alone(fast):
    for one, other in zip(*(each["dense"]["held"] for each in fast)):
        assert one[0] == other[0] == one[2]
        assert 0 < one[1] < one[0] and one[1] + other[1] == one[0]


@pytest.mark.slow
def test_what_cannot_be_cut_is_told(fast):
    told = fast[0]["refusals"]
    assert "Received: 5 stages, 2 workers" in told["stages"]
    assert "Received: stages=1" in told["one stage"]
    assert "Received: the input words, of strings" in told["strings"]
    assert "Received: gather_batch in a layer's call" in told["gathered"]
    assert "Received: stages=['nothing']" in told["names"]
    assert "Received: micro_batches=0" in told["micro_batches"]
    assert "Use micro_batches=1" in told["synchronized"]
    assert "cannot update the same state" in told["shared state"]
    assert "use shard='parameters'" in told["subclassed"]
    assert "must be called before `compile`" in told["compiled"]
    assert "shard='parameters'" in told["optimizer"]
    for name in ("penalized", "penalized weights"):
        assert "A pipeline does not support second derivatives" in told[name]
    assert "a branch or a loop of a step" in told["branch"]


@pytest.mark.slow
def test_the_norm_of_gradients_is_no_number_of_one_workers_rows(fast):
    assert [each["refusals"]["warnings"] for each in fast] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_model_and_setting_gives_the_result_of_copies(slow, name):
    assert_exact(slow, name)


@pytest.mark.slow
def test_evaluates_predicts_saves_and_resumes(slow):
    for each in (worker_seen["life"] for worker_seen in slow):
        assert max(each.values()) < 1e-12, each
        assert each["resumed from divided"] == 0.0


@pytest.mark.slow
def test_micro_batches_have_random_numbers_and_statistics_of_their_own(slow):
    one, other = (worker_seen["chosen differences"] for worker_seen in slow)
    before, after = one["seeds"]
    # As many draws as on one device: three steps of one dropout.
    assert [new[1] - old[1] for old, new in zip(before, after)] == [3]
    assert one["recomputed"] < 1e-12
    # One micro-batch has all rows: there is nothing to be told.
    assert one["told"] == []
    assert one["moving"] == other["moving"] and min(one["moving"]) > 0


@pytest.fixture(scope="module", name="two_stages")
def two_stages_fixture(run_over_mpi, tmp_path_factory):
    names = (*ON_FOUR, "verified by auto", "synchronized copies", "beside normalization")
    return run_on_four(run_over_mpi, tmp_path_factory, names, 2)


@pytest.fixture(scope="module", name="four_stages")
def four_stages_fixture(run_over_mpi, tmp_path_factory):
    return run_on_four(run_over_mpi, tmp_path_factory, (*ON_FOUR, "verified by auto"), 4)


def run_on_four(run_over_mpi, tmp_path_factory, names, stages):
    folder, environ = tmp_path_factory.mktemp("pipeline"), {"STAGES": str(stages)}
    return run_over_mpi(folder, names, num_workers=4, env=environ)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_workers_as_stages_and_as_copies_of_stages(two_stages, four_stages, name):
    assert_exact(two_stages, name)
    assert_exact(four_stages, name)


def assert_verified_beside_normalization(seen):
    for each in (worker_seen["beside normalization"] for worker_seen in seen):
        assert "Likely cause: local batch statistics, in OfMicroBatch" in each["own"][0]
        error, *told = each["none"]
        assert error == "nothing" and len(told) == 1
        assert "each micro-batch alone" in told[0]
        for advice in (told[0], each["own"][0]):
            assert "use tfmulti.pipeline(..., micro_batches=1) and one stage for each" in advice


@pytest.mark.slow
def test_batch_normalization_in_stages_hides_nothing_else(slow):
    assert_verified_beside_normalization(slow)


@pytest.mark.slow
def test_models_with_batch_normalization_are_verified_in_copies_of_stages(two_stages):
    assert_verified_beside_normalization(two_stages)
    for error, told in (worker_seen["beside normalization"]["one"] for worker_seen in two_stages):
        assert error == "nothing" and "each copy of the stages alone" in told


@pytest.mark.slow
def test_state_of_a_layer_in_half_precision_is_sent_in_its_own_dtype(slow):
    one, other = (worker_seen["state in half precision"] for worker_seen in slow)
    assert one == other and one[:2] == ["nothing", "float32"] and one[2] > 0


@pytest.mark.slow
def test_synchronized_normalization_in_copies_of_stages_is_refused(two_stages):
    told = [message for each in two_stages for message in each["synchronized copies"]]
    assert len(told) == 8 and all("2 copies of 2 stages" in message for message in told)


@pytest.mark.slow
def test_copies_of_stages_of_keras_own_parts_are_verified(two_stages, four_stages):
    assert [each["verified by auto"] for each in two_stages] == [True] * 4
    assert [each["verified by auto"] for each in four_stages] == [False] * 4
