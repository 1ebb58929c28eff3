"""Where a cluster is found: a `TF_CONFIG` (variable, file, folder, mapping), or a scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfmulti.cluster import environment, network, schedulers
from tfmulti.cluster.errors import ClusterError, setting_error, show, suggest
from tfmulti.cluster.parsing import ENVIRONMENT, from_tf_config, parse_index
from tfmulti.cluster.task import SERVER_TYPE, TRAINING_TYPES, Cluster

_TPU_VARIABLES = ("TPU_NAME", "COLAB_TPU_ADDR", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


def resolve_cluster(
    tf_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    task_index: int | None = None,
    task_type: str | None = None,
    environ: Mapping[str, str] | None = None,
    check_network: bool = True,
    network_timeout: float = 5.0,
    resolve_host: Callable[[str], object] = network.resolve_host,
    servers: bool = False,
    num_ps: int | None = None,
) -> Cluster | None:
    """Reads the cluster of this process and checks it, before TensorFlow is imported.

    Args:
        tf_config: the path of a file with the text of a `TF_CONFIG`; or of a folder with one
            such file for each task, `worker_0.json` and so on; or what the text would parse to.
            None reads the environment variable `TF_CONFIG`; without one, the variables of MPI and
            of the schedulers, of which it uses the first that has started this process.
            `Cluster.source` names it.
        task_index: the index of this task. It chooses the file in a folder (None reads the
            environment variable `TASK_INDEX`), and the `task` that is read must agree with it.
        task_type: likewise its type (None reads `TASK_TYPE`, and otherwise takes `"worker"`).
        environ: the environment; None takes this process's own. Only in that one the processes
            of an MPI job find one another, which starts MPI.
        check_network: whether every host must resolve and this task's port must be free. Pass
            False once the strategy is built: from then on this process holds the port itself.
        network_timeout: seconds that looking all hosts up may take.
        resolve_host: looks one host name up, raising `OSError` where it has no address.
        servers: whether there may be parameter servers, for `"parameter_server"`.
        num_ps: how many tasks of a scheduler, the last ones, are parameter servers, the first
            one being the chief; None reads TFMULTI_NUM_PS. A `TF_CONFIG` must have as many.

    Returns:
        The cluster; None only where no `tf_config` is given, the environment has no
        `TF_CONFIG` at all, and no scheduler has started this process. An empty one is an error,
        and so is a scheduler's job of several tasks in which this process is none of them: nobody
        trains alone by mistake. A scheduler's job of one task is a cluster of one worker.

    Raises:
        ClusterError: for the first mistake, with its place, what was received and what to do.

    Example:
        >>> pair = {"worker": ["127.0.0.1:12345", "127.0.0.1:23456"]}
        >>> task = {"type": "worker", "index": 0}
        >>> cluster = resolve_cluster({"cluster": pair, "task": task}, check_network=False)
        >>> cluster.num_workers, cluster.is_chief
        (2, True)
    """
    given = environ
    environ = os.environ if environ is None else environ
    if tf_config is None and task_index is task_type is None and "TF_CONFIG" not in environ:
        cluster = schedulers.find_cluster(environ, may_start_mpi=given is None, num_ps=num_ps)
        if cluster is not None:
            _check_servers(cluster, servers, num_ps)
            if check_network:
                _check_network(cluster, cluster.source, network_timeout, resolve_host)
        elif num_ps is not None:
            raise ClusterError(
                "`num_ps` makes servers of the last tasks of a scheduler's job. "
                f"Received: num_ps={num_ps}, no TF_CONFIG, and a process that was not started by "
                f"{schedulers.ANY_OF_THEM}. Leave num_ps out; python -m tfmulti.launch "
                f"--num_workers 2 --num_ps {num_ps} starts servers on this machine."
            )
        return cluster
    requested = {"type": task_type, "index": task_index}
    if tf_config is None:
        config, source = _read_environment(environ, requested), ENVIRONMENT
    elif isinstance(tf_config, Mapping):
        config, source = tf_config, "the argument `tf_config`"
    else:
        path = _check_path(tf_config)
        if os.path.isdir(path):  # Unlike Path.is_dir, it never raises.
            kinds = (*TRAINING_TYPES, SERVER_TYPE) if servers else TRAINING_TYPES
            requested = _requested_task(path, kinds, task_type, task_index, environ)
            path = path / f"{requested['type']}_{requested['index']}.json"
        config, source = _read_file(path), f"the file {path}"
    cluster = from_tf_config(config, source=source, servers=servers)
    _check_requested(cluster, requested, source)
    _check_servers(cluster, servers, num_ps)
    if check_network:
        _check_network(cluster, source, network_timeout, resolve_host)
    return cluster


def _check_servers(cluster, allowed, num_ps):
    found = len(cluster.spec.get(SERVER_TYPE, ()))
    if found and not allowed:
        raise setting_error(
            environment.NUM_PS,
            "must not be set: multi_worker trains without parameter servers",
            received=f"{found} servers",
            source=cluster.source,
            advice="Unset it, or choose the strategy parameter_server.",
        )
    if num_ps is not None and found != num_ps:
        raise ClusterError(
            "`num_ps` must be the number of parameter servers of the cluster. "
            f"Received: num_ps={num_ps}, {found} servers (from {cluster.source}). "
            "Leave num_ps out: a TF_CONFIG names its servers."
        )


def _check_network(cluster, source, timeout, resolve):
    if not cluster.names_come_late:
        network.check_hosts(cluster, source=source, timeout=timeout, resolve=resolve)
    network.check_port(cluster, source=source)


def _read_environment(environ: Mapping[str, str], asked: Mapping[str, object]) -> str:
    if "TF_CONFIG" in environ:
        return environ["TF_CONFIG"]
    # Whoever names a task does not mean to train alone.
    raise ClusterError(
        "`task_index` and `task_type` need a TF_CONFIG that has this task. Received:"
        f" task_index={asked['index']!r}, task_type={asked['type']!r}, and no TF_CONFIG in the"
        " environment. Pass `tf_config`, set TF_CONFIG, or leave the two out to train alone."
    )


def _check_path(tf_config: object) -> Path:
    if not isinstance(tf_config, (str, os.PathLike)) or not os.fspath(tf_config):
        raise ClusterError(
            "`tf_config` must be the path of a TF_CONFIG file or folder, a mapping, or None."
            f" Received: tf_config={tf_config!r}."
            " Leave it out (None) to read the environment variable TF_CONFIG."
        )
    if isinstance(tf_config, str) and tf_config.lstrip().startswith("{"):
        raise ClusterError(
            f"`tf_config` must be a path, not the text of a TF_CONFIG. Received: tf_config="
            f"{show(tf_config)}. Write the text to a file, or set the environment variable"
            " TF_CONFIG to it and leave `tf_config` out."
        )
    return Path(tf_config)


def _read_file(path: Path) -> str:
    try:
        # Editors on Windows begin a file with a byte order mark, which JSON does not allow.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null.
        advice = "Correct the path, or the file."
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            advice = f"Correct the path, or add the file. {_list_files(path.parent)}"
        reason = getattr(error, "strerror", None) or str(error)
        raise ClusterError(
            "`tf_config` must lead to a TF_CONFIG file that can be read as text."
            f" Received: {path}: {reason}. {advice}"
        ) from error


def _list_files(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.json"))
    return f"Files in {folder}: {', '.join(found) or 'none that ends in .json'}."


def _requested_task(
    folder: Path,
    kinds: tuple[str, ...],
    task_type: str | None,
    task_index: int | None,
    environ: Mapping[str, str],
) -> dict[str, object]:
    kind = environ.get("TASK_TYPE", "worker") if task_type is None else task_type
    if kind not in kinds:
        name = "TASK_TYPE" if task_type is None else "task_type"
        allowed = " or ".join(map(show, kinds))
        raise setting_error(
            name,
            f"must be {allowed}, to choose the TF_CONFIG file of this task",
            received=f"{name}={show(kind)}",
            source=f"the folder {folder}",
            advice=f"{suggest(kind, kinds)}{_list_files(folder)}",
        )
    given = environ.get("TASK_INDEX") if task_index is None else task_index
    index = parse_index(given)
    if index is None:
        raise setting_error(
            "TASK_INDEX" if task_index is None else "task_index",
            "must be an integer from 0 up, to choose the TF_CONFIG file of this task",
            received="no `task_index` and no TASK_INDEX" if given is None else show(given),
            source=f"the folder {folder}",
            advice=f"Set TASK_INDEX=0 (or 1, ...), pass `task_index`, or name one file."
            f" {_list_files(folder)}",
        )
    return {"type": kind, "index": index}


def _check_requested(cluster: Cluster, asked: Mapping[str, object], source: str) -> None:
    task = {"type": cluster.task_type, "index": cluster.task_index}
    for key, value in asked.items():
        # Two files with the same task inside would start one worker twice and another never.
        if value is not None and value != task[key]:
            raise setting_error(
                f'TF_CONFIG["task"]["{key}"]',
                f"must agree with the task that was asked for, task_{key}={show(value)}",
                received=show(task[key]),
                source=source,
                advice=f"Write {show(value)} there, or ask for another task.",
            )


def tpu_in_environment() -> bool:
    """Whether the environment says that this machine has a TPU, as Colab's and TPU VMs' do."""
    return any(os.environ.get(name) for name in _TPU_VARIABLES)
