"""The parts of `Checkpoint`: copies, writes and restores the state of a run."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from tfmulti import checkpoint, keras_compat, topology
from tfmulti.checkpoint import generations
from tfmulti.checkpoint.state import Snapshot, metric_variables, put_back, restore, take_snapshot
from tfmulti.runtime import command_line
from tfmulti.settings import check_whole_number
from tfmulti.strategies import coordination


@dataclasses.dataclass(frozen=True)
class Run:
    """The objects of one `fit`.

    Attributes:
        model: The model.
        dataset: The result of `distribute_train`, or None.
        callbacks: All callbacks of this `fit`.
    """

    model: keras.Model
    dataset: object
    callbacks: Sequence


def check_arguments(dataset, every_steps, every_minutes, keep) -> None:
    """Raises ValueError for invalid arguments of `Checkpoint`."""
    for name, value in (("every_steps", every_steps), ("keep", keep)):
        check_whole_number(name, value, "Use a larger number.", optional=True)
    if every_minutes is not None and every_minutes <= 0:
        raise ValueError(
            "`every_minutes` must be above 0. "
            f"Received: every_minutes={every_minutes}. Use for example 10."
        )
    if dataset is None and (every_steps or every_minutes):
        raise ValueError(
            "`every_steps` and `every_minutes` need `dataset`, which knows its position. "
            "Received: dataset=None. Give the result of distribute_train."
        )


def check_steps(dataset, steps: int | None) -> None:
    """Raises ValueError if the epochs of `fit` differ from those of the data."""
    if dataset is not None and steps != dataset.plan.steps_per_epoch:
        raise ValueError(
            "`fit` must run whole epochs of `dataset`, or the position in it is unknown. "
            f"Received: {steps} steps, and {dataset.plan.steps_per_epoch} per epoch of the data. "
            "Give steps_per_epoch to distribute_train instead."
        )


def _order_of(dataset) -> dict | None:
    return None if dataset is None else dataset.order


def _check_data(before, now):
    differing = [n for n in before or {} if now is not None and before[n] != now[n]]
    if differing:
        name = differing[0]
        raise generations.CheckpointError(
            "A run must resume with the same data in the same order. "
            f"Received: {name}={now[name]}, and {before[name]} in the checkpoint. "
            "Give the same, or start again in another folder."
        )


def is_within_fit(frame, model: keras.Model) -> bool:
    """Whether a frame of the main thread is within `fit`, or `train_async`, of a model."""
    while frame is not None:
        name, names = frame.f_code.co_name, frame.f_locals
        if name == "fit" and names.get("self") is model:
            return True
        if name == "train_async" and names.get("model") is model:
            return True
        frame = frame.f_back
    return False


def steps_done(dataset) -> int:
    """Returns the steps of the present epoch that were taken before this `fit`."""
    return dataset.plan.steps_per_epoch - dataset.steps_left()


def take(run: Run, epoch: int, step: int, strategy, *, begun: bool, within_epoch: bool) -> Snapshot:
    """Copies a run's state to the host; every worker must call it.

    Args:
        run: The objects of this `fit`.
        epoch: The epoch in which training will resume.
        step: Steps since the run began.
        strategy: The strategy.
        begun: Whether the callbacks' `on_epoch_begin` has run for this epoch.
        within_epoch: Whether steps of this epoch were taken.
    """
    snapshot = take_snapshot(run.model, run.callbacks, metrics=within_epoch)
    position = None
    if run.dataset is not None:
        number, done = run.dataset.position
        position = [number, done] if within_epoch else [number + (done > 0), 0]
    history = run.model.history
    values = {n: [float(v) for v in values] for n, values in history.history.items()}
    state = {
        "epoch": epoch,
        "step": step,
        "begun": begun,
        "position": position,
        "num_replicas": strategy.num_replicas_in_sync,
        "data": _order_of(run.dataset),
        "history": {"epoch": list(history.epoch), "values": values},
    }
    return Snapshot(snapshot.tensors, {**snapshot.state, **state})


class Writer:
    """Writes snapshots in a thread, one at a time, and remembers whether the last one failed."""

    def __init__(self, print_fn: Callable[[str], None]):
        self._print_fn, self._thread, self._error = print_fn, None, None

    def write(self, folder: Path, number: int, snapshot: Snapshot, keep: int) -> None:
        """Starts a write, after the previous one has ended."""
        self.finish()
        self._thread = threading.Thread(
            target=self._work,
            args=(folder, number, snapshot, keep),
            name=f"{command_line.OWN_THREADS}: checkpoint",
        )
        self._thread.start()

    def _work(self, folder, number, snapshot, keep):
        try:
            generations.write(folder, number, snapshot.tensors, snapshot.state, keep)
            self._error = None
        except generations.CheckpointError as error:
            self._error = error
            self._print_fn(f"checkpoint of step {number} not written: {error}")

    def finish(self) -> generations.CheckpointError | None:
        """Waits for the current write; returns the error of the last one, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error


class Resumed:
    """A restored state, except the part that Keras and callbacks change when an epoch begins."""

    def __init__(self, state: dict, tensors: dict[str, tf.Tensor]):
        self.state, self._tensors = state, tensors

    def finish(self, run: Run) -> None:
        """Restores the metrics and the history; called when the first epoch has begun.

        Callbacks may have changed state when the epoch began, such as a schedule that halves the
        rate. They had done so before the checkpoint too, so that state is restored as well.
        """
        keras_compat.set_initial_epoch(run.model, None)
        if self.state.get("begun"):
            put_back(self.state, self._tensors, run.model, run.callbacks)
        for name, variable in metric_variables(run.model).items():
            if name in self._tensors:
                variable.assign(self._tensors[name])
        run.model.history.epoch[:] = self.state["history"]["epoch"]
        run.model.history.history.update(self.state["history"]["values"])


def resume(folder: Path, strategy, run: Run, print_fn: Callable[[str], None]) -> Resumed | None:
    """Restores the chief's latest intact checkpoint on every worker."""
    with tempfile.TemporaryDirectory() as copies:
        generation = _from_chief(folder, strategy, Path(copies), print_fn)
        if generation is None:
            return None
        _check_data(generation.state["data"], _order_of(run.dataset))
        tensors = restore(generation, run.model, run.callbacks)
    state = generation.state
    if run.dataset is not None and state["position"] is not None:
        run.dataset.set_position(*state["position"])
    print_fn(f"resumed at step {state['step']}, epoch {state['epoch']}, from {folder}")
    if state["num_replicas"] != strategy.num_replicas_in_sync:
        _report_differences(run.model, state["num_replicas"], strategy, print_fn)
    return Resumed(state, tensors)


def _from_chief(folder, strategy, copies: Path, print_fn) -> generations.Generation | None:
    chief = topology.is_chief(strategy)
    found = generations.latest_good(folder, print_fn) if chief else None
    if topology.num_workers(strategy) == 1:
        return found
    names = generations.FILES
    for name in names:
        data = (found.path / name).read_bytes() if found is not None else b""
        data = coordination.broadcast(strategy, data if chief else None)
        if not data:
            return None
        if not chief:
            copy = copies / checkpoint.name_of(0)
            copy.mkdir(exist_ok=True)
            (copy / name).write_bytes(data)
    return found if chief else generations.latest_good(copies, print_fn)


def _report_differences(model, before, strategy, print_fn):
    causes = []
    if keras_compat.local_statistics(model):
        causes.append("unsynchronized batch normalization")
    if keras_compat.random_layers(model):
        causes.append("random streams, one for each replica")
    now = strategy.num_replicas_in_sync
    if causes:
        print_fn(
            f"resuming with {now} replicas after {before}: not the same, due to {', '.join(causes)}"
        )
