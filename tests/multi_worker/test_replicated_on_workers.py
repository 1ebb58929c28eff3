"""Replicas of several workers compute the whole batch, and hold the weights of one device."""

from pathlib import Path

import cases
import numpy as np
import pytest
import replicated_worker
from replicas import create_strategy

PROGRAM = "replicated_worker"
SCRIPT = Path(__file__).with_name(f"{PROGRAM}.py")
# TensorFlow's random numbers differ between replicas, so only their agreement can be seen.
EXACT = ["decides", "changed", "centred"]


@pytest.mark.slow
def test_two_workers_compute_the_whole_batch(over_the_ring):
    _, workers = over_the_ring(PROGRAM)
    assert_one_devices(workers, ["decides"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_workers, options", [(2, ["--mpi"]), (3, [])], ids=["2 over MPI", "3 over the ring"]
)
def test_more_workers_and_other_transports(run_workers, tmp_path, num_workers, options):
    if options and not cases.MPIEXEC.exists():
        pytest.skip("needs the extra mpi")
    names = list(replicated_worker.CASES)
    workers = cases.run(run_workers, SCRIPT, tmp_path, names, num_workers, options=options)
    assert_one_devices(workers, names)


def assert_one_devices(workers, names):
    for name in names:
        copies = [weights for said in workers for weights in said[name]["weights"]]
        number = len(workers[0][name]["weights"])
        for place in range(number):
            alike = [copy for each in copies[place::number] for copy in each]
            assert all(copy == alike[0] for copy in alike), (name, place)
        assert all(said[name]["told"] >= 1 for said in workers)
    for name in set(EXACT) & set(names):
        expected = replicated_worker.run_case(create_strategy(1), None, name)
        assert expected["told"] == 0
        for said in workers:
            for key, values in expected["history"].items():
                np.testing.assert_allclose(said[name]["history"][key], values, 1e-6, err_msg=key)
            for found, one in zip(said[name]["weights"], expected["weights"]):
                np.testing.assert_allclose(found[0], one[0], 1e-5, 1e-6, err_msg=name)
            predictions = said[name]["predictions"], expected["predictions"]
            np.testing.assert_allclose(*predictions, 1e-5, 1e-6)
