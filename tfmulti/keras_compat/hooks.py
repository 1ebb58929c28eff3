"""Public methods of Keras that are surrounded, once a process."""

from __future__ import annotations

import functools

import keras


def around_callbacks(prepare, agree, more) -> None:
    """Lets stock callbacks be prepared for several workers, and stops agreed on.

    Cures "BadZipFile", "unable to lock file" and doubled lines where every worker writes what
    one should, and "Collective ... expected type" where one worker alone stops after an epoch.
    A callback learns of its model here only, and no method of `Model` sees the callbacks.

    Args:
        prepare: Function of a callback and the model that is going to be trained.
        agree: Function of that model, called after every epoch.
        more: Function of that model that returns callbacks to add.
    """
    holder = keras.callbacks.CallbackList
    if hasattr(holder.set_model, "__wrapped__"):
        return
    set_model, on_epoch_end = holder.set_model, holder.on_epoch_end

    @functools.wraps(set_model)
    def set_model_of_all(self, model):
        have = {type(callback) for callback in self.callbacks}
        self.callbacks += [c for c in more(model) if type(c) not in have] if model else []
        for callback in self.callbacks if model else []:
            prepare(callback, model)
            if hasattr(callback, "set_callbacks"):
                callback.set_callbacks(self.callbacks)
        return set_model(self, model)

    @functools.wraps(on_epoch_end)
    def end_epoch(self, epoch, logs=None):
        on_epoch_end(self, epoch, logs)
        agree(self.model)

    holder.set_model, holder.on_epoch_end = set_model_of_all, end_epoch


def after_loading(distribute) -> None:
    """Makes the optimizer of a model that is loaded under a strategy distributed again.

    A file holds the user's optimizer as it is; `compile_from_config` makes it anew.

    Args:
        distribute: Function of the model that was loaded and compiled.
    """
    original = keras.Model.compile_from_config
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def compile_from_config(self, config):
        original(self, config)
        distribute(self)

    keras.Model.compile_from_config = compile_from_config


def before_variables(compare) -> None:
    """Lets every variable be looked at before it is created.

    Cures "Shape mismatch in the collective instance", and waiting for ever, where workers build
    unlike models: under several workers creating a variable is a collective.

    Args:
        compare: Function of a variable's path, its shape or None, and its type.
    """
    original = keras.Variable._initialize
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialize(self, value):
        shape = self._shape if self._shape is not None else getattr(value, "shape", None)
        compare(self.path, None if shape is None else tuple(shape), self.dtype)
        return original(self, value)

    keras.Variable._initialize = initialize


def before_calls(look) -> None:
    """Lets every `fit`, `evaluate` and `predict` be looked at before it begins.

    Cures waiting for ever, and results of two things mixed, where workers call them unlike.

    Args:
        look: Function of a model, the name of the method, and its first argument.
    """
    for name in ("fit", "evaluate", "predict"):
        original = getattr(keras.Model, name)
        if not hasattr(original, "tfmulti_looks"):
            setattr(keras.Model, name, _looked_at(original, name, look))


def _looked_at(original, name, look):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        look(self, name, args[0] if args else kwargs.get("x"))
        return original(self, *args, **kwargs)

    call.tfmulti_looks = True
    return call


def weigh_single_numbers(weigh) -> None:
    """Has a running mean count a step once over all replicas where it is given one number.

    A `train_step` says `tracker.update_state(loss)`, and a metric function can return the mean
    over a batch. On one device a step counts as one; replicas with fewer rows would count alike.

    Args:
        weigh: Function of a metric and a number that returns the number and its weight, or None
            where the metric shall count it as it is.
    """
    original = keras.metrics.Mean.update_state
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def update_state(self, values, sample_weight=None):
        weighed = None
        if sample_weight is None and keras.ops.ndim(values) == 0:
            weighed = weigh(self, values)
        return original(self, *(weighed or (values, sample_weight)))

    keras.metrics.Mean.update_state = update_state


def logs_without_steps() -> None:
    """Gives an epoch of which no step was left the metrics' logs.

    Keras takes the last step's logs for its own; there is none where training goes on after the
    last step of an epoch.
    """
    original = keras.Model._get_metrics_result_or_logs
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def result_or_logs(self, logs):
        if not logs and getattr(self.distribute_strategy, "repairs_keras", False):
            return self.get_metrics_result()
        return original(self, logs)

    keras.Model._get_metrics_result_or_logs = result_or_logs


class _OfLength:
    """A data adapter with another number of batches than Keras takes it to have."""

    def __init__(self, adapter, num_batches):
        self._adapter, self.num_batches = adapter, num_batches

    def __getattr__(self, name):
        return getattr(self._adapter, name)


def number_of_batches(epoch_iterator, num_local_replicas: int) -> int | None:
    """Returns the steps of a pass on this worker, or None where only the end of data tells.

    Of `distribute_datasets_from_function` Keras counts the batches of all local replicas as
    steps, and ends with "Your input ran out of data".
    """
    adapter = epoch_iterator.data_adapter
    number = adapter.num_batches
    if number is None:
        return None
    if getattr(adapter, "_dataset", None) is epoch_iterator._distributed_dataset:
        return -(-number // num_local_replicas)
    return number


def set_number_of_batches(epoch_iterator, number: int | None) -> None:
    """Makes a pass end after `number` steps, or with the data where it is None."""
    adapter = epoch_iterator.data_adapter
    if adapter.num_batches != number:
        epoch_iterator.data_adapter = _OfLength(adapter, number)


def follow_position(epoch_iterator) -> None:
    """Makes a pass over data that was begun before go on where it stands.

    Keras counts the batches of a whole pass. Of a dataset with `steps_left` it takes those that
    are left, and numbers them as if it had taken the others.
    """
    dataset = getattr(epoch_iterator.data_adapter, "_dataset", None)
    if not hasattr(dataset, "steps_left"):
        return
    if epoch_iterator.steps_per_epoch not in (None, dataset.plan.steps_per_epoch):
        return
    epoch_iterator.steps_per_epoch = None
    enumerate_whole = type(epoch_iterator)._enumerate_iterator

    def enumerate_rest():
        left = dataset.steps_left()
        done = dataset.plan.steps_per_epoch - left
        epoch_iterator._num_batches = left
        if not left:
            dataset.end_pass()
            return
        for begin, end, iterator in enumerate_whole(epoch_iterator):
            yield begin + done, end + done, iterator

    epoch_iterator._enumerate_iterator = enumerate_rest
