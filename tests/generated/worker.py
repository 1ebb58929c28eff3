"""A worker of a cluster: tries one program and leaves what came out in a folder."""

import sys
import warnings
from pathlib import Path

import numpy as np

import tfmulti


def main():
    seed, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    strategy = tfmulti.create_strategy("multi_worker", logical_cpus=1)
    from conformance import training
    from conformance.guarantee import Origin

    from generated import models, programs

    index = strategy.cluster_resolver.task_id
    program = programs.draw(seed)
    found = training.attempt(models.guarantee(program), Origin(strategy, worker=index))
    if isinstance(found, str):
        (folder / f"{index}.txt").write_text(found)
    else:
        np.savez(folder / f"{index}.npz", **found)


if __name__ == "__main__":
    main()
