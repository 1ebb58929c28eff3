"""The cluster of a job step of Slurm, from the variables that srun sets for each task.

https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES". Neither
`scontrol` nor the other tasks are needed. Workers are counted host by host: with srun's
`--distribution=block`, its default, a worker's index is its SLURM_PROCID.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from tfmulti.cluster import gpus, scheduler_variables
from tfmulti.cluster.errors import ClusterError, setting_error
from tfmulti.cluster.task import Cluster

SOURCE = "Slurm"
# Step numbers from here up are no steps: the shell of salloc, the script of sbatch (slurm.h).
_SPECIAL_STEPS = 0xFFFFFFF0
# Ports of a job begin in one of 600 blocks, below those that Linux gives to connections (32768
# up): jobs that follow one another, and their steps, have others.
_FIRST_PORT, _BLOCK, _NUM_BLOCKS, _STEP = 12000, 32, 600, 211
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_TASKS = re.compile(r"([0-9]{1,5})(?:\(x([0-9]{1,6})\))?")
_variable_error = functools.partial(
    setting_error,
    source=SOURCE,
    advice="Start each task with srun, and leave its SLURM_ variables as they are.",
)


def find_in_slurm(environ: Mapping[str, str], num_ps: int = 0) -> Cluster | None:
    """Returns the cluster of this process's job step, or None outside of Slurm.

    A step of one task, and a job of one task without a step, are a cluster of one worker.

    Args:
        environ: the environment.
        num_ps: how many tasks, the last ones, will be parameter servers: these and the first
            one, the chief, are given no GPUs.

    Raises:
        ClusterError: where the job has several tasks and srun has not started this process; for
            variables that contradict one another.

    Example:
        >>> find_in_slurm({
        ...     "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3",
        ...     "SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
        ...     "SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "2,1",
        ... }).spec["worker"]
        ('a:12224', 'a:12225', 'b:12224')
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    if not is_step(environ):
        _check_alone(environ)
        return scheduler_variables.single_worker(SOURCE)
    hosts, tasks = _read_layout(environ)
    if sum(tasks) == 1:
        return scheduler_variables.single_worker(SOURCE)
    host = scheduler_variables.read_number(environ, "SLURM_NODEID", SOURCE)
    place = scheduler_variables.read_number(environ, "SLURM_LOCALID", SOURCE)
    if host >= len(hosts) or place >= tasks[host]:
        raise _variable_error(
            "SLURM_NODEID",
            "and SLURM_LOCALID must name a task of the step",
            received=f"SLURM_NODEID={host}, SLURM_LOCALID={place}, {tasks} tasks on {hosts}",
        )
    index = sum(tasks[:host]) + place
    workers = scheduler_variables.list_addresses(hosts, tasks, first_port(environ, hosts, tasks))
    visible_gpus = gpus.NO_GPU
    if scheduler_variables.is_worker(index, len(workers), num_ps):
        names = [name for name, count in zip(hosts, tasks) for _ in range(count)]
        with_gpus = [
            each
            for each, name in enumerate(names)
            if name == hosts[host] and scheduler_variables.is_worker(each, len(names), num_ps)
        ]
        visible_gpus = gpus.share_gpus(environ, with_gpus.index(index), len(with_gpus))
    return Cluster({"worker": workers}, "worker", index, SOURCE, visible_gpus)


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process as a task of a job step.

    The script of sbatch and the shell of salloc are not tasks; nor is a script that was submitted
    from within a step, and still has the step's variables beside those of its own job.

    Example:
        >>> is_step({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
        False
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not (step.isdecimal() and int(step) < _SPECIAL_STEPS):
        return False
    tasks = environ.get("SLURM_NTASKS")
    return "SLURM_PROCID" in environ and tasks == environ.get("SLURM_STEP_NUM_TASKS", tasks)


def first_port(environ: Mapping[str, str], hosts: Sequence[str], tasks: Sequence[int]) -> int:
    """Returns the port of the first task on each host; the same on all tasks.

    It is TFMULTI_BASE_PORT if that is set, else the first port that srun has reserved
    (`--resv-ports`), else one computed from the numbers of the job and of the step.

    Args:
        environ: the environment.
        hosts: the hosts of the step.
        tasks: how many tasks each has.

    Example:
        >>> first_port({"SLURM_JOB_ID": "7", "SLURM_STEP_RESV_PORTS": "13000-13003"}, ["a"], [4])
        13000
    """
    most = max(sum(n for name, n in zip(hosts, tasks) if name == host) for host in set(hosts))
    reserved = _PORTS.match(environ.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved and int(reserved[2] or reserved[1]) - int(reserved[1]) + 1 >= most:
        default = int(reserved[1])
    else:
        job = scheduler_variables.read_number(environ, "SLURM_JOB_ID", SOURCE)
        block = (
            job + _STEP * scheduler_variables.read_number(environ, "SLURM_STEP_ID", SOURCE)
        ) % _NUM_BLOCKS
        default = _FIRST_PORT + _BLOCK * block
    return scheduler_variables.read_first_port(environ, default, most, SOURCE)


def read_tasks_per_node(text: str) -> list[int]:
    """Returns the tasks of each host, from Slurm's short form.

    Raises:
        ClusterError: if it has another form.

    Example:
        >>> read_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part)
        if not found:
            raise _variable_error(
                "SLURM_STEP_TASKS_PER_NODE",
                'must have numbers, as "2(x3),1"',
                received=f"SLURM_STEP_TASKS_PER_NODE={text}",
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _read_layout(environ) -> tuple[list[str], list[int]]:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), "")
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = next((environ[name] for name in names if environ.get(name)), "")
    hosts, tasks = scheduler_variables.expand_hosts(nodes, SOURCE), read_tasks_per_node(counts)
    if len(hosts) != len(tasks) or sum(tasks) != scheduler_variables.read_number(
        environ, "SLURM_NTASKS", SOURCE
    ):
        raise _variable_error(
            "SLURM_STEP_NODELIST",
            "must name a host for each number of SLURM_STEP_TASKS_PER_NODE, SLURM_NTASKS in all",
            received=f"{nodes}, {counts}, SLURM_NTASKS={environ.get('SLURM_NTASKS')}",
        )
    return hosts, tasks


def _check_alone(environ) -> None:
    """Refuses to train alone in a job that was made for several."""
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        number = environ.get(name)
        if number:
            break
    if number not in (None, "", "1"):
        raise ClusterError(
            "A Slurm job of several tasks must start each of them with srun. Received: "
            f"{name}={number}, but this process was not started by srun. Write `srun` before "
            "`python`; or, to train on this host alone, choose --strategy mirrored or one_device, "
            "or unset SLURM_JOB_ID."
        )
