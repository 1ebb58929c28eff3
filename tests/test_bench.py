"""The bench: its arithmetic, its jobs, and two small runs of the whole. No time is asserted."""

import csv
import json
import os
import subprocess
import sys

import psutil
import pytest

from tfmulti.bench import monitors, projection, ratios, results, run, setups, tables, transports
from tfmulti.bench.config import KINDS, SWITCHED, BenchConfig
from tfmulti.bench.jobs import Job, JobFailed
from tfmulti.bench.results import break_down
from tfmulti.bench.schedule import Block, Series
from tfmulti.bench.setups import Setup
from tfmulti.bench.statistics import Summary, step_seconds, summarize

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
    setup = Setup(kind, replicas, batch_size, (), ({},), replicas, (1, 10))
    return Series(setup, calls, [Block(0, 2, [seconds] * 2, 1.0, 0.0, 0.0)], input_seconds=[1e-3])


def described(*series):
    return results.describe_workload("compute", series)


def test_summary_of_values():
    summary = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (summary.median, summary.best, summary.n) == (3.0, 1.0, 5)
    assert (summary.p10, summary.p90) == pytest.approx((1.4, 4.6))


def test_first_calls_of_a_long_block_are_left_out():
    ends = [0.0, 9.0, 18.0, *(18.0 + step for step in range(1, 9))]
    assert step_seconds(ends) == [1.0] * 8
    assert step_seconds([0.0, 10.0, 20.0], steps_per_execution=10) == [1.0, 1.0]


def test_parts_of_a_step_add_to_the_step_whatever_the_noise():
    for control in (5.0, 20.0):
        parts = break_down(single=12.0, several=14.0, control=control, input_alone=30.0)
        assert parts.step == pytest.approx(12.0)
        assert min(parts.input, parts.compute, parts.reduction, parts.host) >= 0.0


@pytest.mark.parametrize(
    ("single", "several", "control", "drawn", "bound_by"),
    [
        (10.0, 10.0, 10.0, 9.0, "input"),
        (10.0, 10.0, 10.0, 1.0, "compute"),
        (10.0, 10.0, 5.0, 1.0, "communication"),
        (10.0, 6.0, 6.0, 1.0, "host"),
    ],
)
def test_verdict(single, several, control, drawn, bound_by):
    assert break_down(single, several, control, drawn).bound_by == bound_by


def test_speed_up_and_efficiency_against_one_worker_and_the_control():
    found = described(
        series_of(setups.ONE_WORKER, 1, 0.01),
        series_of(setups.CONTROL, 2, 0.0125),
        series_of(setups.RING, 2, 0.02),
        series_of(setups.DDP, 1, 0.03),
        series_of(setups.DDP, 2, 0.03),
    )
    rows = {row["setup"]: row for row in found["rows"]}
    assert rows["ring x2"]["speed_up"] == pytest.approx(1.0)
    assert rows["ring x2"]["efficiency"] == pytest.approx(0.5)
    assert rows["ring x2"]["efficiency_of_control"] == pytest.approx(0.625)
    assert rows["ddp x2"]["efficiency"] == pytest.approx(1.0)


def test_ratios_and_reasons_for_those_that_are_missing():
    kinds = {setups.RING: 0.0125, setups.MPI: 0.01, setups.ONE_WORKER: 0.01}
    series = [
        series_of(kind, 1 if kind == setups.ONE_WORKER else 2, seconds, calls)
        for kind, seconds in kinds.items()
        for calls in (1, 10)
    ]
    series += [series_of(setups.DDP, 2, 0.015), series_of(setups.PLAIN, 1, 0.01)]
    allreduce = {
        "workers": 4,
        "transports": {"ring": {str(transports.SIZES[-1]): {"median": 0.3}}},
        "socket_copy": {str(transports.SIZES[-1]): {"median": 0.1}},
    }
    result = {
        "workloads": {"compute": described(*series)},
        "allreduce": allreduce,
        "config": {"steps_per_execution": 10},
    }
    values, missing = ratios.compute_ratios(result)
    assert values["compute_efficiency_ring"] == pytest.approx(0.8)
    assert values["compute_throughput_over_ddp"] == pytest.approx(1.5)
    assert values["allreduce_over_socket_copy"] == pytest.approx(2.0)
    assert values["one_replica_over_plain"] is None
    assert "one_replica x1" in missing["one_replica_over_plain"]
    assert "not measured" in missing["communication_step_over_ddp"]
    assert set(values) == set(ratios.MEANINGS)


def test_projection_of_what_was_measured_has_no_error():
    link = projection.Link(latency=1e-3, bytes_per_second=1e9)
    seconds = {
        size: projection.reduction_seconds("ring", size, 2, link) for size in (0, 10**6, 10**8)
    }
    fitted = projection.fit_link(seconds, 2)
    assert fitted.latency == pytest.approx(link.latency)
    assert fitted.bytes_per_second == pytest.approx(link.bytes_per_second)
    measured = {2: 0.05 + projection.reduction_seconds("ring", 10**8, 2, link)}
    found = projection.project(0.05, 10**8, fitted, 1024, measured)
    assert [row["workers"] for row in found["rows"]][::4] == [2**n for n in range(1, 11)]
    errors = {(e["algorithm"], e["overlap"]): e["error"] for e in found["errors"]}
    assert errors["ring", "none"] == pytest.approx(0.0)
    assert errors["ring", "full"] < 0


def test_a_tree_has_the_lower_latency_on_many_workers():
    link = projection.Link(latency=1e-3, bytes_per_second=1e9)
    ring, tree = (projection.reduction_seconds(a, 4, 1024, link) for a in ("ring", "tree"))
    assert tree < ring


def test_floor_is_that_of_a_ring():
    copy = Summary(0.1, 0.1, 0.1, 0.1, 5, 0.1)
    size = transports.SIZES[-1] * 4
    assert transports.floor_seconds(size, 2, copy) == pytest.approx(0.1)
    assert transports.floor_seconds(size, 4, copy) == pytest.approx(0.15)


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


def test_a_wrong_command_line_ends_with_2_without_tensorflow():
    command = [sys.executable, "-X", "importtime", "-m", "tfmulti.bench", "--rounds=0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "`rounds` must be at least 1" in done.stderr
    assert " tensorflow" not in done.stderr


def test_stock_peers_are_measured_with_peers_only():
    config = BenchConfig(replicas="1")
    assert {s.kind for s in setups.create_setups("compute", config)} <= set(setups.MEANINGS)
    assert not any(s.kind == setups.DDP for s in setups.create_setups("compute", config))
    with_peers = BenchConfig(replicas="1", peers=True)
    assert any(s.kind == setups.DDP for s in setups.create_setups("compute", with_peers))


def test_peers_need_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(setups, "PEERS_FOLDER", tmp_path / "not" / "there")
    with pytest.raises(ValueError, match="needs the scripts of a clone.* Received: --peers"):
        run.run_bench(BenchConfig(peers=True, workdir=str(tmp_path)), print)


@pytest.mark.parametrize(
    ("broken", "comes_again"), [(setups.DDP, False), (setups.RING, True), (setups.PLAIN, True)]
)
def test_a_peer_that_does_not_run_is_not_tried_with_the_next_workload(
    monkeypatch, tmp_path, broken, comes_again
):
    tried = []

    class Rounds:
        def __init__(self, *arguments):
            pass

        def run(self, chosen, deadline):
            tried.append({each.kind for each in chosen})
            series = [series_of(each.kind, each.replicas, 0.1) for each in chosen]
            for each in series:
                each.failure = "no such module" if each.setup.kind == broken else ""
            return series

    monkeypatch.setattr(run, "Rounds", Rounds)
    config = BenchConfig(peers=True, allreduce=False, workdir=str(tmp_path), setups=",".join(KINDS))
    run.run_bench(config, print)
    first, second = tried
    assert broken in first
    assert (broken in second) == comes_again


def script(code, processes=1):
    text = f"import os, sys, time\nfrom tfmulti.bench import control\n{code}"
    environments = tuple({"NUMBER": str(index)} for index in range(processes))
    return Setup("control", processes, 1, (sys.executable, "-c", text), environments, processes)


def test_switches_of_a_launcher_are_measured_where_they_are_named():
    assert not set(SWITCHED) & set(BenchConfig().kinds)
    config = BenchConfig(setups=",".join(SWITCHED))
    unpinned, all_threads, *allocators = setups.create_setups("communication", config)
    assert '"pin": false' in unpinned.command[-1]
    assert "--threads=1" in unpinned.command and "--threads=0" in all_threads.command
    assert all("--allocator=default" in each.command for each in allocators)
    assert [each.kind for each in (unpinned, all_threads, *allocators)] == list(SWITCHED)
    assert set(SWITCHED) <= set(setups.MEANINGS)


def test_all_processes_of_a_job_do_an_order(tmp_path):
    code = "number = int(os.environ['NUMBER'])\n"
    code += "control.serve('x', number, lambda steps: {'ends': [float(number)] * steps}, size=5)"
    with Job(script(code, processes=3), tmp_path, 60.0) as job:
        job.start()
        assert [fact["size"] for fact in job.facts] == [5] * 3
        answers = job.train(steps=2)
        assert [answer["ends"] for answer in answers] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
        assert all(answer["ended"] >= answer["began"] for answer in answers)
        pids = [fact["pid"] for fact in job.facts]
        job.end()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.exit('error: no such device')", "no such device"),
        ("time.sleep(600)", "no answer within"),
        ("control.serve('x', 0, lambda steps: time.sleep(600))", "no answer within"),
        ("control.serve('x', 0, lambda steps: 1 / 0)", "ZeroDivisionError"),
        ("control.serve('x', 0, lambda steps: os._exit(3))", "exit code 3"),
    ],
)
def test_a_job_that_fails_says_why_and_leaves_nothing(tmp_path, code, words):
    with Job(script(code), tmp_path, 5.0) as job:
        with pytest.raises(JobFailed, match=words):
            job.start()
            job.train(steps=1)
    assert not processes_with(str(tmp_path))


def test_a_script_trains_alone_without_a_driver():
    code = "from tfmulti.bench import control\nimport time\n"
    code += "control.serve('x', 0, lambda steps: {'ends': [float(n) for n in range(steps)]})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "1000.00 ms a step" in done.stdout


def processes_with(text):
    """The processes that have a text in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and text in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


def run_bench(folder, *flags, cwd=None, result="bench.json"):
    command = [sys.executable, "-m", "tfmulti.bench", f"--workdir={folder}", "--rounds=1"]
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
    text, found = run_bench(tmp_path, *flags, "--project=8", "--strong")
    assert {row["status"] for row in found["workloads"]["compute"]["rows"]} == {"ok"}
    assert found["ratios"]["compute_efficiency_ring"] > 0
    assert found["ratios"]["compute_efficiency_mpi"] is None
    assert "compute_efficiency_mpi" in found["missing"]
    assert found["machine"]["cores"] and found["machine"]["versions"]["keras"]
    assert found["projection"]["workloads"]["compute"]["errors"]
    with open(tmp_path / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["workloads"]["compute"]["rows"])
    markdown = (tmp_path / "BENCHMARKS.md").read_text()
    for table in tables.create_tables(found):
        assert f"## {table.title}" in markdown
        assert table.title.split(":")[0] in text
    assert (tmp_path / "bench.png").read_bytes()[1:4] == b"PNG"


def test_the_rounds_of_the_monitors_cancel_a_drift():
    rounds = [monitors.Round((t + 2.0, t + 3.0), (t + 1.0, t + 4.0)) for t in (0.0, 10.0)]
    found = monitors.describe(rounds)
    assert (found["ratio"], found["p10"], found["p90"]) == (1.0, 1.0, 1.0)
    assert found["standard_error"] == 0.0
    assert found["noise"] == pytest.approx((3.0 + 3 / 11) / 2)


@pytest.mark.slow
def test_the_monitors_are_measured_side_by_side(tmp_path):
    flags = ["--monitors", "--workloads=compute", "--batch_size=4", "--setups=one_worker,ring"]
    text, found = run_bench(tmp_path, *flags, result="monitors.json")
    names = [(row["setup"], row["by"]) for row in found["rows"]]
    kinds = ("clock", "processor")
    assert names == [(name, by) for name in ("one_worker x1", "ring x2") for by in kinds]
    assert all(row["ratio"] > 0 and len(row["rounds"]) == 1 for row in found["rows"])
    assert set(found["ratios"]) == set(monitors.KEYS.values())
    assert "monitored_over_unmonitored: " in text
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "monitors.json"}
