"""Checkpoints from which training resumes bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import keras
from absl import logging

from tfmulti import keras_compat, marks, topology
from tfmulti.callbacks.throughput import check_dataset, steps_before, steps_done
from tfmulti.checkpoint import callback_states, checks, generations, optimizers, state
from tfmulti.checkpoint.folder_lock import FolderLock
from tfmulti.checkpoint.on_chief import on_chief
from tfmulti.cluster import environment
from tfmulti.runtime import files, processes
from tfmulti.settings import check_whole_number
from tfmulti.strategies import coordination, program_order
from tfmulti.strategies.coordination import requests_of

# systemd signals each process of a job, and the launcher and its supervisor pass theirs on:
# signals within so many seconds are one request.
_SAME_REQUEST_S = 2.0


class Preempted(SystemExit):
    """Training has stopped after SIGTERM and a checkpoint; the exit code is 143."""

    def __init__(self):
        super().__init__(environment.PREEMPTED)
        processes.end_process_at_exit(environment.PREEMPTED)


class Checkpoint(keras.callbacks.Callback):
    """Saves checkpoints, and resumes from the latest one when `fit` begins.

    A checkpoint has the model, the optimizer, other variables that the model or a callback holds or
    a loss reads, random states, the position in the data, the history, and the state of callbacks
    that stop training or lower the rate, and of those with `state_dict` and `load_state_dict`. Pass
    the callback on every worker, last in the list: all take part in reading the state; the chief
    writes in the background, atomically and with checksums. Resuming needs the folder on the chief
    only. After SIGTERM to any worker, all save the same step and exit with 143.

    Args:
        folder: The folder of the checkpoints.
        dataset: The result of `distribute_train` that `fit` trains from. Without it, where `fit`
            trains from other data, checkpoints are saved only between epochs.
        every_steps: Steps between checkpoints; None for none within an epoch.
        every_minutes: Minutes between checkpoints, by the chief's clock; None for none.
        keep: Number of checkpoints to keep; None for all.
        resume: Whether to resume from the folder; if not, its checkpoints are removed.
        print_fn: Function of one line of text; by default these are warnings of absl's log.
        clock: Returns seconds.

    Attributes:
        saved: The steps, counted since the run began, that this `fit` has saved.
        resumed_step: Steps of the run before this `fit`.
        resumed_position: The position in the data then, (epoch, step); None if unknown.
        resumed_rate: The learning rate with which that run had begun; None if there is none.
        every_steps: Steps between checkpoints; None for none within an epoch.

    Raises:
        ValueError: For invalid numbers, or checkpoints within an epoch without `dataset`; when
            `fit` begins, if it trains from a result of `distribute_train` that was not given.

    Example:
    >>> callback = Checkpoint("runs/checkpoints")
    >>> callback.saved
    []
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        dataset=None,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int | None = 2,
        resume: bool = True,
        print_fn: Callable[[str], None] = logging.warning,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        # On the chief alone it would wait for the others, which train.
        marks.ON_ALL_WORKERS.set(self, True)
        _check_arguments(dataset, every_steps, every_minutes, keep)
        files.check_local("folder", folder)
        self._folder, self._dataset = Path(folder), dataset
        self.every_steps, self._every_minutes = every_steps, every_minutes
        self._keep, self._resume, self._print_fn, self._clock = keep, resume, print_fn, clock
        self._callbacks, self._writer = (), generations.Writer(print_fn)
        self._previous_handler, self._lock = None, FolderLock(print_fn)
        self._begin_anew()

    def _begin_anew(self):
        """Forgets an earlier `fit`; if that failed, a checkpoint may still be being written."""
        self._writer.finish()
        self._writer = generations.Writer(self._print_fn)
        self._epoch, self._step, self._unsaved = 0, 0, False
        self._resumed = self._copied = self._signalled_at = self._logs = None
        self.saved: list[int] = []
        self.resumed_step, self.resumed_position, self.resumed_rate = 0, None, None

    def on_train_begin(self, logs=None):
        """Restores the latest intact checkpoint, if there is one."""
        self._begin_anew()
        self._strategy = self.model.distribute_strategy
        self._requests = requests_of(self._strategy)
        self._requests.reset()
        marks.KEEPS_WHOLE_SUMS.set(self.model, True)
        checks.check_given(self._dataset, self.model)
        checks.check_model(self._dataset, self.model)
        checks.check_steps(self._dataset, self.params.get("steps"))
        self._last_time = self._clock()
        self._take_sigterm()
        self._first_rates = optimizers.rates_of(self.model)
        on_chief(self._strategy, self._take_folder)
        self._first_numbers = callback_states.numbers_of(self._callbacks)
        if self._resume:
            self._resumed = state.resume(
                self._folder, self.model, self._dataset, self._callbacks, self._print_fn
            )
        if self._resumed is not None:
            self._step = self.resumed_step = self._resumed.state["step"]
            self.resumed_position = self._resumed.state["position"]
            self._first_rates = self._resumed.state.get("first_rates", self._first_rates)
            self.resumed_rate = next((rate for rate in self._first_rates if rate is not None), None)
            epoch = self._resumed.first_epoch(self.params["epochs"], self._folder, self._print_fn)
            keras_compat.set_initial_epoch(self.model, epoch)

    def _take_folder(self):
        self._lock.take(self._folder, removes=not self._resume)
        # Without this, the first checkpoint would tell, maybe after hours.
        generations.check_folder(self._folder)
        if not self._resume:
            # Of an earlier run; with larger numbers they would count as later than this run's.
            generations.remove_all(self._folder)

    def set_callbacks(self, callbacks):
        """Receives all callbacks of this `fit`, whose state is saved too."""
        self._callbacks = callbacks

    def _take_sigterm(self):
        if threading.current_thread() is not threading.main_thread():
            self._previous_handler = None
        # After a `fit` that failed it is still this one's, and the one before it is known.
        elif signal.getsignal(signal.SIGTERM) != self._on_sigterm:
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number, frame):
        now = time.monotonic()
        if self._signalled_at is None and _is_within_fit(frame, self.model):
            self._signalled_at = now
            self._requests.ask("stop")
            return
        # Within fit, signals that come together are one request.
        if self._signalled_at is None or now - self._signalled_at >= _SAME_REQUEST_S:
            # A second SIGTERM, or one after an exception has ended `fit`, ends the process.
            signal.signal(signal.SIGTERM, self._previous_handler)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_begin(self, epoch, logs=None):
        """Saves the state after the previous epoch and all its callbacks."""
        if self._resumed is not None:
            self._resumed.finish(self.model, self._callbacks)
            state.go_on(self._callbacks)
            self._resumed = None
            # The end of the epoch is still to come.
            self._unsaved = self._is_at_last_step()
        elif self._unsaved:
            self._save(epoch, begun=True)
        else:
            # A `state_dict` that cannot be saved raises now, and not hours later.
            callback_states.take(self._callbacks)
        self._epoch, self._last_batch = epoch, steps_before(self._dataset) - 1
        self._began = None if self._dataset is None else self._dataset.position
        self._copied = None
        # A request that came after the last step, as while validating, has reached no worker yet.
        self._requests.agree_to_stop(self._strategy)
        # The state between two epochs is whole without a dataset, too.
        self._stop_if_requested()

    def on_train_batch_begin(self, batch, logs=None):
        """Sends this worker's requests to the others with the next step."""
        if self._is_time():
            self._requests.ask("save")
        self._requests.send()

    def on_train_batch_end(self, batch, logs=None):
        """Saves if it is time, and ends if all workers have agreed to stop."""
        last = steps_done(self.params, batch) - 1
        done, self._last_batch, self._logs = last - self._last_batch, last, logs
        before, self._step = self._step, self._step + done
        self._unsaved = True
        has_requests = self._requests.receive()
        if self._end_by_nan(logs) or self._dataset is None:
            return
        checks.check_moved(self._dataset, self._began)
        every = self.every_steps
        due = every is not None and before // every != self._step // every
        # Before validation resets the metrics of an epoch that is not over; under parameter
        # servers there are steps under way, which are applied first.
        may_stop = self._is_within_epoch() and not keras_compat.has_servers(self._strategy)
        stops = may_stop and self._is_stopped_by_another()
        if stops:
            # One that stops alone must not begin a collective, while the others are in a step.
            program_order.end_pass(self.model)
        if due or has_requests or stops:
            self._save(self._epoch, begun=True, within_epoch=True)
            # The end of the epoch, when callbacks and Keras change the state, is saved again.
            self._unsaved = self._is_at_last_step()
            self._requests.clear("save")
        self._stop_if_requested()

    def _end_by_nan(self, logs) -> bool:
        """Whether training ends with an infinite loss or NaN, which would replace good weights."""
        if not checks.is_ended_by_nan(self._callbacks, logs):
            return False
        self._unsaved = False
        self._print_fn(
            f"the loss at step {self._step} is {logs['loss']}: it is not saved. The next start "
            "resumes from an earlier step"
        )
        return True

    def on_epoch_end(self, epoch, logs=None):
        """Copies the state of a run that a callback ends before it is over, to save it later.

        When `fit` ends, Keras puts averages of the weights in their place, or the best weights;
        the run will go on with those that it has now.
        """
        stops = coordination.any_worker(self._strategy, self._is_stopped_by_another())
        if stops and self._unsaved:
            self._copied = self._copy_end()

    def on_train_end(self, logs=None):
        """Saves the final state, and waits until it is on disk."""
        if self._resumed is not None:
            # No epoch was left to train.
            self._resumed.finish(self.model, self._callbacks)
            self._resumed = None
        if self._copied is not None:
            # Keras's own callback, which comes last, has recorded the epoch since.
            self._copied[1]["history"] = state.history_of(self.model, self._running_epoch())
        if self._unsaved:
            self._write(*(self._copied or self._copy_end()))
        self._finish()
        if self._requests.must_stop():
            raise Preempted

    def _is_time(self) -> bool:
        if self._every_minutes is None or not topology.is_chief(self._strategy):
            return False
        return self._clock() - self._last_time >= self._every_minutes * 60

    def _is_within_epoch(self) -> bool:
        """Whether a callback has stopped training before the end of an epoch."""
        return (
            self._dataset is not None
            and 0 < self._dataset.position[1] < self._dataset.plan.steps_per_epoch
        )

    def _is_at_last_step(self) -> bool:
        """Whether all steps of an epoch were taken, and its end has not been reached."""
        data = self._dataset
        return data is not None and data.position[1] == data.plan.steps_per_epoch

    def _running_epoch(self) -> int | None:
        """Returns the epoch whose end has not been reached; None if it has."""
        return self._epoch if self._is_within_epoch() else None

    def _is_stopped_by_another(self) -> bool:
        """Whether a callback other than `EarlyStopping` ends the run, such as a time limit."""
        return self.model.stop_training and not state.stopped_early(self.model, self._callbacks)

    def _stop_if_requested(self):
        if self._requests.must_stop():
            self._finish()
            what = f"saved step {self._step}" if self._step else "no step to save yet"
            self._print_fn(f"SIGTERM: {what}, exiting")
            raise Preempted

    def _save(self, epoch, *, begun, within_epoch=False):
        self._write(*self._copy(epoch, begun=begun, within_epoch=within_epoch))

    def _copy_end(self):
        if self._is_within_epoch():
            return self._copy(self._epoch, begun=True, within_epoch=True)
        return self._copy(self._epoch + 1, begun=False)

    def _copy(self, epoch, *, begun, within_epoch=False):
        """Copies the state on every worker."""
        run = (self.model, self._dataset, self._callbacks)
        tensors, others = state.take_snapshot(
            *run, epoch, self._step, begun=begun, within_epoch=within_epoch
        )
        others |= {"epochs": self.params["epochs"], "first_rates": self._first_rates}
        others["unsaved"] = callback_states.changed(self._callbacks, self._first_numbers)
        if within_epoch and self._dataset.position[1] == self._dataset.plan.steps_per_epoch:
            # A pass without steps has no others, and metrics need not be all that a step logs.
            others["last_logs"] = state.plain_logs(self._logs or {})
        return tensors, others

    def _write(self, tensors, others):
        """Writes a copy on the chief, in the background."""
        self._unsaved, self._last_time = False, self._clock()
        if self.saved[-1:] != [self._step]:
            self.saved.append(self._step)
        if topology.is_chief(self._strategy):
            self._writer.write(self._folder, self._step, tensors, others, self._keep)
        elif self._print_fn is not logging.warning:
            self._print_fn(f"saved step {self._step}, which the chief writes")

    def _finish(self):
        """Waits for the writer on every worker, so that no worker exits before the chief."""
        failed = self._writer.finish()
        self._lock.release()
        self._requests.agree_to_stop(self._strategy)
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        on_chief(self._strategy, lambda: _raise(failed))
        # A request that came to this worker while the others had agreed already ends it here.
        coordination.leave_together(self._strategy)
        if self._requests.is_late():
            os.kill(os.getpid(), signal.SIGTERM)


def _check_arguments(dataset, every_steps, every_minutes, keep) -> None:
    """Raises ValueError for invalid arguments of `Checkpoint`."""
    check_dataset(dataset)
    for name, value in (("every_steps", every_steps), ("keep", keep)):
        check_whole_number(name, value, "Use a larger number.", optional=True)
    if every_minutes is not None and not every_minutes > 0:
        raise ValueError(
            "`every_minutes` must be above 0. "
            f"Received: every_minutes={every_minutes}. Use for example 10."
        )
    if dataset is None and (every_steps or every_minutes):
        raise ValueError(
            "`every_steps` and `every_minutes` need `dataset`, which knows its position. "
            "Received: dataset=None. Give the result of distribute_train."
        )


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _is_within_fit(frame, model: keras.Model) -> bool:
    """Whether a frame of the main thread is within `fit`, or `train_async`, of a model."""
    while frame is not None:
        name, names = frame.f_code.co_name, frame.f_locals
        if name == "fit" and names.get("self") is model:
            return True
        if name == "train_async" and names.get("model") is model:
            return True
        frame = frame.f_back
    return False
