"""The secret that lets a worker come to the meeting."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping

from absl import logging

from tfmulti.cluster import Cluster, environment


@dataclasses.dataclass(frozen=True)
class Token:
    """A secret, and whether the user gave one.

    Attributes:
        secret: Its bytes.
        is_given: False where it was made from the cluster's addresses, which are no secret.
    """

    secret: bytes = dataclasses.field(repr=False)
    is_given: bool


def find_token(
    cluster: Cluster, token: str | None, environ: Mapping[str, str] = os.environ
) -> Token:
    """Returns the token: the one given, else that of the environment, else one of the cluster."""
    token = token or environ.get(environment.TOKEN)
    if token:
        return Token(token.encode(), True)
    logging.warning(
        "The workers meet without a secret: whoever knows the cluster's addresses may come. "
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
