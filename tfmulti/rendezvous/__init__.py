"""The rendezvous of all workers before TensorFlow starts, which checks that they are compatible.

TensorFlow waits silently and forever for a worker that never starts, and reports a network error
if two workers run different programs. Here all workers of a cluster connect to the address of the
first worker within a timeout, and compare their settings. An error names the missing workers or
the differences.

It uses the standard library's asyncio and not grpcio: TensorFlow needs the same port right after,
so the socket must be closed without TIME_WAIT, which grpcio does not guarantee; and the process
then has no second copy of gRPC beside TensorFlow's.

`messages` defines the messages and the secret that signs them, `server` and `client` the two sides,
and `errors` what users read. The doctor has a rendezvous at every worker's address, so that each
worker tries to reach each other one.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence

from tfmulti.cluster import Cluster, environment
from tfmulti.rendezvous.client import Client
from tfmulti.rendezvous.errors import (
    GPUS,
    RendezvousError,
    WorkersMissingError,
    check_equal,
    check_gpus,
    missing_error,
    twice_error,
)
from tfmulti.rendezvous.messages import MAX_BYTES, find_token
from tfmulti.rendezvous.server import Server
from tfmulti.runtime import processes

__all__ = ["RendezvousError", "WorkersMissingError", "join"]

DEFAULT_TIMEOUT_S = 60.0
_SPARE_BYTES = 1024


def join(
    cluster: Cluster,
    settings: Mapping[str, object] | None = None,
    *,
    timeout_s: float | None = None,
    token: str | None = None,
    gpus: Sequence[str] = (),
) -> dict[int, dict]:
    """Waits until all workers of a cluster have connected, and checks that their settings agree.

    Every worker calls it, before TensorFlow starts. The first worker listens at its own address,
    and frees the port before this function returns or raises.

    Args:
        cluster: The cluster, seen from this worker.
        settings: Settings that must be the same on all workers: name -> a value that JSON can hold.
            The cluster and the versions of Python and tfmulti are added.
        timeout_s: Seconds to wait for the others. The first worker whose timeout expires ends the
            rendezvous for all. None uses the environment's `TFMULTI_START_TIMEOUT`, else 60.
        token: A secret that all workers have. None uses the environment's `TFMULTI_TOKEN`, else
            a token derived from the cluster's addresses, with a warning.
        gpus: The UUIDs of this worker's GPUs, where no other worker may use them.

    Returns:
        The settings of each worker, by its position in `cluster.tasks`.

    Raises:
        RendezvousError: If workers are missing (a `WorkersMissingError`), two have the same task
            or GPU, a setting or the token differs, or the first worker cannot listen.
        ValueError: For settings that JSON cannot hold, or longer than 64 KiB; for a timeout that
            is not a number of seconds above 0.

    Example:
        >>> join(Cluster({"worker": ["127.0.0.1:12345"]}, "worker", 0), {"epochs": 3})[0]["epochs"]
        3
    """
    own = _complete(cluster, {**(settings or {}), GPUS: list(gpus)})
    timeout_s = find_timeout(timeout_s)
    if cluster.num_workers == 1:
        return {0: own}
    secret = find_token(cluster, token)
    began = time.monotonic()
    if cluster.worker_index == 0:
        outcome = _run(lambda: Server(cluster, own, secret, timeout_s).serve())
    else:
        outcome = _run(lambda: Client(cluster, own, secret, timeout_s).join())
    if "missing" in outcome:
        seconds = time.monotonic() - began
        raise missing_error(cluster, outcome["missing"], seconds, outcome["remarks"])
    if "twice" in outcome:
        raise twice_error(cluster, outcome["twice"], outcome["machines"])
    # JSON turns the positions into strings, except on the first worker.
    settings_of = {int(index): dict(theirs) for index, theirs in outcome["settings"].items()}
    check_equal(cluster, settings_of)
    check_gpus(cluster, settings_of)
    return settings_of


def find_timeout(timeout_s: float | None, environ: Mapping[str, str] = os.environ) -> float:
    """Returns the timeout in seconds: the argument, else that of the environment, else 60.

    Raises:
        ValueError: If it is not a number of seconds above 0.

    Example:
        >>> find_timeout(None, {"TFMULTI_START_TIMEOUT": "5"})
        5.0
    """
    name, given = "timeout_s", timeout_s
    if given is None:
        name = environment.START_TIMEOUT
        given = environ.get(name, DEFAULT_TIMEOUT_S)
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"`{name}` must be a number of seconds above 0. Received: {name}={given!r}. "
            f"Use for example {DEFAULT_TIMEOUT_S:g}."
        )
    return seconds


def _complete(cluster, settings) -> dict:
    spec = {kind: list(addresses) for kind, addresses in cluster.spec.items()}
    try:
        version = importlib.metadata.version("tfmulti")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    python = ".".join(platform.python_version_tuple()[:2])
    everything = {"cluster": spec, "python": python, "tfmulti": version, **settings}
    try:
        text = json.dumps(everything)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`must_agree` must hold values that JSON can represent. "
            f"Received: {error}. Use numbers and strings."
        ) from error
    if len(text) > MAX_BYTES - _SPARE_BYTES:
        raise ValueError(
            f"`must_agree` must be shorter than {MAX_BYTES} bytes, with the cluster. "
            f"Received: {len(text)} bytes. Use a digest for long values."
        )
    return json.loads(text)


def _run(create):
    """Runs a coroutine; in a new thread if an event loop is running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(create())
    return processes.in_thread(lambda: asyncio.run(create()))
