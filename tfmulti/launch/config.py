"""The settings of a job, and what they give each worker: its task, and its part of the machine."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tfmulti.cluster import gpus, schedulers
from tfmulti.cluster.network import address_fault, split_address
from tfmulti.launch import supervisor
from tfmulti.runtime import console, memory, processes
from tfmulti.settings import check_settings, setting

ALLOCATORS = ("keep", "default")
_SLOTS = re.compile(r"slots=([1-9][0-9]{0,4})")

# With these, glibc uses no mmap and returns no memory: large gradients reuse existing pages. glibc
# reads them when a process starts. TensorFlow takes tensors from regions of its own, where smaller
# ones do not lie between large ones: malloc grew with each gap that was too small for the next.
_KEEP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
}
_LEAST_ARENAS = 4
_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """One job; every setting is a flag of `python -m tfmulti.launch`.

    Raises:
        ValueError: For a value that is invalid or incompatible with another.

    Example:
    >>> LaunchConfig(num_workers=2).max_restarts
    0
    """

    num_workers: int | None = setting(None, "Workers to start on this machine.", at_least=1)
    num_ps: int = setting(
        0,
        "Parameter servers to start beside the workers, and a chief: for --strategy "
        "parameter_server.",
        at_least=0,
    )
    max_restarts: int = setting(
        0, "Maximum number of restarts after a failure; preemptions do not count.", at_least=0
    )
    start_timeout: float | None = setting(
        None,
        "Seconds that workers wait for one another; by default TFMULTI_START_TIMEOUT, else 60.",
        at_least=0.001,
    )
    grace: float = setting(
        30.0,
        "Seconds from SIGTERM or Ctrl-C to the end of workers that still run; at most 5 once a "
        "worker has failed.",
        at_least=0.0,
    )
    log_dir: str | None = setting(
        None,
        "Folder for worker_0.log and so on, which are continued; by default a temporary one.",
    )
    all_output: bool = setting(False, "Show the output of all workers, not the chief's only.")
    hosts: str | None = setting(
        None, "File with one `host[:port] [slots=N]` per line, the same for every host's launcher."
    )
    host_index: int | None = setting(
        None,
        "Which line of --hosts this is, from 0; by default as MPI or the scheduler counts hosts.",
        at_least=0,
    )
    base_port: int = setting(2222, "First port of a host in --hosts that names none.", at_least=1)

    mpi: bool = setting(False, "Make the workers one MPI job, as mpiexec does.")
    pin: bool = setting(False, "Pin each worker to its part of this machine's cores.")
    threads: int | None = setting(
        None,
        "Threads of an operation in each worker; by default its part of the cores, or of a "
        "container's CPU quota.",
        at_least=0,
    )
    allocator: str = setting(
        "keep", "Whether workers keep memory that they have freed, for the next step.", ALLOCATORS
    )

    def __post_init__(self):
        check_settings(self)
        if (self.num_workers is None) == (self.hosts is None):
            raise ValueError(
                "Either `num_workers` (on this machine) or `hosts` (on several) must be given. "
                f"Received: num_workers={self.num_workers}, hosts={self.hosts}. "
                "Use for example --num_workers 2."
            )
        if self.mpi and self.hosts is not None:
            raise ValueError(
                "`mpi` needs num_workers, on this machine. "
                f"Received: mpi={self.mpi}, hosts={self.hosts}. "
                "Start a job on several hosts with mpiexec, without this launcher."
            )
        if self.num_ps and (self.hosts is not None or self.mpi):
            raise ValueError(
                "`num_ps` needs num_workers, on this machine, without MPI. "
                f"Received: num_ps={self.num_ps}, hosts={self.hosts}, mpi={self.mpi}. "
                "On several hosts start each task with its own TF_CONFIG."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in ("host_index", "base_port"):
            value = getattr(self, name)
            if value != defaults[name] and self.hosts is None:
                raise ValueError(
                    f"`{name}` can be used with hosts only. "
                    f"Received: {name}={value}, hosts=None. Leave --{name} out."
                )


def tf_configs_here(
    config: LaunchConfig, environ: Mapping[str, str] = os.environ
) -> dict[int, str]:
    """Returns the TF_CONFIG of each worker that this launcher starts, by the worker's index.

    On this machine it chooses free ports at each call; those of a hosts file are fixed.

    Raises:
        ValueError: For a hosts file that cannot be read, or that has no line for this host.
    """
    if config.hosts is None:
        return dict(enumerate(processes.tf_configs(config.num_workers, config.num_ps)))
    hosts = read_hosts(config.hosts, config.base_port)
    host = find_host_index(config, len(hosts), environ)
    cluster = {"worker": [address for addresses in hosts for address in addresses]}
    first = sum(len(addresses) for addresses in hosts[:host])
    return {
        index: json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        for index in range(first, first + len(hosts[host]))
    }


def task_name(tf_config: str) -> str:
    """Returns the name of a task, as `worker 1`; a chief has no number.

    >>> task_name('{"task": {"type": "chief", "index": 0}}')
    'chief'
    """
    task = json.loads(tf_config)["task"]
    return task["type"] if task["type"] == "chief" else f"{task['type']} {task['index']}"


def read_hosts(path: str, base_port: int) -> list[list[str]]:
    """Reads a hosts file.

    Args:
        path: A file with one `host[:port] [slots=N]` per line. `#` begins a comment.
        base_port: The port of the first worker on a host that names none; the next worker on
            the same host has the next port.

    Returns:
        For each host, the addresses of its workers.

    Raises:
        ValueError: For a file or a line that cannot be read; it names the line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`hosts` must be a file of text. Received: {path}: {error}. Correct the path."
        ) from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_read_host(words, base_port, f"{path}, line {number}: {line.strip()}"))
    addresses = [address for host in hosts for address in host]
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice or not hosts:
        raise ValueError(
            "`hosts` must name at least one host, and each address once. "
            f"Received: {path} with {', '.join(twice) or 'no host'}. "
            "Write one line per host, with slots=N for several workers."
        )
    return hosts


def _read_host(words, base_port, where) -> list[str]:
    host, slots = words[0], 1
    found = _SLOTS.fullmatch(words[1]) if len(words) == 2 else None
    if len(words) > 1 and not found:
        fault = "must be `host[:port] [slots=N]`"
    else:
        slots = int(found[1]) if found else slots
        has_port = re.search(r":[0-9]+$", host) and (host.count(":") == 1 or "]:" in host)
        address = host if has_port else f"{host}:{base_port}"
        fault = (address_fault(address) or (None,))[0]
        if not fault:
            bare, first = address.rpartition(":")[0], split_address(address)[1]
            fault = (address_fault(f"{bare}:{first + slots - 1}") or (None,))[0]
    if fault:
        raise ValueError(
            f"A line of `hosts` {fault}. Received: {where}. "
            "Write for example: 10.0.0.1:2222 slots=2"
        )
    return [f"{bare}:{first + slot}" for slot in range(slots)]


def find_host_index(
    config: LaunchConfig, num_hosts: int, environ: Mapping[str, str] = os.environ
) -> int:
    """Returns this host's place in the file: as given, else from the scheduler's variables.

    Raises:
        ValueError: If it is unknown, or the file has no such line.
    """
    name, given = "host_index", config.host_index
    if given is None:
        name, given = schedulers.find_host_index(environ) or (name, None)
    if given is None and num_hosts == 1:
        return 0
    if given is None or not str(given).isdecimal() or int(given) >= num_hosts:
        raise ValueError(
            f"`{name}` must say which line of `hosts` this is, from 0 to {num_hosts - 1}. "
            f"Received: {name}={given}. Use --host_index, or one of the variables "
            f"{', '.join(schedulers.HOST_INDEX_VARIABLES)}."
        )
    return int(given)


def variables_of(config: LaunchConfig, local_index: int, num_here: int) -> Mapping[str, str]:
    """Returns the environment variables of a worker that divide the machine.

    Those that are set in this process, by its user, stay as they are.

    Args:
        config: The job.
        local_index: The worker's place among those of this machine, from 0.
        num_here: Workers on this machine.
    """
    mine = part_of(sorted(os.sched_getaffinity(0)), local_index, num_here)
    chosen = {}
    threads = config.threads
    if threads is None:
        # A container's quota of CPU time does not show in the cores that a process may use.
        quota = memory.read_limits().cores
        threads = len(mine) if quota is None else min(len(mine), max(1, int(quota / num_here)))
    if threads:
        chosen |= dict.fromkeys(_THREADS, str(threads))
    if config.allocator == "keep":
        # The default limit is 64 GiB.
        limit = max(1, memory.available() >> 20)
        chosen |= {**_KEEP, "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit)}
        # By default glibc has 8 for each core of the machine, and each keeps what it has freed.
        # With fewer than these, gRPC's threads wait for one another.
        chosen["MALLOC_ARENA_MAX"] = str(max(_LEAST_ARENAS, threads or len(mine)))
    chosen = {name: value for name, value in chosen.items() if name not in os.environ}
    if config.pin:
        chosen[supervisor.CORES] = ",".join(str(core) for core in mine)
    return chosen


def gpus_of(names: Mapping[int, str], visible: list[str]) -> tuple[dict[int, str], str]:
    """Returns the CUDA_VISIBLE_DEVICES of each task, and what the user should know.

    NCCL allows only one worker on a GPU, so all train on the CPU if there are fewer GPUs than
    workers. With servers they do not use NCCL, and each takes one, which may be another's too;
    servers and their chief compute no steps.

    Args:
        names: The tasks of this machine, such as `{0: "worker 0"}`.
        visible: The GPUs, as CUDA_VISIBLE_DEVICES names them.

    >>> gpus_of({0: "worker 0", 1: "worker 1"}, ["0", "1", "2", "3"])
    ({0: '0,1', 1: '2,3'}, '')
    >>> gpus_of({0: "worker 0"}, ["0", "1"]), gpus_of({0: "worker 0", 1: "worker 1"}, [])
    (({}, ''), ({}, ''))
    """
    if len(names) == 1 or not visible:
        return {}, ""
    workers = [index for index, name in names.items() if name.startswith("worker")]
    given = dict.fromkeys(names, gpus.NO_GPU)
    if len(workers) < len(names):
        # Such a worker uses one GPU.
        return given | dict(zip(workers, itertools.cycle(visible))), ""
    if len(visible) < len(workers):
        count = console.count(len(visible), "GPU")
        return given, (
            f"{len(workers)} workers train on the CPU: two cannot share a GPU, and this host has "
            f"{count}. One worker alone uses every GPU."
        )
    # The same number for each, as a strategy requires.
    return given | dict(zip(workers, gpus.divide(visible, len(workers)))), ""


def part_of(cores: list[int], local_index: int, num_here: int) -> list[int]:
    """Returns a worker's cores; the counts differ by at most one. Few cores are shared.

    >>> [part_of([0, 1, 2], place, 2) for place in range(2)], part_of([0], 1, 2)
    ([[0], [1, 2]], [0])
    """
    if len(cores) < num_here:
        return [cores[local_index % len(cores)]]
    begin, end = (len(cores) * each // num_here for each in (local_index, local_index + 1))
    return cores[begin:end]
