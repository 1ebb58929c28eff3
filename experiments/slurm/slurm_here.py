"""A whole Slurm on this machine, in a folder of its own, with two hosts that are both this one.

Needs Debian's packages slurm-wlm and munge, and touches nothing of theirs: its daemons listen on
free ports of loopback, and are ended with all that they started.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tfmulti.runtime import processes

COMMANDS = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "salloc",
    "sbatch",
    "scancel",
    "scontrol",
    "sinfo",
)
# Their names are addresses, so that they resolve; their list has brackets.
HOSTS = ("127.0.0.1", "127.0.0.2")
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
_CONFIG = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that is requeued waits until the credentials of its last start have expired.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MpiParams=ports=13000-13099
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.[1-2] Port=[{first}-{last}] CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def find_missing() -> list[str]:
    """Returns the commands of Slurm and munge that this machine lacks."""
    return [name for name in COMMANDS if not shutil.which(name, path=_SEARCH)]


class SlurmHere:
    """Slurm's daemons on this machine. Used in a `with` statement.

    Args:
        timeout_s: Seconds that the daemons may take to start, and to end.
    """

    def __init__(self, timeout_s: float = 60.0):
        self._timeout_s = timeout_s
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> SlurmHere:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-here-"))
        # Slurm takes ports in a row.
        controller = processes.free_ports(1)[0]
        first = next(port for port in processes.free_ports(9) if port != controller - 1)
        config = _CONFIG.format(
            host=socket.gethostname(),
            user=getpass.getuser(),
            folder=self.folder,
            controller=controller,
            first=first,
            last=first + 1,
        )
        self.environ = {
            **{name: value for name, value in os.environ.items() if "SLURM" not in name},
            "PATH": _SEARCH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self.environ.pop("TF_CONFIG", None)
        try:
            (self.folder / "slurm.conf").write_text(config)
            (self.folder / "cgroup.conf").touch()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.left_behind = self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command: list[str], **options) -> subprocess.CompletedProcess:
        """Runs a command of Slurm; returns it with its output as text."""
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=500, **options
        )

    def _start(self):
        for name in ("munge", "state"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        munge = {name: self.folder / "munge" / name for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}-file={path}" for name, path in munge.items() if name != "socket"]
        self._start_daemon(
            "munged", "--foreground", f"--socket={munge['socket']}", f"--key-file={key}", *options
        )
        self.wait_for(munge["socket"].exists, "munged to listen")
        self._start_daemon("slurmctld", "-D")
        for host in HOSTS:
            self._start_daemon("slurmd", "-D", "-N", host)
        self.wait_for(
            lambda: self.run(["sinfo", "-h", "-o", "%D %t"]).stdout.strip() == f"{len(HOSTS)} idle",
            "both hosts to be idle",
        )

    def _start_daemon(self, *command):
        with open(self.folder / f"{command[0]}-{len(self._daemons)}.log", "w") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environ, stdout=log, stderr=subprocess.STDOUT)
            )

    def wait_for(self, is_so: Callable[[], bool], what: str, timeout_s: float = 0.0) -> None:
        """Waits until something is so.

        Raises:
            RuntimeError: Where it does not come, or a daemon has ended; with the daemons' logs.
        """
        limit = time.monotonic() + (timeout_s or self._timeout_s)
        while not is_so():
            ended = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > limit:
                logs = "\n".join(
                    f"{path.name}: {path.read_text(errors='replace')[-600:]}"
                    for path in sorted(self.folder.glob("*.log"))
                )
                raise RuntimeError(f"Waited in vain for {what}. Ended daemons: {ended}.\n{logs}")
            time.sleep(0.1)

    def _end(self) -> list[str]:
        """Ends all jobs and daemons; returns what was still there after their time."""
        if len(self._daemons) > 1:
            self.run(["scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}"])
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        limit = time.monotonic() + self._timeout_s
        while self._find_children() and time.monotonic() < limit:
            time.sleep(0.1)
        left = self._find_children()
        for process in left:
            os.kill(process, signal.SIGKILL)
        return [str(process) for process in left]

    def _find_children(self) -> list[int]:
        """Returns the processes that have this folder's configuration in their environment."""
        mine, found = f"SLURM_CONF={self.folder}/".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mine in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found
