"""Unlike numbers of rows on two real workers: none waits for ever, and the answer is right."""

from pathlib import Path

import numpy as np
import pytest
from replicas import create_strategy

HERE = Path(__file__).parent

import odd_cases
from behaviour_cases import assert_same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logical_cpus", "names"),
    [
        pytest.param(0, list(odd_cases.CASES), id="2x1"),
        pytest.param(2, list(odd_cases.CASES), id="2x2", marks=pytest.mark.slow),
    ],
)
def test_two_workers_do_as_one_device(run_workers, tmp_path, logical_cpus, names):
    script = HERE / "odd_worker.py"
    run_workers(2, [script, tmp_path, logical_cpus, *names])
    for name in names:
        expected = odd_cases.run_case(name, create_strategy(1), 0)
        for number in range(2):
            worker = np.load(tmp_path / f"worker_{number}.npz")
            start = f"{name}/"
            found = {k.removeprefix(start): worker[k] for k in worker if k.startswith(start)}
            assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metric_variable", "own_logs", "predict_on_batches"])
def test_replicas_do_as_one_device(name):
    expected = odd_cases.run_case(name, create_strategy(1), 0)
    actual = odd_cases.run_case(name, create_strategy(3), 0)
    assert_same(actual, expected)
