"""Type hints reach users: the stub of the public names and `py.typed`; what the wheel has."""

import ast
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import tfmulti

ROOT = Path(__file__).parents[1]
STUB = ROOT / "tfmulti" / "__init__.pyi"
SCRIPT = """
    import tfmulti

    config = tfmulti.TrainConfig(epochs=3)
    size: int = config.resolve_global_batch_size(2)
    cluster: tfmulti.Cluster | None = tfmulti.resolve_cluster(check_network=False)
    strategy = tfmulti.create_strategy("auto", logical_cpus=2)
    tfmulti.callbacks.Checkpoint("folder", every_steps=10, keep=3)
"""
MISTAKES = """
    import tfmulti

    tfmulti.TrainConfig(epochs="three")
    tfmulti.create_strategy("auto", logical_cpu=2)
    tfmulti.resolve_cluster().num_workers
    tfmulti.callbacks.Checkpoint("folder", every_steps="ten")
    tfmulti.create_strategie("auto")
"""


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras: nothing here uses it."""


def test_the_stub_has_the_public_names_from_where_they_are():
    found = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname: node.module for alias in node.names}
    homes = {name: f"tfmulti.{home}" for name, home in tfmulti._HOMES.items()}
    assert found == {**homes, "callbacks": "tfmulti"}


@pytest.mark.slow
def test_the_wheel_has_the_types_and_the_digits(tmp_path):
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tfmulti", tmp_path / "tfmulti", ignore=skip)
    wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", *wheel, "."], cwd=tmp_path, check=True)
    (made,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(made).namelist()
    wanted = ("py.typed", "__init__.pyi", "__init__.py", "data/digits.npz")
    assert {f"tfmulti/{name}" for name in wanted} <= set(names)


@pytest.mark.slow
def test_a_type_checker_knows_right_from_wrong(tmp_path):
    assert check(SCRIPT, tmp_path) == []
    lines = {int(error.split(":")[1]) for error in check(MISTAKES, tmp_path)}
    assert lines == {4, 5, 6, 7, 8}


def check(code, folder):
    """Returns mypy's errors."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    settings = folder / "mypy.ini"
    # Neither comes with types.
    lines = ["[mypy]", f"mypy_path = {ROOT}", "[mypy-keras.*,tensorflow.*]"]
    settings.write_text(
        "\n".join([*lines, "follow_imports = skip", "ignore_missing_imports = True"])
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, "--no-incremental", script.name],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return [line for line in done.stdout.splitlines() if line.startswith("script.py")]
