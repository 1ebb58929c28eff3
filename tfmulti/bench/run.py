"""The whole benchmark: all workloads, then the all-reduce, then the evaluation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from tfmulti.bench import projection, ratios, results, setups, transports
from tfmulti.bench.config import BenchConfig
from tfmulti.bench.schedule import Rounds

_ALLREDUCE_S = 40.0
_FLOAT_BYTES = 4


def run_bench(config: BenchConfig, print_fn: Callable[[str], None]) -> dict:
    """Measures, and returns what `bench.json` holds.

    Args:
        config: The bench.
        print_fn: Function that takes a line of text for the user.
    """
    setups.check_peers(config)
    began = time.perf_counter()
    folder = Path(config.workdir) / "logs"
    found = {"machine": results.describe(), "config": dataclasses.asdict(config), "workloads": {}}
    reduces = config.numbers[-1] > 1 and config.allreduce
    end = began + config.minutes * 60 - (_ALLREDUCE_S if reduces else 0.0)
    names, broken = config.workload_names, set()
    for number, name in enumerate(names):
        now = time.perf_counter()
        deadline = now + (end - now) / (len(names) - number)
        rounds = Rounds(name, config, folder / name, print_fn)
        chosen = [each for each in setups.create_setups(name, config) if each.kind not in broken]
        series = rounds.run(chosen, deadline)
        # A peer that does not run here costs its startup time only once.
        broken |= {each.setup.kind for each in series if each.failure} & set(setups.PEERS)
        found["workloads"][name] = results.describe_workload(name, series)
    found["allreduce"] = transports.measure(config, folder, print_fn) if reduces else None
    found["ratios"], found["missing"] = ratios.compute_ratios(found)
    found["projection"] = _project(found, config) if config.project else None
    found["seconds"] = time.perf_counter() - began
    return found


def _project(found, config) -> dict:
    """Projects each workload over the faster of our transports."""
    links = {
        kind: projection.fit_link(
            {int(size) * _FLOAT_BYTES: each["median"] for size, each in sizes.items()},
            found["allreduce"]["workers"],
        )
        for kind, sizes in (found["allreduce"] or {"transports": {}})["transports"].items()
        if kind in setups.MULTI_WORKER
    }
    if not links:
        return {"missing": "no all-reduce was measured, so latency and bandwidth are not known"}
    kind = max(links, key=lambda each: links[each].bytes_per_second)
    projected = {"transport": kind, "workloads": {}}
    calls = config.steps_per_execution
    for name, workload in found["workloads"].items():
        rows = workload["rows"]
        compute = results.find(rows, setups.CONTROL, config.numbers[-1], calls)
        compute = compute or results.find(rows, setups.ONE_WORKER, 1, calls)
        steps = {n: results.find(rows, kind, n, calls) for n in config.numbers if n > 1}
        measured = {n: row["step"]["median"] for n, row in steps.items() if row}
        if compute is not None and workload["gradient_bytes"]:
            projected["workloads"][name] = projection.project(
                compute["step"]["median"],
                workload["gradient_bytes"],
                links[kind],
                config.project,
                measured,
            )
    return projected
