"""Pods on this machine: network namespaces on a bridge, in which each has a name of its own."""

import contextlib
import os
import subprocess

# Runs a command in the namespace $POD, with the file $POD_HOSTS as its /etc/hosts.
_INSIDE = 'mount --bind "$POD_HOSTS" /etc/hosts && exec "$@"'
PREFIX = ("sh", "-c", f'exec ip netns exec "$POD" sh -c \'{_INSIDE}\' sh "$@"', "sh")


@contextlib.contextmanager
def start(names, folder):
    """Gives the variables with which `PREFIX` runs a command in each pod.

    Args:
        names: What the pods are called, such as `train-0.workers`.
        folder: Where their list of names goes.

    Raises:
        OSError: Where the machine has no such namespaces.
        CalledProcessError: Where it allows none.
    """
    hub = f"tfm{os.getpid()}"
    addresses = [f"10.213.78.{1 + index}" for index in range(len(names))]
    hosts = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{a} {name}" for a, name in zip(addresses, names))]
    hosts.write_text("".join(f"{line}\n" for line in lines))
    with contextlib.ExitStack() as stack:
        _add(stack, hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for index, address in enumerate(addresses):
            _add(stack, pod := f"{hub}p{index}")
            _ip("link", "add", "eth", "netns", pod, "type", "veth", "peer", pod, "netns", hub)
            _ip("-n", hub, "link", "set", pod, "master", "bridge", "up")
            _ip("-n", pod, "addr", "add", f"{address}/24", "dev", "eth")
            for device in ("lo", "eth"):
                _ip("-n", pod, "link", "set", device, "up")
        yield [{"POD": f"{hub}p{i}", "POD_HOSTS": str(hosts)} for i in range(len(names))]


def _add(stack, namespace):
    _ip("netns", "add", namespace)
    stack.callback(subprocess.run, ["ip", "netns", "del", namespace], capture_output=True)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
