"""One configuration in a process of its own: `python -m tfmulti.parity.worker FOLDER`.

The folder's `task.json` says what to do. The results are written there: records, or
`error.json`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from tfmulti.cluster import peers, resolve_cluster
from tfmulti.parity.config import ParityConfig
from tfmulti.runtime import command_line, errors, processes

ONE_DEVICE, REPLICAS, WORKERS, DIAGNOSIS = "one_device", "replicas", "workers", "diagnosis"


def main(argv: list[str]) -> int:
    """Runs the task of the folder on the command line. Returns the exit code."""
    processes.end_with_parent()
    folder = Path(argv[1])
    number = _worker_number()
    try:
        task = json.loads((folder / "task.json").read_text())
        config = ParityConfig(**task["config"])
        command_line.import_tensorflow()
        if task["kind"] == DIAGNOSIS:
            _diagnose(config, task, folder)
        else:
            _train(config, task, folder, number)
    except Exception as error:
        failure = {
            "kind": type(error).__name__,
            "message": errors.short_message(error),
            "traceback": traceback.format_exc(),
        }
        (folder / f"error_{number}.json").write_text(json.dumps(failure))
        return _exit_code(error)
    return 0


def _exit_code(error) -> int:
    """Returns the exit code of an error: one of its own where another worker was lost."""
    config = _tf_config()
    cluster = resolve_cluster(config, check_network=False) if config else None
    peer_error = peers.find_peer_error(error, cluster)
    return command_line.ERROR if peer_error is None else peer_error.exit_code


def _worker_number() -> int:
    return int(_tf_config().get("task", {}).get("index", 0))


def _tf_config() -> dict:
    return json.loads(os.environ.get("TF_CONFIG") or "{}")


def _train(config, task, folder, number):
    from tfmulti.parity.compare import Record
    from tfmulti.parity.training import load_case, train_and_record
    from tfmulti.strategies import create_strategy

    kind, count = task["kind"], task["count"]
    if kind == WORKERS:
        strategy = create_strategy("multi_worker", verify="never")
    elif kind == REPLICAS:
        strategy = create_strategy("mirrored", logical_cpus=count, verify="never")
    else:
        strategy = create_strategy("one_device", devices=["CPU:0"])
    case = load_case(config)
    if number == 0:
        (folder / "layout.txt").write_text(case.layout.describe())
    train_and_record(case, strategy, Record(folder / str(number)))
    if kind == ONE_DEVICE:
        train_and_record(case, strategy, Record(folder / "reordered"), reorder=True)


def _diagnose(config, task, folder):
    from tfmulti.parity.diagnosis import diagnose
    from tfmulti.strategies import create_strategy

    settings = {"verify": "always", "on_difference": "error"}
    strategy = create_strategy("mirrored", logical_cpus=task["count"], **settings)
    findings = diagnose(config, strategy)
    (folder / "findings.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
