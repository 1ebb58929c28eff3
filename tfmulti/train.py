"""The command line: `python -m tfmulti.train`.

Imports no TensorFlow until the flags and the cluster have been checked.
"""

from __future__ import annotations

import sys
import traceback

from tfmulti import cluster, command_line
from tfmulti.config import TrainConfig

USAGE = "python -m tfmulti.train [flags]: trains a Keras 3 model on every device of this job."


def main(argv: list[str] | None = None) -> int:
    """Parses the flags, trains, and shows a table. Returns the exit code."""
    argv = sys.argv if argv is None else argv
    values = command_line.define_flags(TrainConfig)
    command_line.define_traceback(values)
    code = command_line.parse(values, argv, USAGE)
    if code is not None:
        return code
    try:
        config = command_line.read_settings(TrainConfig, values)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return command_line.BAD_USAGE
    try:
        return _train(config)
    except Exception as error:
        return _end(error, config, values.traceback)


def _end(error, config, with_traceback) -> int:
    """Says why this worker ends, tells the others where it is its own fault; the exit code."""
    ending = None
    if "tensorflow" in sys.modules and config.strategy in ("auto", "multi_worker"):
        from tfmulti.strategies.ending import end_worker

        ending = end_worker(error, cluster.resolve_cluster(config.tf_config, check_network=False))
    if with_traceback:
        traceback.print_exception(error)
    text = command_line.cause_of(error) if ending is None else ending.text
    print(f"error: {text}", file=sys.stderr)
    if not with_traceback:
        print("(--traceback shows where it came from)", file=sys.stderr)
    return command_line.ERROR if ending is None else ending.exit_code


def _train(config: TrainConfig) -> int:
    task = None
    if config.strategy in ("auto", "multi_worker"):
        task = cluster.resolve_cluster(config.tf_config)
    command_line.import_tensorflow()
    from tfmulti.trainer import train_and_evaluate

    result = train_and_evaluate(config, tell=lambda line: print(line, flush=True))
    if task is None or task.is_chief:
        _show(result, config.workdir)
    return 0


def _show(result, workdir):
    from rich.console import Console
    from rich.table import Table

    table = Table(title="tfmulti.train", show_header=False)
    rate = result["examples_per_second"]
    accuracy = result["metrics"].get("val_accuracy")
    rows = {
        "strategy": result["strategy"],
        "replicas": f"{result['num_replicas']} on {result['num_workers']} worker(s)",
        "global batch size": result["global_batch_size"],
        "examples per second": f"{rate:,.0f}" if rate else "not measured",
        "validation accuracy": "not measured" if accuracy is None else f"{accuracy:.4f}",
        "model": f"{workdir}/model.keras" if workdir else "not kept: no --workdir",
        "curves": f"tensorboard --logdir {workdir}/logs" if workdir else "not kept: no --workdir",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    command_line.run_and_leave(main)
