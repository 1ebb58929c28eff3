"""Flags, and the comparison of runs."""

import json

import numpy as np
import pytest

from experiments import common, compare
from experiments.recover import experiment as recover


def test_flags_become_settings():
    settings = common.parse(common.Settings, ["name", "--epochs=3", "--strategy", "mirrored"])
    assert (settings.epochs, settings.strategy, settings.seed) == (3, "mirrored", 0)


@pytest.mark.parametrize("wrong", ["--epochs=many", "--strategy=two", "--nothing", "word"])
def test_what_cannot_be_read_ends_with_2(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        common.parse(common.Settings, ["name", wrong])
    assert ended.value.code == 2
    assert "--help" in capsys.readouterr().err


def test_flags_without_use_are_not_offered(capsys):
    with pytest.raises(SystemExit) as ended:
        common.parse(recover.Settings, ["name", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--epochs" in told and "--strategy" not in told
    with pytest.raises(SystemExit):
        common.parse(recover.Settings, ["name", "--strategy=mirrored"])


def test_a_result_is_kept_and_compared(tmp_path):
    settings = common.Settings(workdir=str(tmp_path))
    common.keep(settings, {"loss": 0.5}, [np.ones(2)])
    assert json.loads((tmp_path / common.RESULT).read_text())["metrics"] == {"loss": 0.5}
    with np.load(tmp_path / common.WEIGHTS) as weights:
        np.testing.assert_array_equal(weights["arr_0"], np.ones(2))
    one = {"metrics": {"loss": 0.5, "examples_per_second": 9.0}, "weights": [np.ones(2)]}
    two = {"metrics": {"loss": 0.25, "examples_per_second": 5.0}, "weights": [np.zeros(2)]}
    lines = compare.table({"one": one, "two": two}, ["loss"]).splitlines()
    assert lines[2:] == ["| one | 0.5000 | - | - |", "| two | 0.2500 | 1 | 0.2 |"]


def test_results_stand_between_the_marks(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{compare.BEGIN}old\n{compare.END}after\n")
    compare.write_between_marks(path, "new")
    assert path.read_text() == f"before\n{compare.BEGIN}\nnew\n{compare.END}after\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gan", "text_transformer", "image_classification"])
def test_two_workers_end_where_one_device_ends(name, tmp_path):
    flags = {
        "gan": ["--width=8"],
        "text_transformer": ["--num_examples=90", "--length=8", "--width=16", "--depth=1"],
        "image_classification": ["--noaugment", "--filters=8", "--image_size=8"],
    }[name]
    flags += ["--epochs=1", "--global_batch_size=300", "--dtype_policy=float64"]
    one = compare.run(name, "one device", flags, tmp_path / "one")
    two = compare.run(name, "two workers", flags, tmp_path / "two")
    assert max(compare.differences(two, one)) < 1e-6
