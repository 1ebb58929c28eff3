"""The whole batch on every worker of a cluster, in real processes, over sockets and over MPI."""

from pathlib import Path

import numpy as np
import pytest
import whole_batch_worker
from replicas import create_strategy

SCRIPT = Path(__file__).parent / "whole_batch_worker.py"


@pytest.fixture(scope="module")
def reference():
    return whole_batch_worker.results(create_strategy(1))


def assert_one_devices(folder, num_workers, num_replicas, reference, why):
    for index in range(num_workers):
        found = np.load(folder / f"worker_{index}.npz")
        assert found["num_replicas"] == num_replicas
        assert why in str(found["why"])
        compared = [name for name in reference if num_replicas < 3 or not name.startswith("types")]
        for name in compared:
            value = reference[name]
            np.testing.assert_allclose(found[name], value, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "logical_cpus"),
    [
        pytest.param(2, 0, id="2x1"),
        pytest.param(3, 0, id="3x1", marks=pytest.mark.slow),
        pytest.param(2, 2, id="2x2", marks=pytest.mark.slow),
    ],
)
def test_workers_have_one_devices_whole_batch(
    run_workers, tmp_path, num_workers, logical_cpus, reference
):
    run_workers(num_workers, [SCRIPT, tmp_path, logical_cpus])
    num_replicas = num_workers * max(logical_cpus, 1)
    assert_one_devices(tmp_path, num_workers, num_replicas, reference, "over ring")


@pytest.mark.slow
def test_canary_a_key_of_tensorflows_stands_for_one_shape(run_workers, tmp_path):
    texts = run_workers(2, [SCRIPT, tmp_path, 0, "stock"], check=False)
    assert any("Shape mismatch in the collective" in text for text in texts)


@pytest.mark.slow
def test_workers_over_mpi_have_one_devices_whole_batch(mpiexec, tmp_path, reference):
    mpiexec(SCRIPT, tmp_path, 0)
    assert_one_devices(tmp_path, 2, 2, reference, "over mpi")
