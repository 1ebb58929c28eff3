"""Parameter servers among the tasks of a scheduler: real processes with its variables."""

import json
import os
import random
import socket
import subprocess
import sys

import pods
import pytest

from tfmulti.runtime import processes

TRAIN = (sys.executable, "-m", "tfmulti.train", "--model=mlp", "--epochs=2")
TASKS = 4


def ports_in_a_row(count):
    """Returns the first of some ports that are free."""
    while True:
        first = random.randrange(20000, 30000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def train(environments, folder, *flags, prefix=()):
    """Trains with a chief, two workers and a server; returns what each said."""
    # What a launcher or another scheduler has set here is not for these tasks.
    set_here = [name for name in os.environ if name.startswith(("SLURM_", "PMI_", "SM_"))]
    unset = [f"--unset={name}" for name in {"TF_CONFIG", *set_here} - set(environments[0])]
    work = folder / "run"
    command = [*prefix, "env", *unset, *TRAIN, f"--workdir={work}", *flags]
    done = processes.run_together(command, environments, timeout_s=200)
    said = "\n".join(f"{each.returncode}: {each.stdout}{each.stderr}" for each in done)
    assert [each.returncode for each in done] == [0] * TASKS, said
    result = json.loads((work / "result.json").read_text())
    assert (result["strategy"], result["num_workers"]) == ("ParameterServerStrategy", 2)
    assert result["steps"] == 23 * 2 and set(result["steps_by_worker"]) == {"0", "1"}
    return [each.stdout for each in done]


@pytest.mark.slow
def test_a_step_of_slurm_trains_with_its_last_task_as_server(tmp_path):
    # As srun --ntasks=4 sets them on one host.
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(TASKS),
        "SLURM_STEP_NUM_TASKS": str(TASKS),
        "SLURM_STEP_NODELIST": socket.gethostname(),
        "SLURM_STEP_TASKS_PER_NODE": str(TASKS),
        "TFMULTI_BASE_PORT": str(ports_in_a_row(TASKS)),
    }
    numbers = map(str, range(TASKS))
    tasks = [{**step, "SLURM_PROCID": n, "SLURM_LOCALID": n} for n in numbers]
    chief, *_ = train(tasks, tmp_path, "--strategy=parameter_server", "--num_ps=1")
    assert "1 chief, 2 worker, 1 ps (as requested, Slurm names a cluster" in chief


@pytest.mark.slow
def test_pods_of_an_indexed_job_train_with_the_last_one_as_server(tmp_path):
    names = [f"train-{index}" for index in range(TASKS)]
    job = {"TFMULTI_NUM_WORKERS": str(TASKS), "TFMULTI_NUM_PS": "1", "TFMULTI_SERVICE": "workers"}
    try:
        with pods.start([f"{name}.workers" for name in names], tmp_path) as places:
            tasks = [
                {**job, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": names[index], **place}
                for index, place in enumerate(places)
            ]
            chief, *_ = train(tasks, tmp_path, "--strategy=auto", prefix=pods.PREFIX)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs network namespaces: {error}")
    assert "1 chief, 2 worker, 1 ps (chosen because Kubernetes names a cluster" in chief
