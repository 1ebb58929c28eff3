"""Both files train the same on one device and on three replicas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def train(name, folder, *flags):
    command = [sys.executable, "-m", "tfmulti.train", f"--model={name}:create", "--epochs=2"]
    done = subprocess.run(
        [*command, f"--dataset={name}:load", f"--workdir={folder}", *flags],
        cwd=HERE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text())["metrics"]


@pytest.mark.parametrize("name", ["two_inputs", pytest.param("regression", marks=pytest.mark.slow)])
def test_three_replicas_end_where_one_device_ends(name, tmp_path):
    one = train(name, tmp_path / "one", "--strategy=one_device")
    three = train(name, tmp_path / "three", "--strategy=mirrored", "--logical_cpus=3")
    assert three == pytest.approx(one, abs=1e-6)
