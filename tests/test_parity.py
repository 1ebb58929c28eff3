"""`python -m tfmulti.parity`: the comparison, the causes it names, and its command line."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tfmulti
from tfmulti.parity import __main__ as parity
from tfmulti.parity import compare, diagnosis, training
from tfmulti.parity.compare import Record, Summary
from tfmulti.parity.config import ParityConfig
from tfmulti.runtime import command_line
from tfmulti.verification import causes

HERE = Path(__file__).parent


def run(model, *flags, data="rows", columns=80):
    names = [f"--model=parity_faults:{model}", f"--dataset=parity_faults:{data}", "--steps=6"]
    return subprocess.run(
        [sys.executable, "-m", "tfmulti.parity", *names, *flags],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, "COLUMNS": str(columns)},
    )


def words_of(text):
    return " ".join(text.split())


# Without TensorFlow.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extra"], ["flags only", "Received: extra"]),
        (["--replica", "2"], ["Unknown command line flag 'replica'"]),
        (["--replicas", "one"], ["`replicas` must be numbers from 2", "replicas='one'"]),
        (["--workers", "1"], ["`workers` must be numbers from 2", "workers='1'"]),
        (["--replicas=0", "--workers=0"], ["at least one configuration"]),
        (["--steps", "0"], ["`steps` must be at least 1"]),
        (["--global_batch_size", "2"], ["at least the number of replicas", "num_replicas=3"]),
        (["--optimizer", "best"], ["best", "adam"]),
    ],
)
def test_bad_usage_exits_2(arguments, words, capsys):
    assert parity.main(["parity", *arguments]) == command_line.BAD_USAGE
    message = capsys.readouterr().err
    assert all(word in message for word in words)


@pytest.mark.parametrize("setups", [("2", "0"), ("2,3", "2"), ("4", "3")])
def test_the_last_batch_is_uneven_and_in_the_middle(setups):
    for available, steps in itertools.product([4, 5, 7, 30, 60, 300, 1437], [1, 2, 7, 20, 50]):
        config = ParityConfig(replicas=setups[0], workers=setups[1], steps=steps)
        chosen = training.choose_layout(available, config)
        assert chosen.num_examples <= available
        assert chosen.epochs >= 2 and chosen.steps >= steps
        assert all(chosen.last_batch % count for _, count in config.setups)
        assert chosen.global_batch_size >= max(count for _, count in config.setups)


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="more examples than there are replicas"):
        training.choose_layout(2, ParityConfig())


def write(folder, weights, losses, accuracy, data=("a", "a")):
    record = Record(folder)
    summary = Summary(list(data), ["dense/kernel", "dense/bias"], [True, True])
    for step, value in enumerate(weights):
        summary.steps.append(step)
        record.write_weights(step, [np.asarray(value[0]), np.asarray(value[1])])
        if step:
            summary.losses[step] = losses[step - 1]
    summary.epochs = [{"loss": losses[-1], "accuracy": accuracy}]
    record.write_summary(summary)
    return record


def test_the_first_difference_is_found_and_its_size(tmp_path):
    one = write(tmp_path / "one", [([1, 2.0], 0.0), ([1, 200.0], 1.0)], [0.5], 0.5)
    same = compare.compare(one, one, 0.0)
    assert set(same.largest.values()) == {0.0}
    assert same.first is None and same.same_data and same.same_start
    other = write(tmp_path / "other", [([1, 2.0], 0.0), ([1, 198.0], 1.1)], [0.5], 0.75)
    found = compare.compare(other, one, 1e-6)
    assert found.first == ("dense/kernel", 1)
    assert found.differing == ["dense/kernel", "dense/bias"]
    assert found.largest == pytest.approx({"weights": 0.1, "loss": 0.0, "metrics": 0.25})
    assert found.by_variable == pytest.approx({"dense/kernel": 0.01, "dense/bias": 0.1})
    metric = write(tmp_path / "metric", [([1, 2.0], 0.0), ([1, 200.0], 1.0)], [0.5], 0.75)
    assert compare.compare(metric, one, 1e-6).first == ("accuracy", 1)
    lost = write(tmp_path / "lost", [([1, 2.0], 0.0), ([1, np.nan], 1.0)], [np.nan], 0.5)
    assert compare.compare(lost, one, 1e-6).largest["weights"] == np.inf
    assert compare.compare(lost, one, 1e-6).largest["loss"] == np.inf


def test_other_data_other_starts_and_other_steps_are_told(tmp_path):
    one = write(tmp_path / "one", [([1, 2.0], 0.0), ([1, 2.0], 1.0)], [0.5], 0.5)
    data = write(tmp_path / "a", [([1, 2.0], 0.0), ([1, 2.0], 1.0)], [0.5], 0.5, ("a", "b"))
    assert not compare.compare(data, one, 1e-6).same_data
    assert not compare.compare(data, data, 1e-6).same_data
    start = write(tmp_path / "b", [([1, 2.1], 0.0), ([1, 2.0], 1.0)], [0.5], 0.5)
    assert not compare.compare(start, one, 1e-6).same_start
    longer = write(tmp_path / "c", [([1, 2.0], 0.0)] * 3, [0.5, 0.5], 0.5)
    with pytest.raises(ValueError, match="same number of steps"):
        compare.compare(longer, one, 1e-6)


def test_workers_must_agree_bit_for_bit(tmp_path):
    one = write(tmp_path / "one", [([1, 2.0], 0.0), ([1, 2.0], 1.0)], [0.5], 0.5)
    other = write(tmp_path / "b", [([1, 2.0], 0.0), ([1, 2.0], 1.0 + 1e-16 + 4e-16)], [0.5], 0.5)
    assert compare.first_differing_workers([one, one]) is None
    assert compare.first_differing_workers([one, one, other]) == ("dense/bias", 1)


def test_noise_is_measured_only_where_the_order_of_rows_means_nothing():
    same = compare.Comparison({"weights": 0.1, "loss": 0.0, "metrics": 0.0}, {}, first_loss=1e-7)
    assert compare.noise_of(same, 2**-23) == (same.largest, "")
    same.first_loss = 1e-3
    noise, why = compare.noise_of(same, 2**-23)
    assert noise is None and "random numbers" in why
    assert compare.noise_of(same, 2**-7)[0] == same.largest
    same.largest["weights"] = float("inf")
    noise, why = compare.noise_of(same, 2**-7)
    assert noise is None and "infinite" in why


def test_weights_of_bfloat16_are_compared_as_numbers(tmp_path):
    record = Record(tmp_path)
    weights = np.array([1.0, 2.5], ml_dtypes.bfloat16), np.array([1 / 3])
    record.write_weights(1, list(weights))
    read = record.read_weights(1)
    assert compare.difference(read[0], [1.0, 2.0]) == 0.25
    assert (read[1].dtype, compare.difference(*read[1:], weights[1])) == ("float64", 0.0)


# The causes, by experiments in this process.


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "cause", "where"),
    [
        ("dropout", causes.RANDOMNESS, "drop_half"),
        ("unseeded_noise", causes.RANDOMNESS, "unseeded_noise"),
        ("noise_in_the_step", causes.RANDOMNESS, "NoisyStep"),
        ("local_normalization", causes.STATISTICS, "normalize_locally"),
        ("hidden_normalization", causes.STATISTICS, "block/hidden"),
        ("own_normalization", causes.STATISTICS, "Centered 'centered' ("),
        ("functional_normalization", causes.STATISTICS, "functional"),
        ("own_contrastive_loss", causes.BATCH_LOSS, "compute_loss"),
        ("sum_add_loss", causes.SUM_ADD_LOSS, "penalty"),
        ("batch_add_loss", causes.BATCH_ADD_LOSS, "spread"),
        ("scaled_step", causes.SCALED, "parity_faults.py:"),
        ("sum_step", causes.SUM_STEP, "train_step"),
        ("contrastive_step", causes.BATCH_STEP, "train_step"),
        ("own_state", causes.STATE, "Largest 'largest'"),
    ],
)
def test_a_fault_is_named(model, cause, where):
    found = diagnose(model, 3)
    assert [finding["cause"] for finding in found] == [cause.name]
    assert where in found[0]["where"]
    assert found[0]["advice"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "clean",
        "clean_in_many_ways",
        "clean_step",
        "amplified_rounding",
        "sum_loss",
        "contrastive_loss",
        "hidden_optimizer",
    ],
)
def test_no_fault_is_named_where_there_is_none(model):
    assert diagnose(model, 3) == []


@pytest.mark.slow
def test_coarse_rounding_is_named_where_no_variable_differs():
    found = diagnose("bfloat16", 3)
    named = [(finding["cause"], finding["where"]) for finding in found]
    assert named == [(causes.COARSE.name, "bfloat16, float32")]


@pytest.mark.slow
def test_several_faults_are_all_named():
    found = [finding["cause"] for finding in diagnose("many_faults", 2)]
    expected = [causes.RANDOMNESS, causes.STATISTICS, causes.SUM_ADD_LOSS]
    assert found == [cause.name for cause in expected]


def diagnose(model, count):
    config = ParityConfig(
        model=f"parity_faults:{model}", dataset="parity_faults:rows", replicas=str(count)
    )
    devices = [f"CPU:{number}" for number in range(count)]
    settings = {"verify": "always", "on_difference": "error"}
    strategy = tfmulti.create_strategy("mirrored", devices=devices, **settings)
    return diagnosis.diagnose(config, strategy)


# The command line, with processes of its own.


@pytest.mark.slow
def test_a_clean_model_gives_one_devices_result(tmp_path):
    path = tmp_path / "parity.json"
    done = run("clean", "--replicas=2,3", "--workers=2", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["equal"] and result["config"]["steps"] == 6
    assert [outcome["name"] for outcome in result["outcomes"]] == [
        "2 replicas",
        "3 replicas",
        "2 workers",
    ]
    for outcome in result["outcomes"]:
        assert outcome["verdict"] == "equal"
        assert set(outcome["comparison"]["largest"]) == {"weights", "loss", "metrics"}
        assert max(outcome["comparison"]["largest"].values()) <= 1e-6
    text = words_of(done.stdout)
    assert "6 steps: 2 epochs, each of 2 batches of 20 and one of 7 examples" in text
    assert "Every configuration gives one device's result." in text
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.search(r"^ *2 workers +equal +\d\.\de-\d\d +\d", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_fault_is_told_with_what_to_write_instead():
    done = run("local_normalization", "--replicas=2", "--workers=0", columns=120)
    assert done.returncode == command_line.ERROR
    text = words_of(done.stdout)
    assert "local batch statistics: sequential/normalize_locally" in text
    assert "BatchNormalization(synchronized=True)" in text
    assert "dense/kernel, step 1" in text
    assert "Not one device's result: 2 replicas." in text


@pytest.mark.slow
def test_a_failing_worker_ends_the_others_and_its_message_is_shown():
    began = time.perf_counter()
    done = run("worker_one_fails", "--replicas=0", "--workers=2", "--traceback")
    assert time.perf_counter() - began < 90
    assert done.returncode == command_line.ERROR
    assert "2 workers: `worker` must not be 1." in words_of(done.stdout)
    assert "in worker_one_fails" in done.stdout


@pytest.mark.slow
def test_the_worker_that_died_is_told_not_the_one_that_lost_it():
    done = run("worker_one_dies", "--replicas=0", "--workers=2")
    assert done.returncode == command_line.ERROR
    assert "2 workers: The process ended with exit code 3." in words_of(done.stdout)


@pytest.mark.slow
def test_what_never_ends_is_ended():
    done = run("never_ends", "--replicas=2", "--workers=0", "--timeout=12")
    assert done.returncode == command_line.ERROR
    assert "It took longer than 12 s." in words_of(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("dropout", "rows", "per-replica randomness: drop_half"),
        ("weights_of_the_moment", "rows", "initial weights that differ: sequential/dense_1/bias"),
        ("clean", "rows_of_the_moment", "data that differ from call to call"),
        ("ends_at_once", "rows", "ended with exit code 3"),
    ],
)
def test_what_differs_ends_with_exit_code_1(model, data, words):
    done = run(model, "--replicas=2", "--workers=0", data=data)
    assert done.returncode == command_line.ERROR, done.stdout
    assert words in words_of(done.stdout)


@pytest.mark.slow
def test_noise_is_no_difference():
    done = run("amplified_rounding", "--replicas=2", "--workers=0")
    assert done.returncode == 0, done.stdout
    assert "rounding, amplified by the model: sequential/dense/bias" in words_of(done.stdout)
