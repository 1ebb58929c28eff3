"""Parameter servers: a chief, workers and servers as real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tfmulti.runtime import processes

HERE = Path(__file__).parent
PROGRAM = HERE / "parameter_server_worker.py"
EPOCHS = 2


def launch(arguments, *options, num_workers=2, num_ps=2):
    command = [sys.executable, "-m", "tfmulti.launch", f"--num_workers={num_workers}"]
    command += [f"--num_ps={num_ps}", *options, "--", sys.executable, *map(str, arguments)]
    [done] = processes.run_together(command, [{}], timeout_s=200)
    return done


class Job:
    """A job that runs while a test looks on; all of it is ended with the test."""

    def __init__(self, folder, case, *options, num_ps=2):
        self._folder = folder
        command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2", f"--num_ps={num_ps}"]
        command += [f"--log_dir={folder / 'logs'}", *options, "--", sys.executable, str(PROGRAM)]
        self.process = subprocess.Popen(
            [*command, str(folder), case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def kill(self, task):
        """Kills a task once training is under way."""
        while not (self._folder / "under_way").exists():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        os.kill(int((self._folder / f"{task}.pid").read_text()), signal.SIGKILL)

    def finish(self):
        """Returns the exit code, what the launcher told, and what the chief saw."""
        _, told = self.process.communicate(timeout=200)
        found = [json.loads(path.read_text()) for path in self._folder.glob("*.json")]
        return self.process.returncode, told, found[0] if found else None


@pytest.fixture
def start(tmp_path):
    """Starts a job."""
    with contextlib.ExitStack() as stack:

        def start_job(case, *options, **settings):
            job = Job(tmp_path, case, *options, **settings)
            # Its supervisors end all tasks when the launcher is gone.
            stack.callback(job.process.wait)
            stack.callback(job.process.kill)
            return job

        yield start_job


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the chief saw in cases that train in one job, one after the other."""
    folder = tmp_path_factory.mktemp("servers")
    names = ["synchronous", "counted", "slots"]
    if request.config.option.markexpr != "not slow":
        names += ["bounded", "own_step", "tied", "refused"]
    done = launch([PROGRAM, folder, *names], "--all_output")
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


@pytest.mark.slow
def test_a_table_that_is_cut_can_be_the_output_layer_too(found):
    case = found["tied"]
    assert case["parts"] == 2 and case["apart"] < 1e-6
    np.testing.assert_allclose(*case["losses"], rtol=1e-6)


def test_the_slots_of_a_part_are_on_its_server(found):
    assert {place.split("/device")[0] for place in found["slots"]} == {
        f"/job:ps/replica:0/task:{server}" for server in range(2)
    }
    for place, slots in found["slots"].items():
        assert slots == [place] * 2


@pytest.mark.slow
def test_staleness_is_measured_and_bounded(found):
    free, bounded = found["counted"]["history"], found["bounded"]
    assert max(free["staleness_max"]) > 0
    for mean, p95, most in zip(*(free[f"staleness_{n}"] for n in ("mean", "p95", "max"))):
        assert 0 <= mean <= most and 0 <= p95 <= most
    assert max(bounded["history"]["staleness_max"]) <= 1
    assert bounded["counts"]["least"] == bounded["counts"]["most"] == EPOCHS


@pytest.mark.slow
def test_a_step_of_the_users_own_with_states_and_random_numbers(found):
    case = found["own_step"]
    assert case["iterations"] == len(case["masks"]) == 13 * EPOCHS
    # No change of a state is lost, and each step draws numbers of its own.
    assert case["seen"] == 101.0 * EPOCHS
    assert len(set(case["masks"])) == len(set(case["drawn"])) == len(case["masks"])
    assert len(case["own"]) == EPOCHS and all(np.isfinite(case["own"]))
    np.testing.assert_allclose(case["mean"], 3.0, atol=1.0)


@pytest.mark.slow
def test_what_cannot_work_says_what_to_do(found):
    errors = found["refused"]
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch"):
        assert errors[name].startswith(f"`{name}`") and "Received: " in errors[name]
    assert "tfmulti.train_async" in errors["fit"]
    assert "BackupAndRestore" in errors["callback"] and "Checkpoint" in errors["callback"]
    assert errors["staleness"].startswith("`max_staleness`")
    assert errors["batch_size"].startswith("`batch_size`")
    assert "model.fit" in errors["strategy"]
    assert "must be a mean over rows" in errors["split"] and "table" in errors["split"]
    assert "must be a mean over rows" in errors["padding"]
    assert "largest/most" in errors["metric"]
    # A whole batch goes to one worker, so its loss may be a sum.
    assert errors["sum"] is None
    assert errors["validation"].startswith("`validation_data` must be what")
    assert "Lamb, for table/embeddings_0, which is partitioned into 2" in errors["optimizer"]
    assert "outside of the strategy's scope" in errors["scope"]
    received = {"shard": "shard='state'", "pipeline": "pipeline", "tensor": "tensor_parallel"}
    for name, text in received.items():
        assert f"Received: {text}, with ParameterServerStrategy." in errors[name]


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_nothing_is_lost_or_counted_twice(start):
    job = start("killed_worker", "--max_restarts=1")
    job.kill("worker_0")
    code, told, case = job.finish()
    assert code == 0, told
    assert "worker 0 was ended by SIGKILL" in told and "of all workers" not in told
    assert any("worker 0" in line and "no example is left out" in line for line in case["lines"])
    assert any(line.startswith("worker 0 is back") for line in case["lines"])
    epochs = case["epochs"]
    assert case["counts"] == {"least": epochs, "most": epochs, "sum": 301.0 * epochs}
    assert case["iterations"] == 38 * epochs == sum(case["workers"].values())


@pytest.mark.slow
def test_the_others_go_on_without_a_worker_that_is_not_restarted(start, tmp_path):
    job = start("killed_worker")
    job.kill("worker_1")
    (tmp_path / "enough").touch()
    code, told, case = job.finish()
    assert code == 0 and "the job continues with the remaining 1" in told
    assert case["counts"]["least"] == case["counts"]["most"] == case["epochs"]


@pytest.mark.slow
def test_a_job_resumes_after_a_server_was_killed(start):
    job = start("resumed", "--max_restarts=1")
    job.kill("ps_1")
    code, told, case = job.finish()
    assert code == 0, told
    assert case["resumed"] > 38 and case["resumed"] % 10 == 0
    assert case["counts"] == {"least": 3, "most": 3, "sum": 903.0}
    assert case["iterations"] == 38 * 3 and case["epochs"] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["chief", "ps"])
def test_without_a_launcher_each_task_ends_and_tells_who_is_gone(tmp_path, killed):
    configs = processes.tf_configs(2, 1)
    started = {
        name: subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path), "killed_worker"],
            env={**os.environ, "TF_CONFIG": config},
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, config in zip(("chief", "worker 0", "worker 1", "ps"), configs)
    }
    try:
        while not (tmp_path / "under_way").exists():
            assert started["chief"].poll() is None, started["chief"].communicate()
            time.sleep(0.02)
        started[killed].kill()
        for name, process in started.items():
            _, text = process.communicate(timeout=100)
            if name == killed:
                continue
            assert process.returncode == 144, f"{name}: {text}"
            words = "serves the chief, and ends with it"
            assert ("ps 0 (127.0.0.1" if name == "chief" else words) in text
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_command_line_saves_after_sigterm_and_resumes(tmp_path):
    work = tmp_path / "run"
    command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2", "--num_ps=1", "--"]
    command += [sys.executable, "-m", "tfmulti.train", "--strategy=parameter_server"]
    command += ["--model=mlp", f"--workdir={work}", "--checkpoint_steps=4", "--max_staleness=2"]
    first = subprocess.Popen([*command, "--epochs=300"], stdout=subprocess.PIPE, text=True)
    try:
        while not list(work.glob("checkpoints/step_*")):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        text, _ = first.communicate(timeout=100)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 128 + signal.SIGTERM and "SIGTERM: saved step" in text
    told = work / "history.csv"
    epochs = 1 + len(told.read_text().splitlines()) if told.exists() else 1
    [done] = processes.run_together([*command, f"--epochs={epochs}"], [{}], timeout_s=200)
    assert done.returncode == 0 and "resumed at step" in done.stdout, done.stdout + done.stderr
    result = json.loads((work / "result.json").read_text())
    assert result["steps"] == 23 * epochs and result["num_workers"] == 2
    assert result["metrics"]["staleness_max"] <= 2
    assert set(result["steps_by_worker"]) == {"0", "1"}
    header, *lines = (work / "history.csv").read_text().splitlines()
    assert "staleness_p95" in header and len(lines) == epochs
    events = [path.read_bytes() for path in work.glob("logs/train/events*")]
    assert any(b"epoch_staleness_mean" in each for each in events)
