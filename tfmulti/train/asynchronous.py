"""`train_async`: what `fit` does, under parameter servers."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf
from absl import logging

from tfmulti import callbacks as callbacks_lib
from tfmulti import keras_compat, marks
from tfmulti.cluster import environment
from tfmulti.data import distribute_eval, distribute_train
from tfmulti.data.epochs import EpochDataset
from tfmulti.parallel import remote_build, split_check
from tfmulti.parallel.remote_step import RemoteStep
from tfmulti.settings import check_type, check_whole_number
from tfmulti.step.rows import zeros_of
from tfmulti.strategies.checks import refuse_stateful
from tfmulti.strategies.fit_callbacks import FirstStepFile
from tfmulti.strategies.parameter_server import who_computes
from tfmulti.train.remote_runs import RemoteRuns, SettledRequests, summarize_staleness

_REFUSED = {
    keras.callbacks.BackupAndRestore: "It saves what `fit` holds. Use "
    "tfmulti.callbacks.Checkpoint.",
    callbacks_lib.Devices: "It compares workers that run `fit`. Leave it out.",
    callbacks_lib.ShardAuditLog: "Each batch goes to one worker, as it is. Leave it out.",
}


def train_async(
    model: keras.Model,
    data,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    validation_data=None,
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = (),
    seed: int = 0,
    max_staleness: int | None = None,
    verbose: int = 1,
    print_fn: Callable[[str], None] = logging.warning,
) -> keras.callbacks.History:
    """Trains a model on workers whose variables are on parameter servers, as `fit` would.

    The chief reads the examples in the order of `distribute_train`, and sends each batch to a
    worker, which computes the gradients with `train_step`. The chief applies them as they come.
    Each example is taken once in an epoch, and each step counts once, also if workers are lost
    and come back: the chief sends a step again until it has been computed, and applies it once.

    Args:
        model: A model, created and compiled in the scope of
            `create_strategy("parameter_server")`.
        data: As for `distribute_train`, or what it returned.
        batch_size: Examples of a step. With `max_staleness=0` all workers take a part of them,
            else one worker takes all. None if `data` came from `distribute_train`.
        epochs: The number of the last epoch; if training resumes, those before count.
        validation_data: As `data`; evaluated after each epoch.
        callbacks: Keras callbacks. Those that cannot work here are refused by name.
        seed: Seed of the order, as for `distribute_train`.
        max_staleness: The largest number of updates that others may make between reading weights
            and applying the gradient: a fast worker waits for a slow one. None for no bound; 0
            for synchronous steps, with the result of one device.
        verbose: 1 for Keras's progress bar, 2 for a line for each epoch, 0 for nothing.
        print_fn: Function of one line of text, for workers that go and come.

    Returns:
        Keras's history. Its logs also have `staleness_mean`, `staleness_p95` and `staleness_max`
        of each epoch's steps; `steps_by_worker` has the steps that each worker has computed.

    Raises:
        ValueError: For a model of another strategy, and for data or callbacks that cannot be used.
        RuntimeError: If a server or all workers are lost.

    Sources: Li et al., 2014, "Scaling Distributed Machine Learning with the Parameter Server"; Ho
    et al., 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server".
    """
    # As `fit`, which takes a single one or None, too.
    callbacks = keras.tree.flatten(callbacks or ())
    _check(model, callbacks, max_staleness, epochs)
    refuse_stateful(model)
    strategy = model.distribute_strategy
    train = _dataset(distribute_train, data, strategy, batch_size, seed=seed)
    test = None
    if validation_data is not None:
        size = train.plan.global_batch_size
        test = _dataset(distribute_eval, validation_data, strategy, size)
    strategy.requests = requests = SettledRequests()
    step = _steps_of(model, train, test, max_staleness)
    path = os.environ.get(environment.PROGRESS)
    chosen = keras.callbacks.CallbackList(
        [*([FirstStepFile(path)] if path else []), *callbacks],
        add_history=True,
        add_progbar=verbose != 0,
        model=model,
        epochs=epochs,
        steps=train.plan.steps_per_epoch,
        verbose=verbose,
    )
    for callback in chosen.callbacks:
        if hasattr(callback, "set_callbacks"):
            callback.set_callbacks(chosen.callbacks)
    with RemoteRuns(strategy, step, max_staleness, print_fn) as runs:
        requests.is_settled = lambda: not runs.under_way
        _Epochs(model, train, test, chosen, step, runs, requests).run(epochs)
    model.history.steps_by_worker = dict(sorted(runs.steps_by_worker.items()))
    return model.history


def _steps_of(model, train, test, max_staleness) -> RemoteStep:
    """Builds a model, and traces and checks its steps."""
    strategy = model.distribute_strategy

    @functools.cache
    def peek():
        # A training that has ended has no batch left.
        return iter(train).peek() if train.steps_left() else zeros_of(train.element_spec, 1)

    specs = [
        tf.nest.map_structure(keras_compat.without_rows, each.element_spec)
        for each in (train, test or train)
    ]
    count = train.plan.count(0, 0) if train.keeps_rows else None
    test_spec = None if test is None else specs[1]
    remote_build.build(model, specs[0], peek, num_rows=count, test_spec=test_spec)
    step = RemoteStep(model, *specs, who_computes)
    if train.steps_left():
        step.check_train()
    if test is not None:
        step.check_test("validation_data")
    splits = max_staleness == 0 and strategy.num_workers > 1
    if splits:
        split_check.refuse_synchronized(model)
    if strategy.verify != "never" and train.steps_left():
        split_check.check(step, peek(), splits, strategy.num_workers)
    return step


def _is_traced(iterator):
    """Stands for the function of `fit`, which `make_train_function(force=True)` replaces."""
    raise NotImplementedError


class _Epochs:
    """The epochs of one training, as the loop of `fit`."""

    def __init__(self, model, train, test, chosen, step, runs, requests):
        self._model, self._train, self._test = model, train, test
        self._callbacks, self._step, self._runs = chosen, step, runs
        self._requests = requests
        every = [getattr(callback, "every_steps", None) for callback in chosen.callbacks]
        self._every = [each for each in every if each]
        # Steps since training began, from which on no random numbers have been drawn.
        self._next = 0

    def run(self, epochs):
        model, logs = self._model, {}
        model.stop_training, model.train_function = False, _is_traced
        keras_compat.take_initial_epoch(model)
        marks.TRAINS_FROM.set(model, self._train)
        self._callbacks.on_train_begin()
        marks.TRAINS_FROM.set(model, None)
        for epoch in range(keras_compat.take_initial_epoch(model) or 0, epochs):
            model.reset_metrics()
            self._callbacks.on_epoch_begin(epoch)
            self._trace_again()
            logs = self._train_epoch(epoch)
            if self._test is not None:
                logs |= {f"val_{name}": value for name, value in self._evaluate().items()}
            self._callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if epochs > 0:
            # Puts moving averages of the weights in their place, as `fit` does.
            model.optimizer.finalize_variable_values(model.trainable_weights)
        model.train_function = None
        self._callbacks.on_train_end(logs)
        # A checkpoint has the generators as they were, and the number of the step.
        self._step.advance_seeds(self._next)

    def _trace_again(self):
        """Traces the step again after `make_train_function(force=True)` in a callback."""
        if self._model.train_function is None:
            raise ValueError(
                "`compile` must not be called during training. Received: "
                f"{self._model.name!r}, which a callback has compiled. Call train_async again, "
                "with initial values from the trained model."
            )
        if self._model.train_function is not _is_traced:
            self._model.train_function = _is_traced
            self._step.trace_again()

    def _train_epoch(self, epoch) -> dict:
        runs, plan = self._runs, self._train.plan
        runs.staleness = []
        # Those that a checkpoint has restored, or zeros.
        runs.metrics = [keras.ops.convert_to_numpy(v) for v in self._model.metrics_variables]
        done = plan.steps_per_epoch - self._train.steps_left()
        if done == plan.steps_per_epoch:
            self._train.end_pass()
            return self._step.results(runs.metrics) | (marks.LAST_LOGS.get(self._model) or {})
        self._batch = done
        first = epoch * plan.steps_per_epoch + done
        # Checkpoints count the steps of the run, not of the epoch.
        batches = self._train.train_pass()
        runs.train(batches, first, lambda sent: self._may_go_on(first + sent), self._calling_back)
        self._next = first - done + self._batch
        self._step.put_metrics(runs.metrics)
        logs = self._step.results(runs.metrics) | runs.logs
        return logs | summarize_staleness(runs.staleness)

    def _may_go_on(self, sent) -> bool:
        if self._model.stop_training:
            return False
        waits = self._requests.is_asked or any(sent % every == 0 for every in self._every)
        return not (waits and self._runs.under_way)

    @contextlib.contextmanager
    def _calling_back(self) -> Iterator[None]:
        """Calls callbacks before and after a step, which it surrounds."""
        self._callbacks.on_train_batch_begin(self._batch)
        yield
        if not self._runs.under_way and (self._requests.is_asked or self._every):
            # A checkpoint may copy them now.
            self._step.put_metrics(self._runs.metrics)
        logs = self._step.results(self._runs.metrics) | self._runs.logs
        if self._batch + 1 == self._train.plan.steps_per_epoch:
            # A checkpoint keeps the logs of the whole epoch.
            logs |= summarize_staleness(self._runs.staleness)
        self._callbacks.on_train_batch_end(self._batch, logs)
        self._batch += 1
        if self._model.train_function is not _is_traced and self._runs.under_way:
            raise ValueError(
                "With parameter servers a step can change only when an epoch begins. Received: "
                "`make_train_function` or `compile` in a callback within an epoch, while workers "
                "compute. Call it in `on_epoch_begin` or `on_epoch_end`."
            )

    def _evaluate(self) -> dict:
        self._callbacks.on_test_begin()
        metrics, others = self._runs.evaluate(self._test)
        logs = self._step.results(metrics, "test") | others
        self._callbacks.on_test_end(logs)
        return logs


def _check(model, callbacks, max_staleness, epochs):
    check_type("model", model, keras.Model, "a Keras model", "Pass a compiled model.")
    if not keras_compat.has_servers(model.distribute_strategy):
        raise ValueError(
            "`train_async` trains models that were created in the scope of parameter servers. "
            f"Received: {model.name!r}, of {type(model.distribute_strategy).__name__}. Create and "
            'compile it in the scope of create_strategy("parameter_server"), or call model.fit.'
        )
    if keras_compat.runs_eagerly(model):
        raise ValueError(
            "`train_async` sends steps to workers as graphs, which `run_eagerly` does not change. "
            f"Received: {model.name!r}, which runs eagerly. Compile it without run_eagerly=True "
            "(and leave out tf.config.run_functions_eagerly), or debug it on one device."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "`train_async` must be called outside of the strategy's scope; only variables are "
            f"created in it. Received: {model.name!r}, in a scope. Move the call out of `with "
            "strategy.scope():`."
        )
    advice = "Use 0 for synchronous steps, None for no bound."
    check_whole_number("max_staleness", max_staleness, advice, at_least=0, optional=True)
    check_whole_number("epochs", epochs, "Use for example epochs=3.")
    for callback in callbacks:
        advice = "Give a list of them."
        check_type("callbacks", callback, keras.callbacks.Callback, "Keras callbacks", advice)
        for kind, advice in _REFUSED.items():
            if isinstance(callback, kind):
                raise ValueError(
                    "`callbacks` must not depend on `fit`. "
                    f"Received: {type(callback).__name__}. {advice}"
                )


def _dataset(distribute, data, strategy, batch_size, **options) -> EpochDataset:
    if not isinstance(data, EpochDataset):
        if batch_size is None:
            raise ValueError(
                "`batch_size` is required unless `data` comes from distribute_train. Received: "
                f"batch_size=None, data of type {type(data).__name__}. Use for example "
                "batch_size=64."
            )
        data = distribute(data, strategy, batch_size, **options)
    strange = [s for s in tf.nest.flatten(data.element_spec) if not isinstance(s, tf.TensorSpec)]
    if strange:
        raise ValueError(
            "With parameter servers `data` must be dense: batches are cut by rows. "
            f"Received: {type(strange[0]).__name__}. Pad the rows to one length, or use the "
            "strategy multi_worker."
        )
    if data.plan.remainder == "pad":
        raise ValueError(
            "`remainder='pad'` cannot be used with parameter servers. Received: remainder='pad'. "
            "Use remainder='uneven' or 'drop'."
        )
    return data
