"""The help of every entry point."""

import dataclasses
import re
import subprocess
import sys

import pytest

from benchmarks.kinds import BenchmarksConfig
from tfmulti.bench import BenchConfig
from tfmulti.doctor.__main__ import DoctorConfig
from tfmulti.parity import ParityConfig
from tfmulti.train.config import TrainConfig

SETTINGS = {
    "tfmulti.train": TrainConfig,
    "tfmulti.doctor": DoctorConfig,
    "tfmulti.parity": ParityConfig,
    "tfmulti.bench": BenchConfig,
    "benchmarks": BenchmarksConfig,
}


@pytest.mark.parametrize(("module", "settings"), SETTINGS.items(), ids=SETTINGS)
def test_help_imports_no_tensorflow_and_shows_every_flag_with_its_default(module, settings):
    code = (
        f"import sys; from {module}.__main__ import main; code = main(['command', '--help'])\n"
        "print(sorted({'tensorflow', 'keras', 'torch'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    names = re.findall(r"^  --(\w+): .*\n      default: ", done.stdout, re.MULTILINE)
    assert {field.name for field in dataclasses.fields(settings)} <= set(names)
