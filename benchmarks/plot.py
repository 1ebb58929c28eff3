"""Draws bench.png: speed-up, the parts of a step, and the all-reduce against its floor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.kinds import ONE_REPLICA, PLAIN
from benchmarks.peers import TRAINED
from benchmarks.socket_copy import floor_seconds
from tfmulti.bench.report import FLOAT_BYTES
from tfmulti.bench.results import OK
from tfmulti.bench.setups import CONTROL, ONE_WORKER

_PARTS = ("input", "compute", "reduction", "host")
_COLOURS = {"input": "#8c6bb1", "compute": "#4292c6", "reduction": "#ef6548", "host": "#bdbdbd"}
_BARS = {"tfmulti": "#4292c6", "control: no communication": "#969696", "peers": "#e6550d"}
_FAMILIES = {CONTROL.name: "control: no communication"} | {kind.name: "peers" for kind in TRAINED}
_NOT_SCALING = {kind.name for kind in (PLAIN, ONE_REPLICA, ONE_WORKER)}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draws a result.

    Args:
        found: What `run_bench` returned.
        path: The PNG file.
    """
    names = list(found["workloads"])
    has_reductions = bool(found["allreduce"] and found["allreduce"]["transports"])
    rows = len(names) + has_reductions
    figure = Figure(figsize=(14, 5.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    for number, name in enumerate(names):
        _draw_speed_up(axes[number][0], name, found["workloads"][name]["rows"])
        _draw_parts(axes[number][1], name, found["workloads"][name]["breakdown"])
    if has_reductions:
        _draw_reductions(axes[-1][0], found["allreduce"], per_second=False)
        _draw_reductions(axes[-1][1], found["allreduce"], per_second=True)
    figure.savefig(path, dpi=110)


def _draw_speed_up(axis, name, rows):
    """Bars, a group for each configuration: a line between two sizes would say little."""
    chosen = [row for row in rows if row["status"] == OK and row["kind"] not in _NOT_SCALING]
    chosen = [row for row in chosen if row["replicas"] > 1 and row["speed_up"]]
    labels = [f"{row['setup']}, {row['steps_per_execution']} a call" for row in chosen]
    values = [row["speed_up"] for row in chosen]
    colours = [_BARS[_FAMILIES.get(row["kind"], "tfmulti")] for row in chosen]
    places = range(len(chosen))
    axis.barh(places, values, color=colours)
    for place, value, row in zip(places, values, chosen):
        axis.plot([row["replicas"]] * 2, [place - 0.45, place + 0.45], color="black", lw=1.5)
        axis.annotate(
            f"{value:.2f} ({row['efficiency']:.0%})",
            (value, place),
            (-4, 0),
            textcoords="offset points",
            va="center",
            ha="right",
            fontsize=8,
            color="white",
        )
    handles = [Patch(color=colour, label=label) for label, colour in _BARS.items()]
    handles.append(Line2D([], [], color="black", lw=1.5, label="ideal"))
    axis.set_yticks(places, labels, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.set_xlabel("speed-up over one worker (efficiency)")
    axis.set_title(f"{name}: speed-up against ideal")
    axis.legend(
        handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4
    )


def _draw_parts(axis, name, parts):
    labels = [each["setup"] for each in parts]
    below = [0.0] * len(parts)
    for part in _PARTS:
        values = [each[part] * 1e3 for each in parts]
        axis.bar(labels, values, bottom=below, label=part, color=_COLOURS[part], width=0.6)
        below = [base + value for base, value in zip(below, values)]
    for place, (total, each) in enumerate(zip(below, parts)):
        axis.annotate(
            f"{total:.1f} ms\n{each['bound_by']}",
            (place, total),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    axis.set_ylim(0, 1.3 * max(below, default=1.0))
    axis.set_ylabel("milliseconds of a step, 1 a call")
    axis.tick_params(axis="x", labelsize=8, rotation=15)
    axis.set_title(f"{name}: where a step's time goes")
    if parts:
        axis.legend(fontsize=8, loc="upper left", ncols=4)


def _draw_reductions(axis, found, per_second):
    sizes = [floats * FLOAT_BYTES for floats in found["floats"]]
    share = 2 * (found["workers"] - 1) / found["workers"]

    def scale(size, seconds):
        return size * share / seconds / 1e6 if per_second else seconds * 1e3

    for name, measured in found["transports"].items():
        values = [
            scale(size, measured[str(floats)]["median"])
            for size, floats in zip(sizes, found["floats"])
        ]
        axis.plot(sizes, values, marker="o", label=name)
    if found["socket_copy"]:
        floor = [scale(size, floor_seconds(size, found)) for size in sizes]
        axis.plot(sizes, floor, "k--", label="floor: S/B x 2(n-1)/n, B of a socket copy")
    axis.set_xscale("log")
    axis.set_yscale("log")
    if not per_second:
        axis.set_ylim(bottom=1e-3)
    axis.set_xlabel("bytes reduced")
    axis.set_ylabel("MB/s of each worker's link" if per_second else "milliseconds, median")
    what = "bandwidth" if per_second else "time"
    axis.set_title(f"All-reduce, {found['workers']} workers: {what}")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)
