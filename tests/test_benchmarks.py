"""The project's benchmarks: peers, ratios, projections, monitors. No time is asserted."""

import argparse
import dataclasses
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import psutil
import pytest
from test_bench import run_bench, series_of

from benchmarks import __main__ as command
from benchmarks import (
    kinds,
    large_embedding,
    monitors,
    peers,
    pipeline,
    projection,
    sharded_state,
    socket_copy,
    tables,
    techniques,
    tensor_parallel,
)
from benchmarks.kinds import BenchmarksConfig
from tfmulti.bench import results, schedule, setups

ROOT = Path(__file__).parents[1]
KINDS = {kind.name: kind for kind in BenchmarksConfig.KINDS}
SIZE = str(schedule.SIZES[-1])


def test_ratios_and_reasons_for_those_that_are_missing():
    seconds = {setups.RING: 0.0125, setups.MPI: 0.01, setups.ONE_WORKER: 0.01}
    series = [
        series_of(kind, 1 if kind == setups.ONE_WORKER else 2, each, calls)
        for kind, each in seconds.items()
        for calls in (1, 10)
    ]
    series += [series_of(KINDS["ddp"], 2, 0.015), series_of(kinds.PLAIN, 1, 0.01)]
    allreduce = {
        "workers": 4,
        "floats": list(schedule.SIZES),
        "transports": {"ring": {SIZE: {"median": 0.3}}},
        "socket_copy": {SIZE: {"median": 0.1}},
    }
    result = {
        "workloads": {"compute": results.describe_workload(series)},
        "allreduce": allreduce,
        "config": {"steps_per_execution": 10},
    }
    values, missing = tables.compute_ratios(result)
    assert values["compute_efficiency_ring"] == pytest.approx(0.8)
    assert values["compute_throughput_over_ddp"] == pytest.approx(1.5)
    assert values["allreduce_over_socket_copy"] == pytest.approx(2.0)
    assert values["one_replica_over_plain"] is None
    assert "one_replica x1" in missing["one_replica_over_plain"]
    assert "not measured" in missing["communication_step_over_ddp"]
    assert set(values) == set(tables.RATIOS)


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
    for workers, seconds in ((2, 0.1), (4, 0.15)):
        found = {"workers": workers, "floats": [int(SIZE)], "socket_copy": {SIZE: {"median": 0.1}}}
        assert socket_copy.floor_seconds(int(SIZE) * 4, found) == pytest.approx(seconds)


def test_each_file_of_a_peer_is_found_and_nopeers_leaves_them_out():
    names = {path.stem for path in Path(peers.__file__).parent.glob("*.py")} - {"__init__"}
    assert {kind.name for kind in (*peers.TRAINED, *peers.REDUCES)} == names
    for wanted in (True, False):
        config = BenchmarksConfig(replicas="1", peers=wanted)
        chosen = setups.create_setups("compute", config)
        assert any(each.kind.name == "ddp" for each in chosen) == wanted


@pytest.mark.parametrize(
    ("broken", "comes_again"), [("ddp", False), ("ring", True), ("plain", True)]
)
def test_a_peer_that_does_not_run_is_not_tried_with_the_next_workload(
    monkeypatch, tmp_path, broken, comes_again
):
    tried = []

    class Rounds:
        def __init__(self, *arguments):
            pass

        def run(self, chosen, deadline):
            tried.append({each.kind.name for each in chosen})
            series = [series_of(each.kind, each.replicas, 0.1) for each in chosen]
            for each in series:
                each.failure = "no such module" if each.setup.kind.name == broken else ""
            return series

    monkeypatch.setattr(schedule, "Rounds", Rounds)
    config = BenchmarksConfig(allreduce=False, workdir=str(tmp_path))
    command.run_benchmarks(config, print)
    first, second = tried
    assert broken in first
    assert (broken in second) == comes_again


def test_switches_of_a_launcher_are_measured_where_they_are_named():
    names = [kind.name for kind in kinds.SWITCHED]
    assert not set(kinds.SWITCHED) & set(BenchmarksConfig().kinds)
    config = BenchmarksConfig(setups=",".join(names))
    unpinned, all_threads, *allocators = setups.create_setups("communication", config)
    assert '"pin": false' in unpinned.command[-1]
    assert "--threads=1" in unpinned.command and "--threads=0" in all_threads.command
    assert all("--allocator=default" in each.command for each in allocators)
    assert [each.kind.name for each in (unpinned, all_threads, *allocators)] == names


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    flags = ["--workloads=compute", "--batch_size=4", "--project=8"]
    flags += ["--setups=plain,one_replica,one_worker,control,ring,stock_mirrored"]
    text, found = run_bench(tmp_path, *flags, module="benchmarks", cwd=ROOT)
    assert {row["status"] for row in found["workloads"]["compute"]["rows"]} == {"ok"}
    assert found["ratios"]["compute_efficiency_ring"] > 0
    assert found["ratios"]["one_replica_over_plain"] > 0
    assert found["ratios"]["allreduce_over_socket_copy"] > 0
    assert found["ratios"]["compute_efficiency_mpi"] is None
    assert "compute_efficiency_mpi" in found["missing"]
    assert found["projection"]["workloads"]["compute"]["errors"]
    markdown = (tmp_path / "BENCHMARKS.md").read_text()
    for table in tables.create_tables(found, BenchmarksConfig()):
        assert f"## {table.title}" in markdown
        assert table.title.split(":")[0] in text
    assert (tmp_path / "bench.png").read_bytes()[1:4] == b"PNG"


def test_a_page_of_techniques(tmp_path, monkeypatch, capsys):
    names = ["memory", "state"]
    for name in names:
        section = dataclasses.replace(
            techniques.SECTIONS[name], arguments=("benchmarks.fake", name)
        )
        monkeypatch.setitem(techniques.SECTIONS, name, section)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "fake.py").write_text("import sys; print('peak of', sys.argv[1])")
    monkeypatch.setattr(techniques, "_ROOT", tmp_path)
    page = tmp_path / "runs" / "page.md"
    argv = ["techniques", "--only", ",".join(names), "--write_markdown", str(page)]
    monkeypatch.setattr(sys, "argv", argv)
    techniques.main()
    text = page.read_text()
    assert "## Checkpointed activations\n\n`python -m benchmarks.fake memory`\n" in text
    assert "```text\npeak of state\n```" in text and "- processor: " in text
    assert "peak of memory" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*argv, "--only", "memory,all"])
    with pytest.raises(SystemExit):
        techniques.main()
    assert "`--only` must be some of memory, state, " in capsys.readouterr().err


@pytest.mark.parametrize("section", techniques.SECTIONS.values(), ids=list(techniques.SECTIONS))
def test_each_section_is_a_benchmark(section, monkeypatch):
    module, *flags = section.arguments
    read = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(sys, "argv", [module, *flags])
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda *given: read(parse(*given)))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(module).main()


def test_the_rounds_of_the_monitors_cancel_a_drift():
    rounds = [
        {"monitored": [t + 2.0, t + 3.0], "unmonitored": [t + 1.0, t + 4.0]} for t in (0.0, 10.0)
    ]
    found = monitors.describe(rounds)
    assert (found["ratio"], found["p10"], found["p90"]) == (1.0, 1.0, 1.0)
    assert found["standard_error"] == 0.0
    assert found["noise"] == pytest.approx((3.0 + 3 / 11) / 2)


def test_stages_are_idle_for_what_they_do_not_sleep_of_the_longest_step():
    short = {"seconds": [1.0, 1.2, 2.0], "busy": [0.9, 0.9, 0.9]}
    long = {"seconds": [1.0, 1.25, 2.0], "busy": [1.1, 1.1, 1.1]}
    idle = pipeline.measured_idle([short, long])
    assert idle == pytest.approx({"seconds": 1.25, "fraction": 0.2, "least": 0.0, "most": 0.5})
    theory = {(s, m): pipeline.predicted_idle(s, m) for s in (1, 2, 4) for m in (1, 4)}
    assert theory == {
        (1, 1): 0,
        (1, 4): 0,
        (2, 1): 1 / 2,
        (2, 4): 1 / 5,
        (4, 1): 3 / 4,
        (4, 4): 3 / 7,
    }
    [row] = zip(*(column.cells for column in pipeline.idle_table({(2, 4): idle}, 1.0).columns))
    assert row[:-1] == ("2", "4", "1.250", "0", "0.200", "0.00 to 0.50", "0.200")
    assert pipeline.describe_ratios([1.5]) == "1.50 (1.50 to 1.50 in 1 pair)"


@pytest.mark.slow
def test_a_table_that_no_server_could_hold_trains():
    available = psutil.virtual_memory().available
    if available < 9e9:
        pytest.skip(f"needs 9 GB of memory, and {available / 1e9:.1f} are available")
    found = large_embedding.measure(12_000_000, 64, 2, 5, "sgd")
    table, peak = found["table"], found["peak"]
    assert table == 12_000_000 * 64 * 4
    assert found["parts"] == [[6_000_000, 0], [6_000_000, 1]]
    # Whoever held the whole table would have more than its size.
    assert all(each < 0.85 * table for each in peak.values()), peak
    assert all(peak[f"ps {server}"] - peak["worker 0"] < 0.6 * table for server in range(2)), peak
    assert found["loss"][-1] < found["loss"][0] and min(found["trained"]) > 0.95


@pytest.mark.slow
def test_a_pipeline_is_measured():
    flags = ["--stages=2", "--micro_batches=2", "--seconds=0.1", "--steps=2", "--rounds=1"]
    flags += ["--layers=1", "--units=16", "--rows=16"]
    line = [sys.executable, "-m", "benchmarks.pipeline", *flags]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stages that sleep for 0.1 s of a step" in done.stdout
    assert "in 1 pair)" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("of", tensor_parallel.MATRICES)
def test_tensor_parallelism_is_measured(of):
    sizes = {"of": of, "width": 64, "wide": 512, "layers": 2, "rows": 64}
    for way in ("copies", "split"):
        sent = tensor_parallel.measure(way, **sizes)["sent"]
        # Beside gradients of biases, and less for the first layer of split ones.
        assert sent == pytest.approx(tensor_parallel.predicted_bytes(way, **sizes), rel=0.3)
    flags = ["--width=64", "--wide=512", "--layers=1", "--rows=32", "--rounds=1", f"--of={of}"]
    line = [sys.executable, "-m", "benchmarks.tensor_parallel", *flags]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step of split layers over that of copies" in done.stdout


@pytest.mark.slow
def test_the_monitors_are_measured_side_by_side(tmp_path):
    flags = ["--monitors", "--workloads=compute", "--batch_size=4", "--setups=one_worker,ring"]
    text, found = run_bench(tmp_path, *flags, module="benchmarks", cwd=ROOT, result="monitors.json")
    names = [(row["setup"], row["by"]) for row in found["rows"]]
    kinds = ("clock", "processor")
    assert names == [(name, by) for name in ("one_worker x1", "ring x2") for by in kinds]
    assert all(row["ratio"] > 0 and len(row["rounds"]) == 1 for row in found["rows"])
    assert set(found["ratios"]) == set(monitors.KEYS.values())
    assert "monitored_over_unmonitored: " in text
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "monitors.json"}


def test_memory_saved_is_told_in_proportion_to_slots_that_need_not_be_repeated():
    copies = {"bytes": 1000e6, "before": 300e6, "slots": 400e6, "seconds": 2.0, "sent": 0}
    sharded = {**copies, "bytes": 820e6, "seconds": 2.2}
    runs = [{("mpi", None): copies, ("mpi", "state"): sharded}]
    row = sharded_state.describe_way(("mpi", "state"), runs, 0, 2)
    told = dict(zip(sharded_state.COLUMNS, row, strict=True))
    assert (told["of copies'"], told["less, MB"], told["times"]) == ("82%", "180", "1.10")
    assert told["of slots x (1-1/N)"] == "90%"


@pytest.mark.parametrize("shard", [None, "state", "parameters"])
@pytest.mark.slow
def test_sums_for_owners_over_the_ring_send_no_more_bytes_than_over_mpi(shard):
    found = sharded_state.measure(2, 512, 2, shard, "ring")
    for communication in ("ring", "mpi"):
        expected = sharded_state.predicted_bytes(found["slots"], 2, shard, communication)
        assert found["sent"] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(("shard", "way"), sharded_state.TORCH_WAYS.items())
@pytest.mark.skipif(not find_spec("torch"), reason="PyTorch is not installed")
@pytest.mark.slow
def test_pytorch_shards_the_same_model(shard, way):
    found = sharded_state.measure(1, 64, 2, shard, sharded_state.TORCH)
    assert found["slots"] == 2 * 4 * (64 * 64 + 64 + 65) and found["bytes"] > found["before"]
