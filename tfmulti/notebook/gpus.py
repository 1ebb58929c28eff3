"""Each worker's GPUs among those of this host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfmulti.cluster import gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE = "-1"


def variables(num_workers: int, visible: list[str]) -> list[Mapping[str, str]]:
    """Returns the environment variables that give each worker its GPUs.

    Two workers cannot be on one GPU: NCCL refuses it. So all train on the CPU where there are fewer
    GPUs than workers.

    Args:
        num_workers: Number of workers on this host.
        visible: The GPUs, as CUDA_VISIBLE_DEVICES names them.

    Example:
    >>> [each["CUDA_VISIBLE_DEVICES"] for each in variables(2, ["0", "1", "2", "3"])]
    ['0,1', '2,3']
    >>> variables(2, ["0"]), variables(2, []), variables(1, ["0"])
    ([{'CUDA_VISIBLE_DEVICES': '-1'}, {'CUDA_VISIBLE_DEVICES': '-1'}], [{}, {}], [{}])
    """
    if num_workers == 1 or not visible:
        return [{} for _ in range(num_workers)]
    if len(visible) < num_workers:
        return [{VISIBLE: _NONE} for _ in range(num_workers)]
    # As many for each: replicas of a strategy are so many on every worker.
    each = len(visible) // num_workers
    return [
        {VISIBLE: ",".join(visible[each * index : each * (index + 1)])}
        for index in range(num_workers)
    ]


def list_visible(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the GPUs that this process may use, without TensorFlow, which would take them.

    >>> list_visible({"CUDA_VISIBLE_DEVICES": "2,3"}), list_visible({"CUDA_VISIBLE_DEVICES": "-1"})
    (['2', '3'], [])
    """
    given = environ.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # CUDA takes those before the first that it does not know.
        bad = next((i for i, name in enumerate(names) if name in ("", _NONE)), len(names))
        return names[:bad]
    return [str(number) for number in range(gpus.count_gpus())]
