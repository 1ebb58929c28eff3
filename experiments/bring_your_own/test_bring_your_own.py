"""Both modules of the package end alike on one device and on two; the package stands alone."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bring_your_own import experiment

HERE = Path(__file__).parent


def train(project, **flags):
    metrics, _ = experiment.train(experiment.Settings(project=project, epochs=1, **flags))
    metrics.pop("examples_per_second")
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "project", ["two_inputs", pytest.param("regression", marks=pytest.mark.slow)]
)
def test_two_replicas_end_where_one_device_ends(project):
    one = train(project, strategy="one_device", global_batch_size=128)
    two = train(project, strategy="mirrored", logical_cpus=2, global_batch_size=128)
    assert two == pytest.approx(one, abs=1e-6)


def test_the_package_knows_nothing_of_tfmulti():
    for path in (HERE / "my_project").glob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(statement, "names", [])]
            assert "tfmulti" not in [*names, getattr(statement, "module", None)]


@pytest.mark.slow
def test_the_command_line_in_the_folder_of_the_package(tmp_path):
    command = [sys.executable, "-m", "tfmulti.train", "--model=my_project.regression:create"]
    done = subprocess.run(
        [*command, "--dataset=my_project.regression:load", "--epochs=2", f"--workdir={tmp_path}"],
        cwd=HERE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "within_tenth" in json.loads((tmp_path / "result.json").read_text())["metrics"]
