"""Tries programs by their seeds: `PYTHONPATH=tests python -m generated 7 12 --replicas 3`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main() -> None:
    """Prints what each program is made of, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+", help="seeds of the programs")
    parser.add_argument("--last", type=int, help="all seeds from the first to this one")
    parser.add_argument("--replicas", type=int, help="else as drawn")
    parser.add_argument("--noise", action="store_true", help="one device alone, in three orders")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    from tfmulti import devices

    devices.set_logical_cpus(4)
    from conformance import training
    from conformance.guarantee import Origin
    from replicas import create_strategy

    from generated import models, programs, trying

    seeds = arguments.seeds
    if arguments.last is not None:
        seeds = range(seeds[0], arguments.last + 1)
    failed = 0
    for seed in seeds:
        program = programs.draw(seed)
        program = dataclasses.replace(program, replicas=arguments.replicas or program.replicas)
        print(program)
        if arguments.noise:
            guarantee = models.guarantee(program)
            reference = training.train(guarantee, Origin())
            print(f"  noise: {trying.measure_noise(guarantee, reference):.1e}", flush=True)
            continue
        cell = trying.on_replicas(program, create_strategy(program.replicas))
        failed += not cell.ok
        print(f"  {'kept' if cell.ok else 'BROKEN'}: {cell.text} {cell.where[:300]}", flush=True)
    raise SystemExit(f"{failed} of {len(seeds)} are broken" if failed else 0)


if __name__ == "__main__":
    main()
