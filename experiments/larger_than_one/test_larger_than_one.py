"""Training that does not fit into one worker's memory does on two."""

import os
import re
import subprocess
import sys

import pytest

PROGRAM = [sys.executable, "-m", "experiments.larger_than_one.experiment", "--epochs=1"]
LAUNCH = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2", "--allocator=default", "--"]
TINY = ["--layers=3", "--width=256"]
# What is freed is given back at once, and TensorFlow keeps no copies of weights.
ENVIRON = {"MALLOC_MMAP_THRESHOLD_": "1000000", "TF_ENABLE_ONEDNN_OPTS": "0"}


def run(*flags, launch=()):
    environ = {**os.environ, **ENVIRON}
    command = [*launch, *PROGRAM, *flags]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def metrics_of(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: float(value) for name, value in re.findall(r"(\w+): ([\d.e+]+)", last(done))}


def last(done):
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_it_fails_alone_and_trains_on_two():
    limit = "--memory_mb=620"
    alone = run("--strategy=one_device", limit)
    assert alone.returncode == 1
    assert "Received: a worker that needs more than --memory_mb=620" in alone.stderr
    two = run("--strategy=multi_worker", limit, launch=[*LAUNCH[:3], "--mpi", *LAUNCH[3:]])
    lines = [line for line in two.stdout.splitlines() if "taken_mb" in line]
    assert two.returncode == 0, two.stdout + two.stderr
    assert 0 < float(re.search(r"taken_mb: ([\d.]+)", lines[-1])[1]) < 620


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "state", "parameters"])
def test_a_small_one_has_the_loss_of_one_device(shard):
    one = metrics_of(run("--strategy=one_device", *TINY))
    two = run("--strategy=multi_worker", f"--shard={shard}", *TINY, launch=LAUNCH)
    assert two.returncode == 0, two.stdout + two.stderr
    [line] = [line for line in two.stdout.splitlines() if "taken_mb" in line]
    assert float(re.search(r"loss: ([\d.]+)", line)[1]) == pytest.approx(one["loss"], rel=1e-3)
