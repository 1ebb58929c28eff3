"""Divides a host's GPUs among its tasks, if the scheduler lets every task see all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tfmulti.cluster.errors import setting_error

_DEVICE = re.compile(r"nvidia[0-9]+")


def count_gpus(devices: str = "/dev") -> int:
    """Returns the number of NVIDIA GPUs of this host, from its device files, without the driver."""
    folder = Path(devices)
    return sum(bool(_DEVICE.fullmatch(path.name)) for path in folder.glob("nvidia*"))


def share_gpus(
    environ: Mapping[str, str],
    local_index: int,
    num_tasks: int,
    count: Callable[[], int] = count_gpus,
) -> str | None:
    """Returns what CUDA_VISIBLE_DEVICES must be for a task of Slurm, or None to leave it.

    `--gpus-per-node` and `--gres` let every task of a host see all its GPUs; `--gpus-per-task`
    and `--gpu-bind` let each see its own (https://slurm.schedmd.com/gres.html). All tasks get
    equally many; the remaining GPUs stay idle.

    Args:
        environ: the environment.
        local_index: this task's place among those of its host, from 0.
        num_tasks: tasks on this host.
        count: returns the number of GPUs of this host; called if no variable has it.

    Raises:
        ClusterError: where there are fewer GPUs than tasks: two workers cannot share one.

    Example:
        >>> share_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1, 2)
        '2,3'
        >>> share_gpus({"CUDA_VISIBLE_DEVICES": "2", "SLURM_GPUS_PER_TASK": "1"}, 1, 2) is None
        True
    """
    if num_tasks == 1 or _bound_by_slurm(environ):
        return None
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        visible = [str(number) for number in range(count())]
    else:
        visible = [name for name in given.split(",") if name.strip()]
    if not visible or visible[0].startswith("-") or visible == ["NoDevFiles"]:
        return None
    if len(visible) < num_tasks:
        on_node = environ.get("SLURM_GPUS_ON_NODE", "")
        if given is not None and on_node != str(len(visible)):
            # Somebody has divided them already.
            return None
        raise setting_error(
            "CUDA_VISIBLE_DEVICES",
            "must have a GPU for each task of the host",
            received=f"{len(visible)} GPUs, {num_tasks} tasks on this host",
            source="Slurm",
            advice="Ask for fewer tasks (--ntasks-per-node) or more GPUs (--gpus-per-task=1).",
        )
    each = len(visible) // num_tasks
    return ",".join(visible[local_index * each : (local_index + 1) * each])


def _bound_by_slurm(environ) -> bool:
    bind = environ.get("SLURM_GPU_BIND")
    if bind:
        return "none" not in bind.split(",")
    per_task = environ.get("SLURM_TRES_PER_TASK", "")
    names = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
    return "gpu" in per_task or any(environ.get(name) for name in names)
