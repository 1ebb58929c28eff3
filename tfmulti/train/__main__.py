"""The command line: `python -m tfmulti.train`.

Imports no TensorFlow until the flags and the cluster have been checked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

from tfmulti import checkpoint, cluster, rendezvous
from tfmulti.cluster import environment
from tfmulti.runtime import command_line, console, files, processes
from tfmulti.train import techniques
from tfmulti.train.config import TrainConfig

USAGE = "python -m tfmulti.train [flags]: trains a Keras 3 model on every device of this job."
_print_line = functools.partial(print, flush=True)
# This process's task, once it is known: the program may leave the folder in which its file was.
_known_task: list[cluster.Cluster | None] = []


def main(argv: list[str] | None = None) -> int:
    """Parses the flags, trains, and shows a table. Returns the exit code."""
    argv = sys.argv if argv is None else argv
    config, values, code = command_line.read_command_line(
        TrainConfig, argv, USAGE, has_verbose=True
    )
    if code is not None:
        return code
    _known_task.clear()
    try:
        return _train(config, values.verbose)
    except Exception as error:
        return _end(error, config, values.traceback)
    except KeyboardInterrupt:
        return _end_interrupted(config)
    except SystemExit as error:
        # The user's code, such as that of a dataset; a run that is preempted ends on all workers.
        if type(error) is SystemExit:
            _end_servers(error)
            _end_worker(RuntimeError(f"sys.exit({error.code!r})"))
        raise


def _end_interrupted(config) -> int:
    """Prints what was saved, and reports to the other workers why this one ends."""
    print("Interrupted: finishing the current write.", file=sys.stderr, flush=True)
    _end_servers(KeyboardInterrupt())
    _end_worker(RuntimeError("interrupted by Ctrl-C"))
    processes.wait_for_threads()
    folder = Path(config.workdir) / checkpoint.FOLDER if config.workdir else None
    saved = checkpoint.saved_in(folder) if folder else {}
    why = "no epoch had ended" if config.workdir else "no --workdir"
    text = f"Nothing was saved: {why}."
    if saved:
        how = "The same command" if config.resume == "auto" else "It with --resume auto"
        text = f"Saved: step {max(saved)}, in {folder}. {how} resumes from there."
    print(text, file=sys.stderr)
    return command_line.INTERRUPTED


def _find_task(config):
    servers = config.strategy != "multi_worker"
    task = cluster.resolve_cluster(config.tf_config, servers=servers, num_ps=config.num_ps)
    _known_task[:] = [task]
    return task


def _refuse_servers(config):
    """Raises ValueError for a job with parameter servers and a strategy that leaves them idle."""
    found, given = None, os.environ.get("TF_CONFIG")
    # What else it has does not matter to such a strategy.
    with contextlib.suppress(cluster.ClusterError):
        environ = {"TF_CONFIG": given} if given else {}
        found = cluster.resolve_cluster(environ=environ, servers=True, check_network=False)
    if found is not None and found.has_servers:
        raise ValueError(
            "A job with parameter servers needs --strategy parameter_server, or auto. Received: "
            f"strategy={config.strategy!r}, and a TF_CONFIG with parameter servers. "
            "Use --strategy parameter_server, or start the workers without --num_ps."
        )


def _end_worker(error):
    """Reports an error to the other workers of `multi_worker`, once TensorFlow is there.

    Returns the `PeerError` by which this one ends, or None.
    """
    task = next(iter(_known_task), None)
    if "tensorflow" not in sys.modules or task is None or task.has_servers:
        return None
    from tfmulti.strategies.multi_worker import end_worker

    return end_worker(error, task)


def _end_servers(error) -> int | None:
    """Returns the exit code of the chief of parameter servers; None in another process."""
    if "tfmulti.strategies.parameter_server" not in sys.modules:
        return None
    from tfmulti.strategies import parameter_server

    return parameter_server.end_chief(error)


def _end(error, config, with_traceback) -> int:
    """Prints the error, reports it to the others if it is local, and returns the exit code."""
    code = _end_servers(error)
    if code is not None:
        command_line.show_error(error, with_traceback)
        return code
    peer = _end_worker(error)
    command_line.show_error(error, with_traceback, None if peer is None else peer.text)
    if isinstance(error, rendezvous.WorkersMissingError) and _has_begun_before(config):
        # They ran with the same settings before: a scheduler may give them their places late.
        return environment.PEER_LOST
    return command_line.ERROR if peer is None else peer.exit_code


def _has_begun_before(config) -> bool:
    if environment.count_restarts(os.environ):
        return True
    return bool(config.workdir and checkpoint.saved_in(Path(config.workdir) / checkpoint.FOLDER))


def _train(config: TrainConfig, verbose: bool) -> int:
    task = None
    # A value that is no number is told now, and not once the model has been trained.
    environment.count_restarts(os.environ)
    if config.strategy in ("auto", "multi_worker", "parameter_server"):
        task = _find_task(config)
        if task is not None and task.has_servers:
            config.check_with_servers()
    else:
        _refuse_servers(config)
    if config.estimate_memory is None and not getattr(task, "has_servers", False):
        num_workers = 1 if task is None else task.num_workers
        config = techniques.with_stages_placed(config, num_workers)
    has_folder = config.workdir and (task is None or task.is_chief)
    if has_folder:
        files.check_folder("workdir", config.workdir)
        if os.path.lexists(checkpoints := Path(config.workdir) / checkpoint.FOLDER):
            # Another user's, or one of another file system.
            files.check_folder("workdir", checkpoints)
        if not environment.count_restarts(os.environ):
            (Path(config.workdir) / checkpoint.FINISHED).unlink(missing_ok=True)
    command_line.import_tensorflow(verbose=verbose)
    if config.estimate_memory is not None:
        from tfmulti.train import memory_estimate

        # One process estimates for all workers: it is not warned of training alone.
        os.environ.pop("TF_CONFIG", None)
        memory_estimate.show(config)
        return 0
    from tfmulti.checkpoint import folder_lock, generations
    from tfmulti.train.loop import train_and_evaluate

    if has_folder and not config.resumes():
        folder = Path(config.workdir) / checkpoint.FOLDER
        # Until the process ends: another run, which is training, keeps its checkpoints.
        folder_lock.FolderLock(_print_line).take(folder, removes=True)
        # However this start ends, the next one takes what is there for its own.
        generations.remove_all(folder)
    result = train_and_evaluate(config, print_fn=_print_line)
    if task is None or task.is_chief:
        _show(result, config.workdir)
    return 0


def _show(result, workdir):
    from tfmulti.callbacks.progress import show_value

    metrics, rate = result["metrics"], result["examples_per_second"]
    # Keras sorts them by name.
    names = sorted(metrics, key=lambda name: name.removeprefix("val_") != "loss")
    words = {name: name.replace("val_", "validation ").replace("_", " ") for name in names}
    workers = console.count(result["num_workers"], "worker")
    rows = {
        "strategy": result["strategy"],
        "replicas": f"{result['num_replicas']} on {workers}",
        "global batch size": result["global_batch_size"],
        **_show_steps(result),
        "examples per second": f"{rate:,.0f}" if rate else "not measured",
        **{words[name]: show_value(metrics[name]) for name in names},
        "model": f"{workdir}/model.keras" if workdir else "not kept: no --workdir",
        "curves": f"tensorboard --logdir {workdir}/logs" if workdir else "not kept: no --workdir",
    }
    console.show_rows(rows, _print_line, "tfmulti.train")


def _show_steps(result) -> dict:
    steps, before, restarts = (result[name] for name in ("steps", "resumed_step", "restarts"))
    text = f"{steps - before:,} in {result['seconds']:,.1f} s"
    if before or restarts:
        text = f"{steps:,}, of which {text} since the last start"
    return {"steps": text} | ({"restarts": restarts} if restarts else {})


if __name__ == "__main__":
    command_line.run_and_exit(main)
