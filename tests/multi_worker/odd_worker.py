"""One worker does what `odd_cases` names: `python odd_worker.py FOLDER LOGICAL_CPUS CASE ...`.

Leaves `worker_INDEX.npz` in the folder, with the results as `CASE/NAME`.
"""

import faulthandler
import os
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# A worker that waits for ever in a case fails, and says where it waits.
DEADLINE_S = 200


def main(folder, logical_cpus, *names):
    import odd_cases

    import tfmulti

    strategy = tfmulti.create_strategy("multi_worker", logical_cpus=int(logical_cpus))
    index = strategy.cluster_resolver.task_id
    arrays = {}
    for name in names:
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        results = odd_cases.run_case(name, strategy, index)
        arrays |= {f"{name}/{key}": np.asarray(value) for key, value in results.items()}
    np.savez(Path(folder) / f"worker_{index}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
