"""Replacements of methods around steps: for callbacks, calls, saving and values."""

from __future__ import annotations

import contextlib
import contextvars
import inspect

import keras
import tensorflow as tf

from tfmulti import marks
from tfmulti.keras_compat import held, layer_states
from tfmulti.runtime.scoped import with_attributes


def prepare_callbacks(original, prepare, more):
    """Prepares stock callbacks for several workers.

    Only here a callback gets its model; no method of `Model` sees the callbacks.

    Args:
        original: `CallbackList.set_model`.
        prepare: Function of a callback and the model that will be trained.
        more: Function of that model that returns callbacks to add before the others and after.
    """

    def set_model(self, model):
        # Not twice: `set_model` may be called again, and the user may have added one.
        have = {type(callback) for callback in self.callbacks}
        first, last = ([c for c in added if type(c) not in have] for added in more(model))
        self.callbacks[:] = [*first, *self.callbacks, *last]
        for callback in self.callbacks:
            prepare(callback, model)
            if hasattr(callback, "set_callbacks"):
                callback.set_callbacks(self.callbacks)
        return original(self, model)

    return set_model


def end_epochs(original, settle, agree):
    """Makes workers agree on stopping after every epoch.

    Args:
        original: `CallbackList.on_epoch_end`.
        settle: Function of the model, called before the callbacks' `on_epoch_end`.
        agree: Function of the model, called after every epoch.
    """

    def end_epoch(self, epoch, logs=None):
        settle(self.model)
        original(self, epoch, logs)
        agree(self.model)

    return end_epoch


def after_loading(original, distribute):
    """Makes the optimizer of a model distributed again that is loaded under a strategy.

    A file contains the user's own optimizer, which `compile_from_config` recreates. Keras then
    creates its slots, which `distribute` must know of if the weights are sharded.

    Args:
        original: `Model.compile_from_config`.
        distribute: Function of the model that was loaded and compiled.
    """

    def compile_from_config(self, config):
        compile_model = self.compile

        def compile_and_distribute(*args, **kwargs):
            compile_model(*args, **kwargs)
            distribute(self)

        # On the instance: Keras compiles no loaded model whose class overrides `compile`.
        with with_attributes(self, compile=compile_and_distribute):
            original(self, config)
        # A model's own `compile_from_config` may have called something else.
        distribute(self)

    return compile_from_config


def before_variables(original, compare):
    """Calls a function before each variable is created.

    Args:
        original: `Variable._initialize`.
        compare: Function of a variable's path, its shape or None, and its type.
    """

    def initialize(self, value):
        # Keras sets the shape of a variable that is given a value only after this call.
        shape = self._shape if self._shape is not None else getattr(value, "shape", None)
        compare(self.path, None if shape is None else tuple(shape), self.dtype)
        if self._aggregation == "only_first_replica" and self._synchronization != "on_read":
            # Each replica counts its updates itself, since a branch cannot update across replicas.
            self._aggregation = "none"
        result = original(self, value)
        layer_states.note_layer(self)
        return result

    return initialize


def before_calls(name: str):
    """Returns a `make` that calls a function before `fit`, `evaluate`, `predict` and the like.

    It takes the model, the name, and the arguments by name. A second function, of the model and
    the name, returns a context for the call.

    Args:
        name: The name of Keras's method.
    """

    def make(original, before, during=lambda model, name: contextlib.nullcontext()):
        names = list(inspect.signature(original).parameters)[1:]

        def call(self, *args, **kwargs):
            given = dict(zip(names, args)) | kwargs
            validates = given.get("validation_data") is not None or given.get("validation_split")
            # A callback may call another method: it belongs to the outer one again afterwards.
            outer = marks.CALL.get(self)
            marks.CALL.set(self, (name, bool(validates)))
            trained_from = marks.TRAINS_FROM.get(self)
            if name == "fit":
                marks.TRAINS_FROM.set(self, given.get("x"))
            try:
                with during(self, name):
                    before(self, name, given)
                    return original(self, *args, **kwargs)
            except (TypeError, ValueError, AttributeError) as error:
                # Keras speaks of a tensor that is none.
                if not has_own_function(self, name) or "PerReplica" not in str(error):
                    raise
                raise own_function_error(name, "one that treats all parts as one tensor") from error
            finally:
                marks.CALL.set(self, outer)
                if name == "fit":
                    # Data may be large, and models outlive them: None after the outermost call.
                    marks.TRAINS_FROM.set(self, trained_from)

        return call

    return make


_FUNCTIONS = {
    "fit": "make_train_function",
    "evaluate": "make_test_function",
    "predict": "make_predict_function",
}


def has_own_function(model: keras.Model, name: str) -> bool:
    """Whether a model's class makes the function of `fit`, `evaluate` or `predict` by itself."""
    own = _FUNCTIONS.get(name, "")
    return getattr(type(model), own, None) is not getattr(keras.Model, own, None)


def own_function_error(name: str, received: str) -> ValueError:
    """Returns the error about such a function that several replicas cannot run."""
    own = _FUNCTIONS[name]
    step = f"self.{own.removeprefix('make_').removesuffix('_function')}_step"
    return ValueError(
        f"A custom `{own}` must run the step through the strategy, as Keras's does: its iterator "
        f"yields one part of the batch per replica. Received: {received}. Write "
        f"`outputs = self.distribute_strategy.run({step}, args=(next(iterator),))` "
        "and return reduced outputs, or leave the method out and override "
        f"`{step.removeprefix('self.')}`."
    )


def before_saving(with_optimizer: bool):
    """Returns a `make` that calls a function before a model is saved.

    It takes the model, and whether its optimizer is saved too. A file that another worker writes is
    explained.

    Args:
        with_optimizer: Whether Keras's function saves the optimizer's variables too.
    """

    def make(original, before):
        def save(model, *args, **kwargs):
            before(model, with_optimizer)
            try:
                if not tf.distribute.has_strategy():
                    return original(model, *args, **kwargs)
                # Saving creates variables. In the scope all workers must do so; often only one
                # saves. Whether all workers read weights together holds in the other thread, too.
                run = contextvars.copy_context().run
                return held.call_outside_scope(lambda: run(original, model, *args, **kwargs))
            except BlockingIOError as error:
                path = args[0] if args else kwargs["filepath"]
                raise BlockingIOError(
                    f"Only one process may write a file. Received: a save to {path}, which "
                    "another process is writing. With several workers, let only the chief save "
                    "(`tfmulti.resolve_cluster(check_network=False).is_chief`), or pass "
                    "keras.callbacks.ModelCheckpoint to `fit` on every worker."
                ) from error

        return save

    return make


def counting_assignments(original):
    """Counts how often a variable is assigned a value outside of steps, as callbacks do.

    Args:
        original: `DistributedVariable.assign`, `assign_add` or `assign_sub`.
    """

    def assign(self, *args, **kwargs):
        is_step = tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None
        if not is_step:
            marks.NUM_ASSIGNED.set(self, marks.NUM_ASSIGNED.get(self) + 1)
        return original(self, *args, **kwargs)

    return assign


def number_of(kind):
    """Returns a `make` for `int` or `float` of a variable, which return its value.

    Args:
        kind: `int` or `float`.
    """

    def make(original):
        def number(self):
            return kind(self.numpy())

        return number

    return make
