"""One worker runs cases: `python behaviour_worker.py FOLDER LOGICAL_CPUS CASE/PATH ...`.

Leaves `worker_INDEX.npz` in the folder, with the results as `CASE/PATH/NAME`.
"""

import os
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def run_case(strategy, folder, *names):
    import behaviour_cases

    arrays = {"num_replicas": np.array(strategy.num_replicas_in_sync)}
    for name in names:
        results = behaviour_cases.run_case(name.split("/")[0], strategy, name.split("/")[1])
        arrays |= {f"{name}/{key}": value for key, value in results.items()}
    index = strategy.cluster_resolver.task_id
    np.savez(folder / f"worker_{index}.npz", **arrays)


def main(folder, logical_cpus, *names):
    import tfmulti

    strategy = tfmulti.create_strategy("multi_worker", logical_cpus=int(logical_cpus))
    run_case(strategy, Path(folder), *names)


if __name__ == "__main__":
    main(*sys.argv[1:])
