"""All that the doctor looks at, in the order in which it is told."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from tfmulti.cluster import Cluster
from tfmulti.doctor import cluster_settings, gpus, host, packages, peers
from tfmulti.doctor.cuda import check_cuda
from tfmulti.doctor.report import Check
from tfmulti.doctor.tensorflow_process import ask, check_import
from tfmulti.rendezvous import find_timeout
from tfmulti.settings import check_settings, setting


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """One examination; every setting is a flag of `python -m tfmulti.doctor`.

    Raises:
        ValueError: For a value that cannot be.

    Example:
    >>> DoctorConfig().cluster
    False
    """

    cluster: bool = setting(
        False, "Look at the other workers too; every worker runs this at the same time."
    )
    json: bool = setting(False, "Print JSON instead of a table.")
    workdir: str | None = setting(
        None, "Folder that training will write to; by default the current one."
    )
    tf_config: str | None = setting(
        None, "File or folder with the cluster; by default the variable TF_CONFIG."
    )
    start_timeout: float | None = setting(
        None,
        "Seconds that workers wait for one another; by default TFMULTI_START_TIMEOUT, else 60.",
        at_least=0.001,
    )
    tensorflow_timeout: float = setting(
        180.0, "Seconds that TensorFlow has for its import and a sum on each GPU.", at_least=1.0
    )

    def __post_init__(self):
        check_settings(self)


@dataclasses.dataclass(frozen=True)
class Examination:
    """The results of all checks.

    Attributes:
        areas: The checks, by area.
        met: The cluster, where all its workers have met; else None.
        timeout_s: Seconds that they wait for one another.
    """

    areas: list[tuple[str, list[Check]]]
    met: Cluster | None
    timeout_s: float

    @property
    def checks(self) -> list[Check]:
        """All checks."""
        return [check for _, checks in self.areas for check in checks]


def examine(config: DoctorConfig, environ: Mapping[str, str] = os.environ) -> Examination:
    """Runs all checks.

    Args:
        config: What to look at.
        environ: The environment.

    Raises:
        ValueError: For a TFMULTI_START_TIMEOUT that is no number of seconds.
    """
    timeout_s = find_timeout(config.start_timeout, environ)
    cluster, tf_config = cluster_settings.read_cluster(config.tf_config)
    # The network comes first: all workers have just started, and nothing else runs yet.
    cluster_checks = [tf_config, *cluster_settings.check_addresses(cluster, environ)]
    driver = gpus.ask_driver()
    found, met = peers.check_peers(cluster, config.cluster, driver.gpus, timeout_s, environ)
    cluster_checks += found
    report = ask(config.tensorflow_timeout)
    num_gpus = len(driver.gpus)
    num_workers = cluster.num_workers if cluster else 1
    areas = [
        ("Programs", [*packages.check_packages(), check_import(report)]),
        ("GPUs", gpus.check_gpus(driver, report, environ)),
        (
            "CUDA and links",
            [
                *check_cuda(driver, report),
                gpus.check_nvlink(driver.gpus),
                gpus.check_topology(driver),
            ],
        ),
        ("This host", host.check_host(host.read_host(), num_gpus, num_workers, environ)),
        ("Work folder", host.check_workdir(config.workdir)),
        ("Cluster", cluster_checks),
        ("Variables", cluster_settings.check_variables(environ, cluster)),
        ("Traps", packages.check_pitfalls(environ, cluster, num_gpus)),
    ]
    return Examination(areas, cluster if met else None, timeout_s)
