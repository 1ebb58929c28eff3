"""Stock `fit`, `evaluate` and `predict` on every worker of a cluster, in real processes."""

from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent

import behaviour_cases as behaviour

PROGRAM = "behaviour_worker"

# Each case, each way of giving data; every pair of the two is tried in one process.
PAIRS = [
    "sequential/arrays",
    "functional/distributed",
    "subclassed/arrays",
    "string_lookup/arrays",
    "hashing/distributed",
]


def test_two_workers_do_as_one_device(over_the_ring):
    folder, _ = over_the_ring(PROGRAM)
    assert_as_one_device(folder, 2, 2, ["functional/distributed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "logical_cpus", "names"),
    [
        pytest.param(2, 0, PAIRS, id="2x1"),
        pytest.param(3, 2, ["sequential/arrays", "subclassed/distributed"], id="3x2"),
    ],
)
def test_every_worker_does_as_one_device(run_workers, tmp_path, num_workers, logical_cpus, names):
    script = HERE / f"{PROGRAM}.py"
    run_workers(num_workers, [script, tmp_path, logical_cpus, *names])
    assert_as_one_device(tmp_path, num_workers, num_workers * max(logical_cpus, 1), names)


def assert_as_one_device(folder, num_workers, num_replicas, names):
    """Weights, history, evaluation, and the rows of `predict` in the order of the data."""
    workers = [np.load(folder / f"worker_{index}.npz") for index in range(num_workers)]
    first = dict(workers[0])
    assert first["num_replicas"] == num_replicas
    for worker in workers[1:]:
        for name in worker.files:
            np.testing.assert_array_equal(worker[name], first[name], err_msg=name)
    for name in names:
        start = f"{name}/"
        result = {key.removeprefix(start): first[key] for key in first if key.startswith(start)}
        behaviour.assert_same(result, behaviour.on_one_device(*name.split("/")))
