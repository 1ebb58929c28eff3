"""Parameter servers: a chief, workers and servers as real processes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tfmulti.runtime import processes

HERE = Path(__file__).parent
PROGRAM = HERE / "parameter_server_worker.py"
STEPS, EPOCHS = 6, 3


def launch(arguments, *options, num_workers=2, num_ps=2):
    command = [sys.executable, "-m", "tfmulti.launch", f"--num_workers={num_workers}"]
    command += [f"--num_ps={num_ps}", *options, "--", sys.executable, *map(str, arguments)]
    [done] = processes.run_together(command, [{}], timeout_s=200)
    return done


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the chief saw in cases that train in one job, one after the other."""
    folder, names = tmp_path_factory.mktemp("servers"), ("synchronous", "counted", "bounded")
    done = launch([PROGRAM, folder, *names, "refused"], "--all_output")
    assert done.returncode == 0, f"{done.how}: {done.stdout}\n{done.stderr}"
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_synchronous_steps_give_the_result_of_one_device(found):
    case = found["synchronous"]
    expected = case["expected"]
    for kind in ("weights", "optimizer"):
        pairs = zip(case["state"][kind], expected["state"][kind], strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)
    for name, values in expected["history"].items():
        np.testing.assert_allclose(case["history"][name], values, rtol=1e-4, err_msg=name)
    assert case["history"]["staleness_max"] == [0.0] * EPOCHS


def test_each_step_and_each_example_counts_once(found):
    case, steps = found["counted"], -(-301 // 8) * EPOCHS
    assert case["counts"] == {"least": EPOCHS, "most": EPOCHS, "sum": 301.0 * EPOCHS}
    assert case["iterations"] == steps
    assert sum(case["workers"].values()) == steps
    assert set(case["workers"]) == {"0", "1"}


def test_a_large_embedding_is_cut_over_the_servers_and_saved_whole(found):
    case = found["counted"]
    assert case["parts"] == [35_000, 35_000]
    assert len(set(case["places"])) == 2 and all("/job:ps" in place for place in case["places"])
    assert case["loads"]


def test_staleness_is_measured_and_bounded(found):
    free, bounded = found["counted"]["history"], found["bounded"]
    assert max(free["staleness_max"]) > 0
    for mean, p95, most in zip(*(free[f"staleness_{n}"] for n in ("mean", "p95", "max"))):
        assert 0 <= mean <= most and 0 <= p95 <= most
    assert max(bounded["history"]["staleness_max"]) <= 1
    assert bounded["counts"]["least"] == bounded["counts"]["most"] == EPOCHS


def test_what_cannot_work_says_what_to_do(found):
    errors = found["refused"]
    for name in ("fit", "evaluate", "predict"):
        assert errors[name].startswith(f"`{name}`") and "Received: " in errors[name]
    assert "tfmulti.train_async" in errors["fit"]
    assert "BackupAndRestore" in errors["callback"] and "Checkpoint" in errors["callback"]
    assert errors["staleness"].startswith("`max_staleness`")
    assert errors["batch_size"].startswith("`batch_size`")
    assert "model.fit" in errors["strategy"]
