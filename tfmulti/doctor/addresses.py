"""The cluster as this worker reads it: TF_CONFIG, names, its own port, who else can come in."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from tfmulti.cluster import Cluster, ClusterError, environment, network, resolve_cluster
from tfmulti.cluster.network import is_ip_address, split_address
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check, plural

_TF_CONFIG = "TF_CONFIG"
_NAMES_S = 5.0


def read_cluster(
    tf_config: str | None, environ: Mapping[str, str] | None = None
) -> tuple[Cluster | None, Check]:
    """Returns the cluster, or None, and how TF_CONFIG is.

    Args:
        tf_config: A file or folder; None reads the environment.
        environ: The environment; None takes this process's own.
    """
    try:
        cluster = resolve_cluster(tf_config, environ=environ, check_network=False)
    except (ClusterError, RuntimeError) as error:
        rule, _, advice = str(error).rpartition("). ")
        detail = f"{rule})" if rule else str(error)
        hint = f"{advice} " if rule else ""
        hint += "Every worker has the same `cluster`, and a `task` of its own."
        return None, Check(_TF_CONFIG, FAILURE, detail, hint)
    if cluster is None:
        return None, Check(_TF_CONFIG, OK, "not set: this host trains alone")
    return cluster, Check(_TF_CONFIG, OK, cluster.describe())


def check_addresses(
    cluster: Cluster | None, environ: Mapping[str, str] = os.environ, source: str = "TF_CONFIG"
) -> list[Check]:
    """Looks at the addresses of a cluster; unknown without one."""
    names = ("names of hosts", "own address", "own port", "private addresses", "secret")
    if cluster is None:
        return [Check(name, UNKNOWN, "no cluster here") for name in names]
    return [
        check_names(cluster, source),
        check_own_address(cluster),
        check_own_port(cluster, source),
        check_private(cluster),
        check_secret(cluster, environ),
    ]


def check_names(cluster: Cluster, source: str) -> Check:
    """Looks every host up."""
    hosts = {split_address(cluster.spec[kind][index])[0] for kind, index in cluster.tasks}
    names = [host for host in hosts if not is_ip_address(host)]
    try:
        network.check_hosts(cluster, source=source, timeout=_NAMES_S)
    except ClusterError as error:
        hint = "Correct the name, write the IP address, or ask who keeps the names (DNS)."
        return Check("names of hosts", FAILURE, str(error), hint)
    if not names:
        return Check("names of hosts", OK, "all are IP addresses")
    return Check("names of hosts", OK, f"{plural(len(names), 'name')} found: {', '.join(names)}")


def check_own_address(cluster: Cluster) -> Check:
    """Looks whether this worker's address is one of this host, and one that others can use."""
    name = "own address"
    host = split_address(cluster.address)[0]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return Check(name, UNKNOWN, f"{host} has no address: {error}")
    if not any(_is_ours(family, address) for family, _, _, _, address in found):
        text = f"{found[0][4][0]} is no address of this host ({socket.gethostname()})"
        hint = "Is the `index` of the `task` right? Behind address translation this is usual."
        return Check(name, WARNING, text, hint)
    hosts = {split_address(cluster.spec[kind][index])[0] for kind, index in cluster.tasks}
    if _is_loopback(host) and not all(map(_is_loopback, hosts)):
        text = f"{host} means every worker's own host, and others are elsewhere"
        return Check(name, FAILURE, text, "Write the address at which the others reach this host.")
    return Check(name, OK, f"{found[0][4][0]} is an address of this host")


def _is_ours(family, address) -> bool:
    """What goes to an address of this host comes from the same; nothing is sent to find out."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], 1, *address[2:]))
            return _is_loopback(address[0]) or probe.getsockname()[0] == address[0]
    except OSError:
        return False


def _is_loopback(host) -> bool:
    if is_ip_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_own_port(cluster: Cluster, source: str) -> Check:
    """Looks whether this worker's port is free."""
    port = split_address(cluster.address)[1]
    try:
        network.check_port(cluster, source=source)
    except ClusterError as error:
        hint = "See who holds it with `ss -ltnp`: an earlier run? End it, or use another port."
        return Check("own port", FAILURE, str(error), hint)
    return Check("own port", OK, f"{port} is free")


def check_private(cluster: Cluster) -> Check:
    """Looks for addresses that strangers can reach."""
    name = "private addresses"
    public = network.public_addresses(cluster)
    if public:
        text = f"the internet may reach {', '.join(public)}: who does can run operations there"
        return Check(name, WARNING, text, "Use private addresses, or a firewall against strangers.")
    return Check(name, OK, "none is public; names are not followed")


def check_secret(cluster: Cluster, environ: Mapping[str, str]) -> Check:
    """Looks for the secret of the job."""
    name = "secret"
    if cluster.num_workers == 1 or environ.get(environment.TOKEN):
        return Check(
            name, OK, "set" if environ.get(environment.TOKEN) else "one worker, none needed"
        )
    text = f"{environment.TOKEN} is not set: whoever knows the addresses may meet the workers"
    hint = f"Set {environment.TOKEN} to the same random text on all; tfmulti.launch does it."
    return Check(name, WARNING, text, hint)
