"""The client: connects to the worker that serves, and waits for the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets

from tfmulti.cluster import Cluster
from tfmulti.cluster.errors import show
from tfmulti.cluster.network import split_address
from tfmulti.rendezvous import messages
from tfmulti.rendezvous.errors import RendezvousError, describe_fault, name_worker, where_configured
from tfmulti.rendezvous.messages import Token
from tfmulti.rendezvous.server import LINE_S, Talk, cut

_RETRY_S = 0.1
_MARGIN_S = 2.0


class Client:
    """A client of the rendezvous.

    Args:
        cluster: The cluster, seen from this worker.
        settings: The settings of this worker.
        token: The token.
        timeout_s: Seconds to wait for all.
        host: Position in `cluster.tasks` of the worker that serves.
        talk: Function that exchanges more messages with it after the outcome.

    Attributes:
        fault: The error of the last attempt to connect, or None.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: dict,
        token: Token,
        timeout_s: float,
        host: int = 0,
        talk: Talk | None = None,
    ):
        self.cluster, self.settings = cluster, settings
        self.token, self.timeout_s = token, timeout_s
        self._host, self._talk = host, talk
        self.fault: Exception | None = None
        self._instance = secrets.token_hex(16)

    async def join(self) -> dict:
        """Connects as often as needed, until there is an outcome or the timeout expires.

        Returns:
            The outcome as `Server.serve` returns it, without `settings` if there is no server.

        Raises:
            RendezvousError: If the server rejects this worker's token.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.timeout_s
        while clock() < deadline:
            try:
                return await self._visit(deadline)
            except (asyncio.TimeoutError, OSError, EOFError, messages.MessageError) as error:
                self.fault = error
            except UnicodeError as error:  # No name server can be asked for such a name.
                self.fault = error
            await asyncio.sleep(min(_RETRY_S, max(deadline - clock(), 0)))
        fault = describe_fault(self.fault or asyncio.TimeoutError())
        remark = f"the last attempt to connect failed: {fault}"
        return {"missing": [self._host], "remarks": [remark]}

    async def _visit(self, deadline) -> dict:
        clock = asyncio.get_running_loop().time
        kind, number = self.cluster.tasks[self._host]
        host, port = split_address(self.cluster.spec[kind][number])
        limit = messages.MAX_BYTES * (self.cluster.num_workers + 1)
        opening = asyncio.open_connection(host, port, limit=limit)
        reader, writer = await asyncio.wait_for(opening, min(LINE_S, deadline - clock()))
        try:
            # A connection from a port to itself succeeds although nothing listens.
            if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
                raise ConnectionRefusedError
            greeting_s = min(LINE_S, deadline - clock())
            line = await asyncio.wait_for(messages.read_line(reader), greeting_s)
            random = messages.read_greeting(line)
            content = {
                "index": self.cluster.worker_index,
                "instance": self._instance,
                "left_s": deadline - clock(),
                "settings": self.settings,
            }
            writer.write(messages.write(self.token.secret, "client", random, content))
            outcome_s = deadline - clock() + _MARGIN_S
            line = await asyncio.wait_for(messages.read_line(reader), outcome_s)
            refusal = messages.read_refusal(line)
            if refusal is not None:
                raise self._refused_error(refusal)
            outcome = messages.read(line, self.token.secret, "server", random + self._instance)
            if self._talk is not None:
                await self._talk(reader, writer)
            return outcome
        except BaseException:
            cut(writer)
            raise
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _refused_error(self, refusal) -> RendezvousError:
        host = name_worker(self.cluster, self._host)
        if self.token.is_given:
            theirs = "another one" if refusal.get("token_is_given") else "none"
            received = f"TFMULTI_TOKEN is set here, and {host} has {theirs}"
        elif refusal.get("token_is_given"):
            received = f"TFMULTI_TOKEN is not set here, and {host} has one"
        else:
            mine = {kind: list(addresses) for kind, addresses in self.cluster.spec.items()}
            theirs = show(refusal.get("cluster"))
            return RendezvousError(
                "All workers must have the same cluster, in the same order. "
                f"Received: {json.dumps(mine)} here, and {theirs} on {host}. "
                f"Make sure that it is the same in {where_configured(self.cluster)}."
            )
        return RendezvousError(
            f"All workers must have the same token. Received: {received}. "
            "Set TFMULTI_TOKEN to the same text on every worker, or on none."
        )
