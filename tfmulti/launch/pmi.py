"""Makes the workers one MPI job, with the protocol that `mpiexec` uses.

MPI's processes find one another through their process manager: each stores its address in a table,
waits for all, and reads the others'. The protocol is PMI version 1 (lines of `key=value`), which
MPICH and Intel MPI use: https://github.com/pmodels/mpich/tree/main/src/pmi. With its own process
manager the launcher keeps each worker under its supervisor. `mpiexec` would kill all workers when
one fails, before they can report why, and would change their exit codes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping

_IDENTITY = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

_TABLE = "tfmulti"
_MAX_VALUE = 4096


def variables_of_others(environ: Mapping[str, str]) -> list[str]:
    """Returns what srun or mpiexec has told the launcher, which its workers must not inherit.

    They would take themselves for that MPI process, and read its PMI_FD, which is closed.

    >>> variables_of_others({"PMI_RANK": "1", "PMI_FD": "9", "I_MPI_FABRICS": "shm"})
    ['PMI_RANK', 'PMI_FD']
    """
    return [name for name in environ if name.startswith(_IDENTITY)]


class ProcessManager:
    """Serves one start of `size` workers on this machine. Used in a `with` statement.

    Args:
        size: Number of workers.
    """

    def __init__(self, size: int):
        self._size, self._table = size, {"PMI_process_mapping": f"(vector,(0,1,{size}))"}
        self._waiting: list = []
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        # Wakes the thread that accepts, which closing alone does not.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def variables(self, index: int) -> Mapping[str, str]:
        """Returns the environment variables by which a worker finds this manager.

        `variables_of_others` must not be in the worker's environment.
        """
        host, port = self._server.getsockname()
        number = {"PMI_ID": str(index), "PMI_RANK": str(index), "PMI_SIZE": str(self._size)}
        return {"PMI_PORT": f"{host}:{port}", "PMI_JOBID": _TABLE, **number}

    def _accept(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        def send(text):
            # The launcher itself detects a worker that has ended.
            with contextlib.suppress(OSError):
                connection.sendall(f"{text}\n".encode())

        with connection, contextlib.suppress(OSError), connection.makefile() as lines:
            for line in lines:
                words = dict(word.split("=", 1) for word in line.split() if "=" in word)
                if not self._answer(words, send):
                    return

    def _answer(self, words, send) -> bool:
        """Answers one line; returns whether more lines may follow."""
        command = words.get("cmd")
        if command == "barrier_in":
            self._wait_for_all(send)
        elif command == "initack":
            send("cmd=initack rc=0")
            send(f"cmd=set size={self._size}")
            send(f"cmd=set rank={words.get('pmiid')}")
            send("cmd=set debug=0")
        elif command == "put":
            self._table[words["key"]] = words["value"]
            send("cmd=put_result rc=0 msg=success")
        elif command == "get":
            send(self._look_up(words.get("key")))
        elif command in _ANSWERS:
            send(_ANSWERS[command])
        else:
            send(f"cmd={command} rc=-1 msg=unknown_command")
        return command != "finalize"

    def _look_up(self, key) -> str:
        value = self._table.get(key)
        if value is None:
            return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
        return f"cmd=get_result rc=0 msg=success value={value}"

    def _wait_for_all(self, send):
        with self._lock:
            self._waiting.append(send)
            if len(self._waiting) < self._size:
                return
            there, self._waiting = self._waiting, []
        for each in there:
            each("cmd=barrier_out rc=0")


_ANSWERS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": f"cmd=maxes kvsname_max=256 keylen_max=64 vallen_max={_MAX_VALUE}",
    "get_appnum": "cmd=appnum appnum=0",
    "get_my_kvsname": f"cmd=my_kvsname kvsname={_TABLE}",
    "get_universe_size": "cmd=universe_size size=-1",
    "finalize": "cmd=finalize_ack rc=0",
}
