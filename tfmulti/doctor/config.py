"""What the doctor is asked to look at."""

from __future__ import annotations

import dataclasses

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
