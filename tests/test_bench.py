"""The bench: its arithmetic, its jobs, and two small runs of the whole. No time is asserted."""

import csv
import dataclasses
import json
import os
import subprocess
import sys

import psutil
import pytest

from tfmulti.bench import __main__, report, results, schedule, setups
from tfmulti.bench.jobs import Job, JobFailed
from tfmulti.bench.results import Series, break_down, find_bottleneck, step_seconds, summarize
from tfmulti.bench.setups import BenchConfig, Kind, Setup

OWN = """
import os
import time

import keras
import numpy as np
import tensorflow as tf


def load():
    def wait(x):
        time.sleep(0.004)
        return x

    def slow(x, y):
        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [4]), y

    x, y = np.zeros((64, 4), "float32"), np.arange(64) % 2
    data = tf.data.Dataset.from_tensor_slices((x, y)).map(slow)
    return data, data


def create(train):
    if os.environ.get("TFMULTI_BENCH_INDEX") == "1":
        raise ValueError("this one is broken")
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
"""


def series_of(kind, replicas, seconds, calls=1, batch_size=10):
    """A series of two steps of so many seconds."""
    setup = Setup(kind, replicas, batch_size, (), ({},), (1, 10))
    answer = {"ends": [0.0, seconds, 2 * seconds], "ended": 2 * seconds}
    block = results.describe_block([answer], 2, 1)
    return Series(setup, calls, [block], figures={"input_seconds": 1e-3})


def test_a_summary_has_the_median_and_the_percentiles():
    summary = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (summary["median"], summary["best"], summary["n"]) == (3.0, 1.0, 5)
    assert (summary["p10"], summary["p90"]) == pytest.approx((1.4, 4.6))


def test_first_calls_of_a_long_block_are_left_out():
    ends = [0.0, 9.0, 18.0, *(18.0 + step for step in range(1, 9))]
    assert step_seconds(ends) == [1.0] * 8
    assert step_seconds([0.0, 10.0, 20.0], steps_per_execution=10) == [1.0, 1.0]


def test_parts_of_a_step_add_to_the_step_whatever_the_noise():
    for control in (5.0, 20.0):
        parts = break_down(single=12.0, several=14.0, control=control, input_alone=30.0)
        assert sum(parts.values()) == pytest.approx(12.0)
        assert min(parts.values()) >= 0.0


@pytest.mark.parametrize(
    ("single", "several", "control", "drawn", "bound_by"),
    [
        (10.0, 10.0, 10.0, 9.0, "input"),
        (10.0, 10.0, 10.0, 1.0, "compute"),
        (10.0, 10.0, 5.0, 1.0, "communication"),
        (10.0, 6.0, 6.0, 1.0, "host"),
    ],
)
def test_the_bottleneck_is_what_takes_the_time(single, several, control, drawn, bound_by):
    assert find_bottleneck(break_down(single, several, control, drawn)) == bound_by


def test_speed_up_and_efficiency_against_one_worker_and_the_control():
    peer = Kind("peer", "another", {}, "any", calls_of_several=False, baseline="peer")
    found = results.describe_workload(
        [
            series_of(setups.ONE_WORKER, 1, 0.01),
            series_of(setups.CONTROL, 2, 0.0125),
            series_of(setups.RING, 2, 0.02),
            series_of(peer, 1, 0.03),
            series_of(peer, 2, 0.03),
        ]
    )
    rows = {row["setup"]: row for row in found["rows"]}
    assert rows["ring x2"]["speed_up"] == pytest.approx(1.0)
    assert rows["ring x2"]["efficiency"] == pytest.approx(0.5)
    assert rows["ring x2"]["efficiency_of_control"] == pytest.approx(0.625)
    assert rows["peer x2"]["efficiency"] == pytest.approx(1.0)
    assert [each["setup"] for each in found["breakdown"]] == ["one_worker x1", "ring x2"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"replicas": "two"}, "replicas"),
        ({"replicas": "100000"}, "replicas"),
        ({"workloads": "vgg"}, "workloads"),
        ({"workloads": "own"}, "model"),
        ({"setups": "horovod"}, "setups"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_settings_that_cannot_be(settings, name):
    with pytest.raises(ValueError, match=rf"`{name}`.* Received: .*\. \w+.*\.$"):
        BenchConfig(**settings)


def test_a_wrong_command_line_ends_with_2(capsys):
    assert __main__.main(["bench", "--rounds=0"]) == 2
    assert "`rounds` must be at least 1" in capsys.readouterr().err


def script(code, processes=1):
    text = f"import os, sys, time\nfrom tfmulti.bench import worker\n{code}"
    environments = tuple({"NUMBER": str(index)} for index in range(processes))
    command = (sys.executable, "-c", text)
    return Setup(setups.CONTROL, processes, 1, command, environments)


def test_all_processes_of_a_job_do_an_order(tmp_path):
    code = "number = int(os.environ['NUMBER'])\n"
    code += "worker.serve(number, lambda steps: {'ends': [float(number)] * steps}, size=5, "
    code += "gpus=os.environ.get('CUDA_VISIBLE_DEVICES'))"
    with Job(script(code, processes=3), tmp_path, 60.0) as job:
        job.start()
        assert [fact["size"] for fact in job.facts] == [5] * 3
        # Some configurations would use GPUs, and others, on CPUs, be compared with these.
        assert [fact["gpus"] for fact in job.facts] == ["-1"] * 3
        answers = job.train(steps=2)
        assert [answer["ends"] for answer in answers] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
        assert all(answer["peak_bytes"] > 0 for answer in answers)
        pids = [fact["pid"] for fact in job.facts]
        job.end()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.exit('error: no such device')", "no such device"),
        ("time.sleep(600)", "no answer within"),
        ("worker.serve(0, lambda steps: time.sleep(600))", "no answer within"),
        ("worker.serve(0, lambda steps: 1 / 0)", "ZeroDivisionError"),
        ("worker.serve(0, lambda steps: os._exit(3))", "exit code 3"),
    ],
)
def test_a_job_that_fails_says_why_and_leaves_nothing(tmp_path, code, words):
    with Job(script(code), tmp_path, 5.0) as job:
        with pytest.raises(JobFailed, match=words):
            job.start()
            job.train(steps=1)
    assert not processes_with(str(tmp_path))


class FakeJob:
    """A job of a kind by whose name it fails: at its start, or at orders with some word."""

    began, facts = 0.0, [{}]
    log: list

    def __init__(self, setup, folder, timeout_s):
        self.setup, self.is_killed = setup, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self):
        self._fail_at("start")

    def train(self, **order):
        self.log.append((self.setup.kind.name, *order))
        for word in order:
            self._fail_at(word)
        count = order.get("steps", order.get("times"))
        ends = [0.01 * number for number in range(count)]
        answer = {"ends": ends, "ended": ends[-1], "seconds": ends, "peak_bytes": 1}
        # None answers for a job whose processes are gone.
        return [] if self.is_killed else [answer]

    def _fail_at(self, word):
        if word == self.setup.kind.name:
            raise JobFailed(word)

    def kill(self):
        self.is_killed = True
        self.log.append((self.setup.kind.name, "killed"))

    def end(self):
        pass


def fake_setups(monkeypatch, *names):
    monkeypatch.setattr(schedule, "Job", FakeJob)
    monkeypatch.setattr(FakeJob, "log", [], raising=False)
    kinds = [dataclasses.replace(setups.ONE_WORKER, name=name) for name in names]
    return [Setup(kind, 1, 10, (), ({},), (1, 10)) for kind in kinds]


def test_a_job_that_fails_alone_does_not_end_the_bench(monkeypatch, tmp_path):
    chosen = fake_setups(monkeypatch, "input_only", "good")
    rounds = schedule.Rounds("compute", BenchConfig(rounds=1, steps=4), tmp_path, lambda line: None)
    found = rounds.run(chosen, deadline=float("inf"))
    assert [each.failure for each in found] == ["input_only"] * 2 + [""] * 2
    assert all(each.blocks for each in found[2:])


def test_a_transport_that_fails_is_ended_before_others_are_measured(monkeypatch, tmp_path):
    chosen = fake_setups(monkeypatch, "start", "floats", "good")
    config = BenchConfig(setups="one_worker")
    found = schedule.measure_reductions(config, tmp_path, lambda line: None, chosen)
    assert list(found["failures"]) == ["start", "floats"]
    assert list(found["transports"]) == ["good"]
    log = FakeJob.log
    assert [log.count((name, "killed")) for name in ("start", "floats", "good")] == [1, 1, 0]
    assert log.index(("floats", "killed")) < log.index(("good", "floats", "times"))


def processes_with(text):
    """The processes that have a text in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and text in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


def run_bench(folder, *flags, module="tfmulti.bench", cwd=None, result="bench.json"):
    """Runs a small bench; returns what it prints and what it writes."""
    command = [sys.executable, "-m", module, f"--workdir={folder}", "--rounds=1"]
    command += ["--steps=12", "--steps_per_execution=2", *flags]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not processes_with(str(folder))
    return done.stdout, json.loads((folder / result).read_text())


@pytest.mark.slow
def test_a_slow_source_is_input_bound_and_a_broken_set_up_does_not_stop_the_others(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    flags = ["--model=own:create", "--dataset=own:load", "--batch_size=8", "--noallreduce"]
    flags += ["--setups=one_worker,control"]
    text, found = run_bench(tmp_path / "out", *flags, cwd=tmp_path)
    [verdict] = found["workloads"]["own"]["breakdown"]
    assert verdict["bound_by"] == "input"
    assert "input-bound" in text
    rows = found["workloads"]["own"]["rows"]
    status = {row["setup"]: row["status"] for row in rows}
    assert status["one_worker x1"] == "ok"
    assert status["control x2"].startswith("does not run: ")
    assert "this one is broken" in status["control x2"]


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    flags = ["--workloads=compute", "--batch_size=4", "--setups=one_worker,control,ring"]
    text, found = run_bench(tmp_path, *flags, "--strong", "--verify=always")
    rows = found["workloads"]["compute"]["rows"]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["setup"]: row["verified_seconds"] > 0 for row in rows}["ring x2"]
    assert found["machine"]["cores"] and found["machine"]["versions"]["keras"]
    assert set(found["allreduce"]["transports"]) == {"ring"}
    with open(tmp_path / "bench.csv", newline="") as file:
        assert [row["setup"] for row in csv.DictReader(file)] == [row["setup"] for row in rows]
    markdown = (tmp_path / "BENCHMARKS.md").read_text()
    for table in report.create_tables(found, BenchConfig()):
        assert f"## {table.title}" in markdown
        assert table.title.split(":")[0] in text
    assert "verification s" in markdown
