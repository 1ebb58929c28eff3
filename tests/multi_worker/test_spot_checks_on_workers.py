"""Workers make spot checks together: all go on, or all are told."""

import json
from pathlib import Path

import numpy as np
import pytest
import spot_check_worker
from replicas import create_strategy
from spot_check_worker import programs

SCRIPT = Path(__file__).with_name("spot_check_worker.py")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("logical_cpus", [1, 2], ids=["2x1", "2x2"])
def test_two_workers(run_workers, logical_cpus):
    workers = run_workers(2, [SCRIPT, logical_cpus, "ring"])
    assert_told([json.loads(worker.splitlines()[-1]) for worker in workers])


def test_two_workers_of_mpi(mpiexec):
    lines = mpiexec(SCRIPT, 1, "mpi").splitlines()
    assert_told([json.loads(line) for line in lines if line.startswith('{"begins')])


def assert_told(workers):
    assert len(workers) == 2
    one = spot_check_worker.evaluate(create_strategy(1))
    assert one["told"] == []
    for said in workers:
        assert "then evaluate again" in said["evaluates"]["told"][0]
        np.testing.assert_allclose(said["evaluates"]["result"], one["result"], atol=1e-6)
    for name, feed in spot_check_worker.FEEDS.items():
        stays = spot_check_worker.run_case(create_strategy(1), feed, make=programs.relu)
        for said in workers:
            [told] = said[f"begins, {name}"]["told"]
            assert "13 steps after verification" in told
            assert said[f"begins, {name}"]["weights"] == workers[0][f"begins, {name}"]["weights"]
            assert "but not 13 steps later" in said[f"error, {name}"]["error"]
            assert said[f"stays, {name}"]["told"] == []
            np.testing.assert_allclose(said[f"stays, {name}"]["loss"], stays["loss"], atol=1e-6)
            for found, one in zip(said[f"stays, {name}"]["weights"], stays["weights"]):
                np.testing.assert_allclose(found, one, atol=1e-6)
