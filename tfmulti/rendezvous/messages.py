"""The messages of a rendezvous: lines of JSON, signed with a secret that all workers have."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping

from absl import logging

from tfmulti.cluster import Cluster, environment


@dataclasses.dataclass(frozen=True)
class Token:
    """A secret, and whether the user gave one.

    Attributes:
        secret: Its bytes.
        is_given: False if it was derived from the cluster's addresses, which are not secret.
    """

    secret: bytes = dataclasses.field(repr=False)
    is_given: bool


def find_token(
    cluster: Cluster, token: str | None, environ: Mapping[str, str] = os.environ
) -> Token:
    """Returns the token: the argument, else that of the environment, else one of the cluster."""
    token = token or environ.get(environment.TOKEN)
    if token:
        return Token(token.encode(), True)
    logging.warning(
        "The rendezvous has no secret: anyone who knows the cluster's addresses can join it. "
        "Set %s to the same random text on every worker.",
        environment.TOKEN,
    )
    return Token(digest_cluster(cluster).encode(), False)


def digest_cluster(cluster: Cluster) -> str:
    """Returns SHA-256 over the addresses of all tasks.

    Example:
        >>> one, other = (Cluster({"worker": ["a:1", "b:1"]}, "worker", i) for i in range(2))
        >>> digest_cluster(one) == digest_cluster(other)
        True
    """
    spec = {kind: list(addresses) for kind, addresses in cluster.spec.items()}
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()


MAX_BYTES = 64 * 1024
"""The maximum size of a message in bytes."""

GREETING = "tfmulti-rendezvous-1"
REFUSED = "refused"
_RANDOM = re.compile(r"[0-9a-f]{32}")


class MessageError(Exception):
    """The received data is not a message of this rendezvous."""


def sign(token: bytes, role: str, context: str, text: str) -> str:
    """Returns the signature of a message: HMAC-SHA256 over its role, context and text."""
    message = json.dumps([role, context, text]).encode()
    return hmac.new(token, message, hashlib.sha256).hexdigest()


def write(token: bytes, role: str, context: str, content: object) -> bytes:
    """Returns a message as bytes: its signature, a space, its content as JSON, a line end.

    Args:
        token: The token.
        role: `"server"` or `"client"`.
        context: The random numbers of this connection.
        content: A value that JSON can hold.
    """
    text = json.dumps(content)
    return f"{sign(token, role, context, text)} {text}\n".encode()


def read(line: bytes, token: bytes, role: str, context: str) -> dict:
    """Checks a message's signature and returns its content.

    Raises:
        MessageError: If it was not signed with this token in this role.
    """
    code, _, text = _decode(line).partition(" ")
    if not hmac.compare_digest(code.encode(), sign(token, role, context, text).encode()):
        raise MessageError("another token")
    return parse(text)


def parse(text: str) -> dict:
    """Returns the object that a JSON text holds.

    Raises:
        MessageError: For anything else.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError("a message that is not JSON") from error
    if not isinstance(content, dict):
        raise MessageError("a message that is not an object")
    return content


def unchecked(line: bytes) -> dict:
    """Returns the content of a message with a wrong signature, for a remark only.

    Raises:
        MessageError: If it cannot be parsed.
    """
    return parse(_decode(line).partition(" ")[2])


def write_greeting(random: str) -> bytes:
    """Returns the server's first line."""
    return f"{GREETING} {random}\n".encode()


def read_greeting(line: bytes) -> str:
    """Returns the random number of the server's first line.

    Raises:
        MessageError: Where it is not one.
    """
    word, _, random = _decode(line).partition(" ")
    if word != GREETING or not _RANDOM.fullmatch(random):
        raise MessageError("a greeting that is not tfmulti's")
    return random


def write_refusal(reason: dict) -> bytes:
    """Returns the unsigned line for a client with another token."""
    return f"{REFUSED} {json.dumps(reason)}\n".encode()


def read_refusal(line: bytes) -> dict | None:
    """Returns the reason in a refusal; None if the line is something else.

    Raises:
        MessageError: Where the reason cannot be read.
    """
    word, _, text = _decode(line).partition(" ")
    return parse(text) if word == REFUSED else None


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Reads one line.

    Raises:
        MessageError: Where it is longer than the reader's limit.
        EOFError: Where the other side ends before its line does.
        OSError: Where the connection breaks.
    """
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise MessageError("a message that is too long") from error


def _decode(line: bytes) -> str:
    try:
        return line.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise MessageError("a message that is not text") from error
