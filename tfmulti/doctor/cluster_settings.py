"""The cluster as this worker reads it, and environment variables that change how it works."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence

from tfmulti.cluster import Cluster, ClusterError, environment, network, resolve_cluster
from tfmulti.cluster.network import is_ip_address, split_address
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.runtime import console

_TF_CONFIG = "TF_CONFIG"
_NAMES_S = 5.0


def read_cluster(
    tf_config: str | None, environ: Mapping[str, str] | None = None
) -> tuple[Cluster | None, Check]:
    """Returns the cluster, or None, and how TF_CONFIG is.

    Parameter servers are among its tasks: they too must be reached, and have the same versions.

    Args:
        tf_config: A file or folder; None reads the environment.
        environ: The environment; None takes this process's own.
    """
    try:
        cluster = resolve_cluster(tf_config, environ=environ, check_network=False, servers=True)
    except (ClusterError, RuntimeError) as error:
        rule, _, advice = str(error).rpartition("). ")
        detail = f"{rule})" if rule else str(error)
        hint = f"{advice} " if rule else ""
        hint += "Every worker needs the same `cluster` and a different `task`."
        return None, Check(_TF_CONFIG, FAILURE, detail, hint)
    if cluster is None:
        return None, Check(_TF_CONFIG, OK, "not set: this host trains alone")
    cluster = cluster.with_servers() if cluster.has_servers else cluster
    return cluster, Check(_TF_CONFIG, OK, cluster.describe())


def check_addresses(cluster: Cluster | None, environ: Mapping[str, str]) -> list[Check]:
    """Checks the addresses of a cluster; unknown without one."""
    names = ("names of hosts", "own address", "own port", "private addresses", "secret")
    if cluster is None:
        return [Check(name, UNKNOWN, "no cluster here") for name in names]
    return [
        check_names(cluster),
        check_own_address(cluster),
        check_own_port(cluster),
        check_private(cluster),
        check_secret(cluster, environ),
    ]


def _hosts(cluster) -> set[str]:
    return {split_address(cluster.spec[kind][index])[0] for kind, index in cluster.tasks}


def check_names(cluster: Cluster) -> Check:
    """Resolves the name of every host."""
    title = "names of hosts"
    names = [host for host in _hosts(cluster) if not is_ip_address(host)]
    try:
        network.check_hosts(cluster, source=cluster.source, timeout=_NAMES_S)
    except ClusterError as error:
        if cluster.names_come_late:
            text = f"not all are found yet: {cluster.source} gives a host its name when it starts"
            return Check(title, UNKNOWN, text)
        hint = "Correct the name, write the IP address, or ask your network administrator (DNS)."
        return Check(title, FAILURE, str(error), hint)
    if not names:
        return Check(title, OK, "all are IP addresses")
    return Check(title, OK, f"{console.count(len(names), 'name')} found: {', '.join(names)}")


def check_own_address(cluster: Cluster) -> Check:
    """Checks that this worker's address belongs to this host, and that others can use it."""
    name = "own address"
    host = split_address(cluster.address)[0]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # A label that is empty is a UnicodeError.
        return Check(name, UNKNOWN, f"{host} has no address: {error}")
    if not any(_is_ours(family, address) for family, _, _, _, address in found):
        text = f"{found[0][4][0]} is no address of this host ({socket.gethostname()})"
        hint = "Is the `index` of the `task` right? Behind address translation this is usual."
        return Check(name, WARNING, text, hint)
    if _is_loopback(host) and not all(map(_is_loopback, _hosts(cluster))):
        text = f"{host} means every worker's own host, and others are elsewhere"
        return Check(name, FAILURE, text, "Write the address at which the others reach this host.")
    return Check(name, OK, f"{found[0][4][0]} is an address of this host")


def _is_ours(family, address) -> bool:
    """Whether an address belongs to this host: its route then starts there. Sends nothing."""
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


def check_own_port(cluster: Cluster) -> Check:
    """Checks that this worker's port is free."""
    port = split_address(cluster.address)[1]
    try:
        network.check_port(cluster, source=cluster.source)
    except ClusterError as error:
        hint = "See who holds it with `ss -ltnp`: an earlier run? End it, or use another port."
        return Check("own port", FAILURE, str(error), hint)
    return Check("own port", OK, f"{port} is free")


def check_private(cluster: Cluster) -> Check:
    """Looks for public addresses."""
    name = "private addresses"
    public = network.public_addresses(cluster)
    if public:
        text = f"the internet may reach {', '.join(public)}: anyone there can run operations"
        return Check(name, WARNING, text, "Use private addresses, or a firewall.")
    return Check(name, OK, "none is public; names are not followed")


def check_secret(cluster: Cluster, environ: Mapping[str, str]) -> Check:
    """Checks the secret of the job."""
    name = "secret"
    if cluster.num_workers == 1 or environ.get(environment.TOKEN):
        return Check(
            name, OK, "set" if environ.get(environment.TOKEN) else "one worker, none needed"
        )
    text = f"{environment.TOKEN} is not set: anyone who knows the addresses can join the rendezvous"
    hint = (
        f"Set {environment.TOKEN} to the same random text on every worker; tfmulti.launch does so."
    )
    return Check(name, WARNING, text, hint)


MEANINGS = {
    "NCCL_SOCKET_IFNAME": "network interfaces that NCCL speaks over",
    "NCCL_SOCKET_FAMILY": "whether NCCL speaks IPv4 or IPv6",
    "NCCL_SOCKET_NTHREADS": "threads of NCCL for each connection",
    "NCCL_NSOCKS_PERTHREAD": "sockets of each of NCCL's threads",
    "NCCL_VERSION": "the NCCL of the container's image: NCCL does not read it",
    "NCCL_DEBUG": "how much NCCL logs: VERSION, WARN, INFO or TRACE",
    "NCCL_DEBUG_SUBSYS": "which of its parts NCCL logs",
    "NCCL_DEBUG_FILE": "where NCCL's messages go",
    "NCCL_IB_DISABLE": "1 keeps NCCL off InfiniBand and RoCE: TCP sockets instead",
    "NCCL_IB_HCA": "InfiniBand devices that NCCL uses",
    "NCCL_IB_TIMEOUT": "how long InfiniBand waits for an answer",
    "NCCL_IB_RETRY_CNT": "how often InfiniBand tries again",
    "NCCL_IB_GID_INDEX": "which address of a RoCE device NCCL uses",
    "NCCL_NET": "which network code of NCCL is used",
    "NCCL_NET_GDR_LEVEL": "how far from the network card a GPU may be to send without the host",
    "NCCL_P2P_DISABLE": "1 forbids GPUs to read each other's memory: everything by way of the host",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be to read each other's memory",
    "NCCL_SHM_DISABLE": "1 forbids shared memory between the GPUs of a host: the network instead",
    "NCCL_BUFFSIZE": "bytes of NCCL's buffers",
    "NCCL_ALGO": "how NCCL adds: Ring, Tree and others; by default it chooses",
    "NCCL_PROTO": "how NCCL sends: LL, LL128 or Simple; by default it chooses",
    "NCCL_MIN_NCHANNELS": "the fewest channels of NCCL",
    "NCCL_MAX_NCHANNELS": "the most channels of NCCL",
    "NCCL_CROSS_NIC": "whether a ring may use different network cards on different hosts",
    "NCCL_TOPO_FILE": "a file with the topology for NCCL",
    "NCCL_LAUNCH_MODE": "how NCCL starts its kernels",
    "NCCL_BLOCKING_WAIT": "a variable of PyTorch's: TensorFlow does not read it",
    "NCCL_ASYNC_ERROR_HANDLING": "a variable of PyTorch's: TensorFlow does not read it",
    "GRPC_VERBOSITY": "how much gRPC logs: NONE, ERROR, INFO or DEBUG",
    "GRPC_TRACE": "which of its parts gRPC follows closely; slow",
    "GRPC_DNS_RESOLVER": "who looks names up for gRPC: native is the system, ares its own",
    "GRPC_POLL_STRATEGY": "how gRPC waits for its sockets",
    "GRPC_FAIL_FAST": "whether a call fails at once while its worker cannot be reached",
    "GRPC_ENABLE_FORK_SUPPORT": "whether a process that uses gRPC may fork",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": "certificates for encrypted gRPC; workers do not encrypt",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true takes a GPU's memory as it is needed, not all at the start",
    "TF_GPU_ALLOCATOR": "cuda_malloc_async lets CUDA manage memory: less is lost in pieces",
    "TF_GPU_THREAD_MODE": "gpu_private gives each GPU private threads to start kernels from",
    "TF_GPU_THREAD_COUNT": "number of those threads for each GPU",
    "TF_NUM_INTRAOP_THREADS": "threads of one operation on the CPU",
    "TF_NUM_INTEROP_THREADS": "operations at the same time on the CPU",
    "TF_ENABLE_ONEDNN_OPTS": "0 switches Intel's oneDNN off: other rounding, often slower",
    "TF_DETERMINISTIC_OPS": "1 allows operations only that give the same result every time",
    "TF_CUDNN_USE_AUTOTUNE": "0 takes cuDNN's first algorithm instead of trying which is fastest",
    "TF_CPP_MIN_LOG_LEVEL": "from which level TensorFlow's C++ speaks; 3 hides errors too",
    "TF_CPP_MAX_VLOG_LEVEL": "how closely TensorFlow follows itself; slow above 0",
    "TF_XLA_FLAGS": "how TensorFlow compiles with XLA",
    "TF_DISABLE_MKL": "1 switches Intel's oneDNN off",
    "XLA_FLAGS": "how XLA compiles",
    "OMP_NUM_THREADS": "threads of OpenMP: of numpy's, and of parts of TensorFlow",
    "CUDA_DEVICE_ORDER": "how CUDA counts GPUs: FASTEST_FIRST, or PCI_BUS_ID as nvidia-smi does",
    "CUDA_LAUNCH_BLOCKING": "1 waits for each kernel: for debugging, slow",
    "CUDA_CACHE_DISABLE": "1 compiles kernels anew in each process",
    "NVIDIA_VISIBLE_DEVICES": "GPUs that the container was given",
    "NVIDIA_TF32_OVERRIDE": "0 switches TF32 off on NVIDIA's GPUs: exact, and slower",
}
"""The effect of each variable."""

_SLOWER = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_CACHE_DISABLE": "1",
}
_OTHERS = ("NCCL_", "GRPC_")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")
_PASSWORD = re.compile(r"//[^@/]*@")


def check_variables(
    environ: Mapping[str, str],
    cluster: Cluster | None = None,
    interfaces: Sequence[str] | None = None,
) -> list[Check]:
    """Explains each variable that is set, and warns of harmful ones.

    Args:
        environ: The environment.
        cluster: The cluster, or None.
        interfaces: Names of this host's network interfaces; None asks the system.
    """
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    checks = []
    for name in sorted(environ):
        if name == "NCCL_SOCKET_IFNAME":
            checks.append(check_interfaces(environ[name], interfaces))
        elif name in MEANINGS:
            checks.append(_explain(name, environ[name]))
        elif name.startswith(_OTHERS):
            checks.append(Check(name, OK, f"={environ[name]}: not known here"))
    checks += check_proxy(environ, cluster)
    return checks or [Check("variables", OK, "none of NCCL, gRPC or TensorFlow is set")]


def _explain(name, value) -> Check:
    text = f"={value}: {MEANINGS[name]}"
    if _SLOWER.get(name) == value:
        hint = f"Unset {name} when what it was set for is solved."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def check_interfaces(value: str, interfaces: Sequence[str]) -> Check:
    """Checks whether NCCL finds an interface.

    >>> check_interfaces("=eth0,ib0", ["lo", "ib0"]).status, check_interfaces("eth", ["lo"]).status
    ('ok', 'failure')
    """
    name = "NCCL_SOCKET_IFNAME"
    text = f"={value}: {MEANINGS[name]}"
    if any(_is_chosen(interface, value) for interface in interfaces):
        return Check(name, OK, text)
    hint = f"Name one of this host's: {', '.join(interfaces)}."
    return Check(name, FAILURE, f"{text}; none of this host's has that name", hint)


def _is_chosen(interface, value) -> bool:
    """Matches comma-separated prefixes; `=` means the exact name, `^` excludes."""
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    exact, names = rest.startswith("="), rest.removeprefix("=").split(",")
    found = any(interface == name if exact else interface.startswith(name) for name in names)
    return found != excludes


def check_proxy(environ: Mapping[str, str], cluster: Cluster | None) -> list[Check]:
    """Looks for a proxy that gRPC would use between the workers; none for no proxy."""
    found = [name for name in _PROXIES if environ.get(name)]
    if not found:
        return []
    name = found[0]
    text = f"={_PASSWORD.sub('//', environ[name])}: gRPC connects through this proxy"
    if cluster is None or cluster.num_workers < 2:
        return [Check(name, OK, f"{text}; it matters to workers of a cluster only")]
    first = next((each for each in _NO_PROXIES if environ.get(each)), None)
    around = [each.strip() for each in environ[first].split(",")] if first else []
    through = sorted(
        host for host in _hosts(cluster) if not any(_bypasses(host, each) for each in around)
    )
    if not through:
        return [Check(name, OK, f"{text}; {first} keeps the workers out of it")]
    hint = f"Set no_grpc_proxy={','.join(through)}, or unset the proxy for training."
    return [Check(name, WARNING, f"{text}, to other workers too: they may hang", hint)]


def _bypasses(host, entry) -> bool:
    """Whether an entry is the host, a domain that it is in, or a range of addresses with it."""
    if is_ip_address(host) and "/" in entry:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    return bool(entry) and (host == entry or host.endswith("." + entry.lstrip(".")))
