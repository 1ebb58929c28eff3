"""Copies the state of a training run to host memory, and restores it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfmulti import checkpoint, keras_compat, marks, topology
from tfmulti.checkpoint import (
    callback_states,
    generations,
    optimizers,
    own_variables,
    random_states,
)
from tfmulti.checkpoint.on_chief import on_chief
from tfmulti.step import accumulation, local_steps, model_contents, slots
from tfmulti.strategies import coordination

_PART_BYTES = 1 << 26


def take_snapshot(
    model: keras.Model,
    dataset,
    callbacks: Sequence,
    epoch: int,
    step: int,
    *,
    begun: bool,
    within_epoch: bool,
) -> tuple[dict[str, np.ndarray], dict]:
    """Copies a run's state to host memory.

    Every worker must call it: reading a metric that is summed over replicas is a collective.

    Args:
        model: The model.
        dataset: The result of `distribute_train`, or None.
        callbacks: The callbacks of this `fit`.
        epoch: The epoch in which training will resume.
        step: Steps since the run began.
        begun: Whether the callbacks' `on_epoch_begin` has run for this epoch.
        within_epoch: Whether steps of this epoch were taken; only then metrics' states matter.

    Returns:
        The values of variables and arrays, by name; and everything else, as JSON.
    """
    local_steps.average_weights(model)
    accumulation.settle(model, model_contents.optimizers_of(model, nested=True))
    variables = named_variables(model, callbacks)
    if within_epoch:
        variables |= metric_variables(model)
    tensors, writes = {}, topology.is_chief(model.distribute_strategy)
    for name, variable in variables.items():
        value = _value_of(variable)
        # Sharded variables are copied whole on the chief only, which writes them.
        if writes or not _may_be_elsewhere(variable) or getattr(variable, "has_whole", True):
            tensors[name] = value
    remembered, best_weights = callback_states.take(callbacks)
    return tensors | best_weights, {
        "callbacks": remembered,
        **random_states.take(model),
        **optimizers.describe(model),
        "epoch": epoch,
        "step": step,
        "begun": begun,
        "position": _position_of(dataset, within_epoch),
        "num_replicas": model.distribute_strategy.num_replicas_in_sync,
        "num_servers": _num_servers(model),
        "data": _order_of(dataset),
        "history": history_of(model, epoch if within_epoch else None),
        "stopped_early": stopped_early(model, callbacks),
    }


def plain_logs(logs: dict) -> dict:
    """Returns the numbers and arrays of a step's logs, as JSON."""
    plain = {name: np.asarray(value).tolist() for name, value in logs.items()}
    return {name: value for name, value in plain.items() if callback_states.is_json(value)}


def history_of(model: keras.Model, epoch: int | None) -> dict:
    """Returns what `fit` has recorded, as JSON; without an epoch that is not over."""
    epochs, logs = model.history.epoch, model.history.history.items()
    count = sum(each != epoch for each in epochs)
    return {
        "epoch": list(epochs[:count]),
        "values": {name: np.asarray(values[:count]).tolist() for name, values in logs},
    }


def stopped_early(model: keras.Model, callbacks: Sequence) -> bool:
    """Returns whether `EarlyStopping` has ended this `fit`; it sets the epoch in which it did."""
    stops = getattr(model, "stop_training", False)
    return stops and any(each.stopped_epoch > 0 for each in _early_stopping(callbacks))


def go_on(callbacks: Sequence) -> None:
    """Makes `EarlyStopping`, which had ended the run, forget it, now that the run goes on."""
    for callback in _early_stopping(callbacks):
        callback.stopped_epoch = 0


def _early_stopping(callbacks) -> list:
    return [each for each in callbacks if isinstance(each, keras.callbacks.EarlyStopping)]


def _position_of(dataset, within_epoch) -> list[int] | None:
    if dataset is None:
        return None
    number, done = dataset.position
    return [number, done] if within_epoch else [number + (done > 0), 0]


def _order_of(dataset) -> dict | None:
    return None if dataset is None else dataset.order


def _may_be_elsewhere(variable) -> bool:
    """Whether one worker keeps a variable's value, as of sharded state or a sharded weight."""
    # On a `tf.Variable` of a strategy `hasattr` falls through to its value, maybe by a collective.
    return isinstance(variable, keras.Variable) and hasattr(variable, "is_here")


def _is_here(variable) -> bool:
    """Whether a variable's value is on this worker."""
    return not _may_be_elsewhere(variable) or variable.is_here


def _value_of(variable) -> np.ndarray:
    if not isinstance(variable, keras.Variable):
        return np.array(variable.numpy())
    if _may_be_elsewhere(variable):
        with slots.collective_reads():
            return variable.numpy()
    return np.asarray(keras.ops.convert_to_numpy(variable))


def named_variables(
    model: keras.Model, callbacks: Sequence = ()
) -> dict[str, keras.Variable | tf.Variable]:
    """Returns a model's, its optimizers' and its objects' variables by names that do not change.

    Args:
        model: The model.
        callbacks: Callbacks, whose variables are returned too.
    """
    named = {f"model/{i:06d}": v for i, v in enumerate(model.variables)}
    skip = {id(v) for v in model.metrics_variables}
    named = {name: v for name, v in named.items() if id(v) not in skip}
    seen: set[int] = set()
    for number, optimizer in enumerate(model_contents.optimizers_of(model, nested=True)):
        for index, variable in enumerate(optimizer.variables):
            if id(variable) not in seen:
                named[f"optimizer/{number}/{index:06d}"] = variable
        # An outer optimizer may also list the variables of its inner optimizer.
        seen |= {id(variable) for variable in optimizer.variables}
    return named | own_variables.own_variables(model, named.values(), callbacks)


def metric_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states of a model's metrics by names that do not change."""
    return {f"metric/{i:06d}": v for i, v in enumerate(model.metrics_variables)}


def _put_back(state: dict, tensors: dict, model: keras.Model, callbacks: Sequence) -> None:
    """Restores a run's state, except metrics' states, since Keras resets them."""
    for name, variable in named_variables(model, callbacks).items():
        if _is_here(variable) and name in tensors:
            variable.assign(tensors[name])
        if isinstance(variable, keras.Variable):
            # Assigned on its owner alone; workers must agree on which values they have kept.
            slots.forget_kept(variable)
    callback_states.restore(state["callbacks"], tensors, callbacks)
    random_states.put_back(state, model)


def _num_servers(model) -> int:
    return getattr(model.distribute_strategy, "num_servers", 0)


def _compare(generation, variables, num_servers):
    kept = generation.tensors
    mine = {name: _kind_of(variable) for name, variable in variables.items()}
    needed = {n for n in kept.keys() | mine.keys() if n.startswith(("model/", "optimizer/"))}
    needed |= kept.keys() & mine.keys()
    differing = sorted(n for n in needed if not _is_alike(kept.get(n), mine.get(n)))
    before = generation.state.get("num_servers", num_servers)
    if differing and before != num_servers:
        raise generations.CheckpointError(
            "A run whose embeddings are partitioned must resume with the same number of parameter "
            f"servers. Received: {num_servers} servers, and {before} in {generation.path}. "
            f"Start {before} servers (--num_ps {before}), or give another folder."
        )
    if differing:
        name = differing[0]
        variable = variables.get(name)
        path = variable.path if isinstance(variable, keras.Variable) else name
        raise generations.CheckpointError(
            "A checkpoint must be of the same model and optimizer. "
            f"Received: {path} is {kept.get(name, 'not there')} in {generation.path}, "
            f"{mine.get(name, 'not there')} in this run. "
            "Train the same model, or give another folder."
        )


def _kind_of(variable) -> list:
    """Returns a variable's dtype and shape, as `Generation.tensors` has them."""
    shape = tf.TensorShape(variable.shape)
    return [tf.as_dtype(variable.dtype).name, None if shape.rank is None else shape.as_list()]


def _is_alike(kept, mine) -> bool:
    """Whether a variable can take a value; that of TensorFlow may have axes of any size."""
    if kept is None or mine is None or kept[0] != mine[0]:
        return False
    return tf.TensorShape(mine[1]).is_compatible_with(kept[1])


class Resumed:
    """A restored state, except the part that Keras and callbacks change when an epoch begins."""

    def __init__(self, state: dict, tensors: dict[str, tf.Tensor]):
        self.state, self._tensors = state, tensors

    def first_epoch(self, epochs: int, folder: Path, print_fn: Callable[[str], None]) -> int:
        """Returns the epoch in which training resumes; the last one's end if it had ended.

        Args:
            epochs: How many the run is to have.
            folder: The folder of its checkpoints, for messages.
            print_fn: Function of one line of text.

        Raises:
            CheckpointError: If the run has trained longer: it would count as finished.
        """
        if self.state.get("stopped_early") and epochs <= self.state["epochs"]:
            print_fn(
                f"EarlyStopping ended this run after epoch {self.state['epoch']}; "
                "nothing is trained. To continue, ask for more epochs"
            )
            return epochs
        begun = self.state["epoch"] + bool((self.state["position"] or [0, 0])[1])
        if epochs < begun:
            raise generations.CheckpointError(
                "A run must resume with at least as many epochs as it has begun. "
                f"Received: epochs={epochs}, and {begun} epochs in the checkpoint of {folder}. "
                "Ask for more epochs, or give another folder."
            )
        return self.state["epoch"]

    def finish(self, model: keras.Model, callbacks: Sequence) -> None:
        """Restores the metrics and the history; called when the first epoch has begun.

        Callbacks may have changed state when the epoch began, such as a schedule that halves the
        rate. They had done so before the checkpoint too, so that state is restored as well.
        """
        keras_compat.set_initial_epoch(model, None)
        marks.LAST_LOGS.set(model, self.state.get("last_logs"))
        if self.state.get("begun"):
            _put_back(self.state, self._tensors, model, callbacks)
        for name, variable in metric_variables(model).items():
            if name in self._tensors:
                variable.assign(self._tensors[name])
        model.history.epoch[:] = self.state["history"]["epoch"]
        model.history.history.update(self.state["history"]["values"])


def resume(
    folder: Path, model: keras.Model, dataset, callbacks: Sequence, print_fn: Callable[[str], None]
) -> Resumed | None:
    """Restores the chief's latest intact checkpoint on every worker; None without one.

    Args:
        folder: The folder of the checkpoints.
        model: A model of the same layers, built, with its optimizers.
        dataset: The result of `distribute_train`, or None.
        callbacks: The callbacks of this `fit`; those of one class in the same order.
        print_fn: Function of one line of text.

    Raises:
        CheckpointError: If the model, an optimizer or the data differ, or no checkpoint of the
            folder can be read.
    """
    strategy = model.distribute_strategy
    with tempfile.TemporaryDirectory() as copies:
        generation = _from_chief(folder, strategy, Path(copies), print_fn)
        if generation is None:
            return None
        state = generation.state
        _check_data(state["data"], _order_of(dataset))
        optimizers.check_classes(state, model)
        optimizers.build(state, model)
        variables = named_variables(model, callbacks)
        _compare(generation, variables, _num_servers(model))
        # The state is the chief's, whose part of a model that is divided has the same variables.
        on_chief(strategy, lambda: optimizers.check_updated(state, model))
        skip = {name for name, variable in variables.items() if not _is_here(variable)}
        tensors = generations.load(generation, skip)
    rates = optimizers.rates_of(model)
    _put_back(state, tensors, model, callbacks)
    if dataset is not None and state["position"] is not None:
        dataset.set_position(*state["position"])
    print_fn(f"resumed at step {state['step']}, epoch {state['epoch']}, from {folder}")
    own_variables.report_others(generation.tensors, variables, print_fn)
    optimizers.report_rates(state.get("first_rates", rates), rates, model, print_fn)
    callback_states.report_unused(state["callbacks"], callbacks, print_fn)
    callback_states.report_changed(state.get("unsaved", ()), print_fn)
    if state["num_replicas"] != strategy.num_replicas_in_sync:
        _report_differences(model, state["num_replicas"], strategy, print_fn)
    return Resumed(state, tensors)


def _from_chief(folder, strategy, copies: Path, print_fn) -> generations.Generation | None:
    chief, several = topology.is_chief(strategy), topology.num_workers(strategy) > 1

    found = on_chief(strategy, lambda: generations.latest_good(folder, print_fn))
    if not several or not coordination.any_worker(strategy, found is not None):
        return found
    copy = copies / checkpoint.name_of(0)
    copy.mkdir()
    for name in generations.FILES:
        _copy_from_chief(strategy, None if found is None else found.path / name, copy / name)
    return found if chief else generations.latest_good(copies, print_fn)


def _copy_from_chief(strategy, path, copy):
    """Writes the chief's file at `path` to `copy` on the other workers, part by part."""
    chief = topology.is_chief(strategy)
    with on_chief(strategy, lambda: open(path, "rb")) or open(copy, "wb") as file:
        # A checkpoint may be larger than the memory that training leaves.
        read = lambda: file.read(_PART_BYTES)
        while data := coordination.broadcast(strategy, on_chief(strategy, read)):
            if not chief:
                file.write(data)


def _report_differences(model, before, strategy, print_fn):
    causes = []
    if keras_compat.local_statistics(model):
        causes.append("unsynchronized batch normalization")
    if keras_compat.random_layers(model):
        causes.append("random streams, one for each replica")
    now = strategy.num_replicas_in_sync
    if causes:
        print_fn(
            f"resuming on {now} replicas a run that was saved on {before}: the result will not be "
            f"identical, because of {', '.join(causes)}"
        )


def _check_data(before, now):
    differing = [n for n in before or {} if now is not None and before[n] != now[n]]
    if differing:
        name = differing[0]
        raise generations.CheckpointError(
            "A run must resume with the same data in the same order. "
            f"Received: {name}={now[name]}, and {before[name]} in the checkpoint. "
            "Use the value of the checkpoint, or another folder."
        )
