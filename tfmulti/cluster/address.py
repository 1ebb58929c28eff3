"""`host:port`, as a task of the cluster writes it."""

from __future__ import annotations

import ipaddress
import re

MAX_PORT = 65535
_HOST_NAME = re.compile(r"[\w.-]+")
_EXAMPLE = 'Write the host and the port at which the others reach this task, as "10.0.0.1:12345".'


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of an address without a fault.

    Example:
        >>> split_address("[::1]:12345")
        ('::1', 12345)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_ip_address(host: str) -> bool:
    """Returns whether a host is a number, so that nothing has to be looked up.

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
    """Returns the rule that an address breaks and what to write, or None for a good one.

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
