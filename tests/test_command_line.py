"""The help of every entry point, and the types of its settings."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"epochs": "3"}, "`epochs` must be a whole number. Received: epochs='3'. Use for example"),
        ({"epochs": 2.5}, "`epochs` must be a whole number. Received: epochs=2.5. "),
        ({"seed": None}, "`seed` must be a whole number. Received: seed=None. "),
        ({"seed": True}, "`seed` must be a whole number. Received: seed=True. "),
        ({"warmup_epochs": "1"}, "`warmup_epochs` must be a number. Received: warmup_epochs='1'. "),
        ({"bucket_bytes": "8"}, "`bucket_bytes` must be None or a whole number. Rec.* example 1."),
        ({"monitor": "no"}, "`monitor` must be True or False. Received: monitor='no'. "),
        ({"model": max}, "`model` must be text. Received: .*max.* package.module:function."),
        ({"verify": None}, "`verify` must be one of auto, .* Received: verify=None. "),
        (
            {"per_replica_batch_size": "8"},
            "must be None, a whole number or 'auto'. Received: .*'8'",
        ),
    ],
)
def test_settings_of_another_type_are_told(setting, rule):
    with pytest.raises(ValueError, match=rule):
        TrainConfig(**setting)


def test_numbers_of_numpy_and_paths_are_settings():
    config = TrainConfig(epochs=np.int64(3), learning_rate=np.float32(0.5), workdir=Path("runs"))
    assert json.loads(json.dumps(dataclasses.asdict(config)))["epochs"] == 3
    assert (config.learning_rate, config.workdir, config.optimizer) == (0.5, "runs", None)
