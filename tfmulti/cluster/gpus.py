"""The GPUs that CUDA_VISIBLE_DEVICES names, and their division among a host's processes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tfmulti.cluster.errors import setting_error

VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = "-1"

_DEVICE = re.compile(r"nvidia[0-9]+")
_NUMBER = re.compile(r"\+?\d+")


def count_gpus(devices: str = "/dev") -> int:
    """Returns the number of NVIDIA GPUs of this host, from its device files, without the driver."""
    folder = Path(devices)
    return sum(bool(_DEVICE.fullmatch(path.name)) for path in folder.glob("nvidia*"))


def list_visible(
    environ: Mapping[str, str] = os.environ, count: Callable[[], int] = count_gpus
) -> list[str]:
    """Returns the GPUs that a process may use, without TensorFlow, which would allocate them.

    Args:
        environ: The environment.
        count: Returns the number of GPUs of this host; called if no variable has it.

    >>> list_visible({"CUDA_VISIBLE_DEVICES": "2,3"}), list_visible({"CUDA_VISIBLE_DEVICES": "-1"})
    (['2', '3'], [])
    """
    given = environ.get(VISIBLE)
    if given is None:
        return [str(number) for number in range(count())]
    return read_list(given)[0]


def read_list(value: str, find: Callable[[str], object] = str) -> tuple[list, str]:
    """Reads CUDA_VISIBLE_DEVICES as CUDA does, which says nothing of errors.

    CUDA reads the list up to the first entry that names no GPU, and ignores the rest; see
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    The first entry decides whether all are numbers or names, and of a number CUDA reads the
    digits it begins with: "0;1" is GPU 0 alone. `tests/test_real_gpu.py` compares with CUDA.

    Args:
        value: The variable's value.
        find: Function of a number or name that returns the GPU, or None where there is none.

    Returns:
        What `find` has returned, by default the numbers, or names such as `GPU-...` and `MIG-...`,
        whether such GPUs exist or not; and the fault, empty where there is none.

    >>> read_list("1,2"), read_list("GPU-a"), read_list("0;1")
    ((['1', '2'], ''), (['GPU-a'], ''), (['0'], 'of "0;1" CUDA reads the first number only'))
    """
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    found, misread = [], ""
    for entry in entries:
        name = entry if is_name(entry) else ""
        number = None if name else _NUMBER.match(entry)
        if found and bool(name) != is_name(entries[0]) and (name or number):
            kind = "name among numbers" if name else "number among names"
            return found, f'"{entry}" is a {kind}, so it and all after it are ignored'
        gpu = find(name or str(int(number[0]))) if name or number else None
        if gpu is None:
            return found, f'"{entry}" names no GPU, so it and all after it are ignored'
        if gpu in found:
            return [], f'"{entry}" comes twice, so CUDA gives no GPU at all'
        if number and number[0] != entry:
            misread = misread or f'of "{entry}" CUDA reads the first number only'
        found.append(gpu)
    return found, misread


def list_fault(environ: Mapping[str, str] = os.environ) -> str:
    """Returns what the user should know of CUDA_VISIBLE_DEVICES; empty where nothing is wrong.

    A list whose first entry names no GPU, such as -1 or Slurm's NoDevFiles, hides all on purpose.

    >>> list_fault({"CUDA_VISIBLE_DEVICES": "2,3"}), list_fault({"CUDA_VISIBLE_DEVICES": "-1"})
    ('', '')
    """
    value = environ.get(VISIBLE, "")
    if not read_list(value.partition(",")[0])[0]:
        return ""
    fault = read_list(value)[1]
    return fault and (
        f"`{VISIBLE}` must name each GPU once, by numbers separated by commas. "
        f"Received: {VISIBLE}={value}: {fault}. Correct it, or unset it to use every GPU."
    )


def is_name(entry: str) -> bool:
    """Whether an entry names a GPU, or a part of one, instead of counting."""
    return entry.startswith(("GPU-", "MIG-"))


def divide(visible: list[str], num_processes: int) -> list[str]:
    """Returns CUDA_VISIBLE_DEVICES for each process: equally many GPUs; the remaining stay idle.

    >>> divide(["0", "1", "2"], 2)
    ['0', '1']
    """
    each = len(visible) // num_processes
    parts = [visible[each * index : each * (index + 1)] for index in range(num_processes)]
    return [",".join(part) for part in parts]


def share_gpus(
    environ: Mapping[str, str],
    local_index: int,
    num_tasks: int,
    count: Callable[[], int] = count_gpus,
) -> str | None:
    """Returns what CUDA_VISIBLE_DEVICES must be for a task of Slurm, or None to leave it.

    `--gpus-per-node` and `--gres` let every task of a host see all its GPUs; `--gpus-per-task`
    and `--gpu-bind` let each see its own (https://slurm.schedmd.com/gres.html), and so may a
    script around the program: it then sees fewer than Slurm has given the host. Otherwise all tasks
    get equally many; the remaining GPUs stay idle.

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
        >>> share_gpus({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "4"}, 1, 2) is None
        True
    """
    if num_tasks == 1 or _bound_by_slurm(environ):
        return None
    visible = list_visible(environ, count)
    if not visible:
        return None
    on_node = environ.get("SLURM_GPUS_ON_NODE")
    # Without that number, fewer GPUs than tasks are a sign of it.
    divided = on_node != str(len(visible)) if on_node else len(visible) < num_tasks
    if divided and VISIBLE in environ:
        return None
    if len(visible) < num_tasks:
        raise setting_error(
            VISIBLE,
            "must have a GPU for each task of the host",
            received=f"{len(visible)} GPUs, {num_tasks} tasks on this host",
            source="Slurm",
            advice="Ask for fewer tasks (--ntasks-per-node) or more GPUs (--gpus-per-task=1).",
        )
    return divide(visible, num_tasks)[local_index]


def _bound_by_slurm(environ) -> bool:
    bind = environ.get("SLURM_GPU_BIND")
    if bind:
        return "none" not in bind.split(",")
    per_task = environ.get("SLURM_TRES_PER_TASK", "")
    names = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
    return "gpu" in per_task or any(environ.get(name) for name in names)
