"""The command line: `python -m tfmulti.doctor`. Imports no TensorFlow: another process does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys

from rich.console import Console

from tfmulti.cluster import Cluster
from tfmulti.doctor import between_workers, cluster_settings, gpus, host, packages, report
from tfmulti.doctor.tensorflow_process import check_import, run_tensorflow
from tfmulti.rendezvous import find_timeout
from tfmulti.runtime import command_line
from tfmulti.settings import check_settings, setting

USAGE = "python -m tfmulti.doctor [flags]: is this host, and this cluster, ready to train?"


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """One examination; every setting is a flag of `python -m tfmulti.doctor`.

    Raises:
        ValueError: For an invalid value.

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
        180.0,
        "Time limit in seconds for importing TensorFlow and computing a sum on each GPU.",
        at_least=1.0,
    )

    def __post_init__(self):
        check_settings(self)
        find_timeout(self.start_timeout)


def examine(config: DoctorConfig, timeout_s: float) -> tuple[report.Areas, Cluster | None]:
    """Runs all checks.

    Args:
        config: What to look at.
        timeout_s: Seconds that workers wait for one another.

    Returns:
        The checks, by area; and the cluster, where all its workers have met, else None.
    """
    environ = os.environ
    cluster, tf_config = cluster_settings.read_cluster(config.tf_config)
    # The network comes first: all workers have just started, and nothing else runs yet.
    cluster_checks = [tf_config, *cluster_settings.check_addresses(cluster, environ)]
    driver = gpus.query_driver()
    found, met = between_workers.check_workers(
        cluster, config.cluster, driver.gpus, timeout_s, environ
    )
    cluster_checks += found
    answer = run_tensorflow(config.tensorflow_timeout)
    num_gpus = len(driver.gpus)
    num_workers = cluster.num_workers if cluster else 1
    areas = [
        ("Programs", [*packages.check_packages(), check_import(answer)]),
        ("GPUs", gpus.check_gpus(driver, answer, environ)),
        (
            "CUDA and links",
            [
                *gpus.check_cuda(driver, answer),
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
    return areas, cluster if met else None


def main(argv: list[str] | None = None) -> int:
    """Checks this host, and shows the results.

    Returns:
        The exit code: 0, or 1 where something will make training fail, 2 for a wrong command
        line.
    """
    return command_line.run(DoctorConfig, USAGE, _examine_and_show, argv)


def _examine_and_show(config, tracebacks) -> int:
    timeout_s = find_timeout(config.start_timeout)
    areas, met = _look(config, timeout_s)
    checks = [check for _, found in areas for check in found]
    if config.json:
        written = {"checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(written, indent=2), flush=True)
    else:
        report.show(areas, Console())
        sys.stdout.flush()
    if met:
        between_workers.leave_together(met, timeout_s)
    failed = any(check.status == report.FAILURE for check in checks)
    return command_line.ERROR if failed else 0


def _look(config, timeout_s):
    console = Console(stderr=True)
    waits = contextlib.nullcontext()
    if console.is_terminal and not config.json:
        waits = console.status("Looking; TensorFlow's import takes some seconds ...")
    with waits:
        return examine(config, timeout_s)


if __name__ == "__main__":
    sys.exit(main())
