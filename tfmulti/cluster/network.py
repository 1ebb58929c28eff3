"""Addresses of tasks, and checks of the network before training starts."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable

from absl import logging

from tfmulti.cluster import environment
from tfmulti.cluster.errors import setting_error, show
from tfmulti.cluster.task import Cluster
from tfmulti.runtime import processes

MAX_PORT = 65535
EVERYWHERE = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))
_HOST_NAME = re.compile(r"[\w.-]+")
_EXAMPLE = 'Write the host and the port at which the others reach this task, as "10.0.0.1:12345".'


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of a valid address.

    Example:
        >>> split_address("[::1]:12345")
        ('::1', 12345)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_ip_address(host: str) -> bool:
    """Returns whether a host is an IP address, which needs no lookup.

    Example:
        >>> is_ip_address("10.0.0.1"), is_ip_address("::1"), is_ip_address("localhost")
        (True, True, False)
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def address_fault(address: object) -> tuple[str, str] | None:
    """Returns the rule that an address breaks and what to write; None for a valid one.

    Example:
        >>> address_fault("10.0.0.1:12345") is None
        True
        >>> address_fault("10.0.0.1")[0]
        'must be "host:port", and names no port'
    """
    if not isinstance(address, str):
        return 'must be a string "host:port"', _EXAMPLE
    if "://" in address:
        bare = address.split("://", 1)[1].rstrip("/")
        return 'must be "host:port" without a scheme', f'Write "{bare}".'
    if address.count(":") > 1 and not address.startswith("["):
        rule = 'must be "host:port" with one colon, or have an IPv6 host in brackets'
        return rule, 'Write "10.0.0.1:12345", or "[2001:db8::1]:12345" for IPv6.'
    host, colon, port = address.rpartition(":")
    if not colon or (address.startswith("[") and not host.endswith("]")):
        rule = 'must be "host:port", and names no port'
        return rule, f'Write the port at which the others reach this task: "{address}:12345".'
    return _host_fault(host) or _port_fault(host, port)


def _host_fault(host: str) -> tuple[str, str] | None:
    bare = host[1:-1] if host.startswith("[") else host
    if not bare:
        return 'must be "host:port", and names no host', _EXAMPLE
    if host.startswith("["):
        if ":" not in bare or not is_ip_address(bare):
            rule = "must have an IPv6 address, and nothing else, in its brackets"
            return rule, 'Write "[2001:db8::1]:12345", or a name without brackets.'
    elif not _HOST_NAME.fullmatch(bare):
        rule = "must have a host name of letters, digits, dots and hyphens, without spaces"
        return rule, _EXAMPLE
    if is_ip_address(bare) and ipaddress.ip_address(bare).is_unspecified:
        # It means "every interface here" to a listener; to the others it means themselves.
        return "must name a host that the other workers can reach", _EXAMPLE
    return None


def _port_fault(host: str, port: str) -> tuple[str, str] | None:
    # `str.isdigit` alone would take digits of other scripts, and `int` would take "+1" and "1_0".
    if not (port.isascii() and port.isdigit()):
        return 'must be "host:port" with an integer as port', f'Write "{host}:12345".'
    # The length comes first: Python refuses to convert thousands of digits.
    if len(port) > len(str(MAX_PORT)) or not 1 <= int(port) <= MAX_PORT:
        rule = f"must have a port from 1 to {MAX_PORT}"
        return rule, f'Write a port that is free on that machine, as "{host}:12345".'
    return None


def resolve_host(host: str) -> object:
    """Looks a host name up.

    Raises:
        OSError: where it has no address.
    """
    return socket.getaddrinfo(host, None)


def open_socket(family: int, address: str, port: int) -> socket.socket:
    """Returns a socket that is bound to a port; connections of earlier runs do not prevent it.

    Raises:
        OSError: if the port, or the address, is not available.
    """
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # On Windows the same option would steal the port.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((address, port))
    except OSError:
        opened.close()
        raise
    return opened


def bind_port(port: int) -> None:
    """Binds a port on every interface, as gRPC will, and closes it.

    gRPC takes every interface, whichever host the address names. A connection of an earlier run
    in TIME_WAIT does not prevent it, nor does it here; a program that listens does.

    Raises:
        OSError: if the port is not available.
    """
    for family, address in EVERYWHERE:
        try:
            open_socket(family, address, port).close()
        except OSError as error:
            # A machine without IPv6 (or IPv4) has other errors, and gRPC takes what there is.
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise


def check_hosts(
    cluster: Cluster,
    *,
    source: str,
    timeout: float = 5.0,
    resolve: Callable[[str], object] = resolve_host,
) -> None:
    """Checks that every host of the workers and servers has an address on this machine.

    Args:
        cluster: the cluster.
        source: where it came from, for the message.
        timeout: seconds that all names together may take.
        resolve: looks one name up; raises `OSError` or `ValueError` where it has no address.

    Raises:
        ClusterError: for the first host, in the order of the tasks, without an address.
    """
    places: dict[str, tuple[str, str]] = {}
    for task_type, index in cluster.with_servers().tasks:
        address = cluster.spec[task_type][index]
        place = _place(cluster, task_type, index)
        places.setdefault(split_address(address)[0], (place, address))
    names = [host for host in places if not is_ip_address(host)]

    def find_fault(host: str) -> str | None:
        try:
            resolve(host)
        except (OSError, ValueError) as error:  # A label that is too long is a UnicodeError.
            return str(error)
        return None

    faults: dict[str, str | None] = dict.fromkeys(names, f"no answer in {timeout:g} s")
    faults.update(processes.ask_in_threads(find_fault, names, timeout))
    for host, fault in faults.items():
        if fault is not None:
            place, address = places[host]
            raise setting_error(
                place,
                "must name a host whose address this machine can find",
                received=f"{show(address)}, {fault}",
                source=source,
                advice=f"Try `getent hosts {host}` here, and correct the name or write the IP"
                " address.",
            )


def check_port(cluster: Cluster, *, source: str, bind: Callable[[int], None] = bind_port) -> None:
    """Checks that this task can listen on the port that the cluster gives it.

    Args:
        cluster: the cluster.
        source: where it came from, for the message.
        bind: binds a port and closes it; raises `OSError` if it cannot.

    Raises:
        ClusterError: where another process listens there, or the port is not permitted.
    """
    _, port = split_address(cluster.address)
    try:
        bind(port)
    except OSError as error:
        fault = error.strerror or str(error)
        raise setting_error(
            _place(cluster, cluster.task_type, cluster.task_index),
            "must have a port on which this process can listen",
            received=f"port {port} of {cluster.describe()}: {fault}",
            source=source,
            advice=_port_advice(cluster, error),
        ) from error


def _place(cluster, task_type, index) -> str:
    if cluster.source != "TF_CONFIG":
        return f"{task_type} {index}"
    return f'TF_CONFIG["cluster"]["{task_type}"][{index}]'


def _port_advice(cluster, error) -> str:
    if error.errno == errno.EACCES:
        return "Write a port from 1024 up: those below are for the administrator."
    return (
        "See who holds it with `ss -ltnp`: an earlier run, or a second process with the"
        f" same task index? End it, or {advise_port(cluster)}"
    )


def advise_port(cluster: Cluster) -> str:
    """Returns how to give a task another port, for the end of a sentence.

    Example:
        >>> advise_port(Cluster({"worker": ["a:1"]}, "worker", 0, source="Slurm"))
        'set TFMULTI_BASE_PORT to another port, the same for all workers.'
    """
    if cluster.source == "TF_CONFIG":
        return "write another port for this task in every worker's TF_CONFIG."
    if cluster.source == "MPI":
        return "start the job again: each start chooses free ports."
    return f"set {environment.BASE_PORT} to another port, the same for all workers."


def public_addresses(cluster: Cluster) -> list[str]:
    """Returns the public IP addresses, which the internet may reach. Names are not looked up.

    Example:
        >>> public_addresses(Cluster({"worker": ["10.0.0.1:2222", "8.8.8.8:2222"]}, "worker", 0))
        ['8.8.8.8:2222']
    """
    tasks = cluster.with_servers().tasks
    addresses = [cluster.spec[task_type][index] for task_type, index in tasks]
    hosts = {address: split_address(address)[0] for address in addresses}
    return [
        address
        for address, host in hosts.items()
        if is_ip_address(host) and ipaddress.ip_address(host).is_global
    ]


def warn_of_public_addresses(cluster: Cluster) -> None:
    """Warns of public IP addresses, which the internet may reach.

    TensorFlow's gRPC port listens on every interface without authentication.
    """
    public = public_addresses(cluster)
    if public:
        logging.warning(
            "Anyone who can reach TensorFlow's ports can run operations and read files. Received: "
            "public addresses %s. Use private addresses, or a firewall.",
            ", ".join(public),
        )
