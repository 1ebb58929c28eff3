"""Stock callbacks, the end of data and stopping, on two workers that share a folder."""

import csv
from pathlib import Path

import keras
import numpy as np
import pytest

import tfmulti

HERE = Path(__file__).parent

import callback_worker

PROGRAM = "callback_worker"


@pytest.fixture(scope="module", name="workers")
def workers_fixture(over_the_ring):
    return over_the_ring(PROGRAM)


@pytest.fixture(scope="module", name="all_cases")
def all_cases_fixture(run_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks")
    return run_cases(folder, list(callback_worker.CASES))


def on_one_device(case, tmp_path):
    strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
    return callback_worker.run_case(strategy, tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", callback_worker.CASES)
def test_workers_see_the_same(all_cases, case):
    assert all_cases[0][case] == all_cases[1][case]


@pytest.mark.parametrize("case", ["files", "early_stopping"])
def test_workers_do_as_one_device(workers, case, tmp_path):
    _, seen = workers
    assert_close(seen[0][case], on_one_device(case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plateau", "averages"])
def test_workers_change_rates_and_average_as_one_device(all_cases, case, tmp_path):
    assert_close(all_cases[0][case], on_one_device(case, tmp_path))


def assert_close(one, other):
    if isinstance(one, dict):
        assert set(one) == set(other)
        for name in one:
            assert_close(one[name], other[name])
    else:
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_the_chief_alone_writes(workers):
    folder, seen = workers
    last = seen[0]["files"]["weights"]
    best = keras.models.load_model(folder / "best.keras")
    assert_close([w.ravel() for w in best.get_weights()], last)
    best.load_weights(folder / "epoch_1.weights.h5")
    best.load_weights(folder / "epoch_4.weights.h5")
    assert_close([w.ravel() for w in best.get_weights()], last)
    keras.models.load_model(folder / "steps.keras")
    with open(folder / "log.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
    for split in ("train", "validation"):
        assert len(list((folder / "logs" / split).glob("*.v2"))) == 1


def test_a_loss_that_is_not_a_number_stops_all_at_once(workers):
    _, seen = workers
    assert seen[0]["not_a_number"]["steps"] == 2
    assert seen[0]["not_a_number"]["losses"][1] == "nan"


def test_all_stop_after_the_epoch_in_which_one_wants_to(workers):
    _, seen = workers
    assert seen[0]["one_stops"]["epochs"] == [0, 1]


def test_unequal_datasets_end_together(workers):
    """5 and 3 batches of 4, dealt out in two ways, are the same five batches of all rows."""
    _, seen = workers
    kinds = seen[0]["unequal"]
    x, y = callback_worker.rows(32)
    model = callback_worker.build(tfmulti.create_strategy("one_device", devices=["CPU:0"]))
    batches = [np.r_[4 * i : 4 * i + 4, 20 + 4 * i : min(24 + 4 * i, 32)] for i in range(5)]
    for _ in range(2):
        model.reset_metrics()
        for rows in batches:
            model.train_on_batch(x[rows], y[rows])
    losses = model.evaluate(x, y, verbose=0)
    history, evaluated, steps, weights = kinds["from_function"]
    assert steps == 10
    assert_close(weights, callback_worker.weights_of(model))
    np.testing.assert_allclose(evaluated, losses, rtol=1e-6)
    assert kinds["from_function, too few"] in (5, 6)
    assert len(history) == 2


def test_backup_and_restore_is_refused(workers):
    _, seen = workers
    assert "supports one worker only" in seen[0]["backup"]


@pytest.mark.slow
def test_each_worker_resumes_with_random_states_of_its_own(workers):
    _, seen = workers
    assert [each["random_states"]["drawn"] for each in seen] == [True, True]


@pytest.mark.slow
def test_all_end_where_one_is_told_to_while_it_validates(all_cases):
    assert all_cases[0]["sigterm"] == {"ended": 143, "saved": [3]}


@pytest.mark.slow
def test_all_end_where_the_chief_can_read_or_write_no_checkpoint(all_cases):
    first, second = (each["checkpoint_errors"] for each in all_cases)
    assert first == second and len(first) == 3
    assert "one of them must be readable" in first[0]
    assert "must be a folder that can be written to" in first[1]
    assert "must be written completely" in first[2]
