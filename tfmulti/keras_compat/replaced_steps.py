"""Replacements within a step: its function, tapes, and the methods of optimizers."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers import base_optimizer
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util, function_type_utils
from tensorflow.python.ops.parallel_for import control_flow_ops as parallel_for

from tfmulti import marks
from tfmulti.keras_compat import held


def update_alike(plain):
    """Returns a `make` for a method of optimizers that each replica then runs by itself.

    It does so after a reduction, when all replicas have the same gradients. Overrides of an
    optimizer's own class, such as those of Nadam and Muon, stay.

    Args:
        plain: The same method of an optimizer without replicas.
    """

    def make(original, gradients_are_global):
        def method(self, *args, **kwargs):
            alike = marks.UPDATES_ALIKE.get(self) or gradients_are_global()
            alike = alike or self._distribution_strategy.num_replicas_in_sync == 1
            return (plain if alike else original)(self, *args, **kwargs)

        return method

    return make


def update_on_devices(self, grads, trainable_variables, learning_rate) -> None:
    """Updates weights, each on its own device if pipeline stages are on several devices."""
    for device, places in _by_device(trainable_variables):
        with device:
            base_optimizer.BaseOptimizer._backend_update_step(
                self,
                [grads[place] for place in places],
                [held.own_variable(trainable_variables[place]) for place in places],
                learning_rate,
            )


def decay_on_devices(self, variables) -> None:
    """Decays weights, each on its own device if pipeline stages are on several devices."""
    variables = list(variables)
    for device, places in _by_device(variables):
        with device:
            # What is left out may be named, and the name of Keras's variable lacks its layer's.
            chosen = [held.own_variable(variables[place]) for place in places]
            base_optimizer.BaseOptimizer._apply_weight_decay(self, chosen)


def _by_device(variables):
    """Yields a context for each device, and the places of the variables on that device."""
    places: dict = {}
    for place, variable in enumerate(variables):
        places.setdefault(marks.DEVICE.get(variable), []).append(place)
    for device, there in places.items():
        yield contextlib.nullcontext() if device is None else tf.device(device), there


def within_replicas(original, update_of_keras):
    """Refuses to apply an optimizer of several replicas outside of a replica.

    An optimizer of one replica can be applied anywhere, as without a strategy.

    Args:
        original: Keras's own method.
        update_of_keras: Function of the optimizer, gradients and variables that returns a context,
            with the gradients of the whole batch that this worker needs.
    """

    def apply(self, grads, trainable_variables=None):
        strategy = self._distribution_strategy
        here = tf.distribute.get_strategy() is strategy
        outside = not here or tf.distribute.in_cross_replica_context()
        if strategy.num_replicas_in_sync > 1 and outside:
            raise ValueError(
                "With several replicas, an optimizer must be applied in replica context. Received: "
                f"{self.name}, applied outside of `strategy.run`. Train with model.fit of a model "
                "created in the same scope, or call the step through strategy.run and take "
                "gradients with tfmulti.DistributedGradientTape. To train on one device, create "
                "the model outside the scope."
            )
        # With one replica, a step may use an optimizer that was created in no scope, as in Keras.
        entered = here or tf.distribute.has_strategy()
        variables = None if trainable_variables is None else list(trainable_variables)
        scope = contextlib.nullcontext() if entered else strategy.scope()
        with scope, update_of_keras(self, grads, variables) as own:
            return original(self, own, variables)

    return apply


def accumulators(optimizer, variables) -> list[keras.Variable]:
    """Returns the sums of gradients that an optimizer keeps for variables."""
    kept = optimizer._accumulated_gradients
    return [kept[optimizer._get_variable_index(variable)] for variable in variables]


def is_accumulating(optimizer) -> bool:
    """Whether an accumulation has begun and not ended; to be called outside of a step."""
    return num_steps(optimizer) % optimizer.gradient_accumulation_steps != 0


def num_steps(optimizer) -> int:
    """Returns the steps that an optimizer has counted, outside of a step; each of them adds.

    Its public `iterations` are updates where it accumulates gradients.
    """
    value = optimizer._iterations.value
    # All replicas count alike.
    value = getattr(value, "values", (value,))[0]
    return int(value.numpy())


def is_update_step(optimizer):
    """Whether the step that is traced ends an accumulation; `iterations` counts updates there."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def strategy_of(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope an optimizer was created."""
    return optimizer._distribution_strategy


def track_variable(optimizer, variable: keras.Variable) -> None:
    """Adds a variable to `optimizer.variables`, as `add_variable` does."""
    optimizer._track_variable(variable)


def has_custom_step(model: keras.Model, kind: str) -> bool:
    """Whether a model's `"train"` or `"test"` step is not Keras's own.

    Keras's own training step hands gradients directly to the optimizer.
    """
    name = f"{kind}_step"
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)


def update_by(optimizer, grads, variables) -> None:
    """Does Keras's update with accumulated gradients, and resets them."""
    grads = optimizer._clip_gradients(grads)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(grads, variables, optimizer.learning_rate)
    optimizer._backend_reset_gradient_accumulators()


def mark_steps(original, before_making, watch):
    """Marks the steps of which Keras makes its functions for training and evaluation.

    A step can be a `tf.function`, a partial or a lambda, which have neither the name `train_step`
    nor the model. It is wrapped in a Python function, because within a `tf.function` no replica
    can reduce ("merge_call called while defining a new graph or a tf.function").

    Args:
        original: Keras's own method.
        before_making: Function of the model and the kind of step.
        watch: Function of the model, the kind of step, and a function that makes Keras's function;
            returns another.
    """

    def make_function(self, step_function):
        def step(data):
            return step_function(data)

        # Not `is`: a method is bound anew whenever it is read.
        kind = "train" if step_function == self.train_step else "test"
        marks.STEP.set(step, (kind, self))
        before_making(self, kind)
        return watch(self, kind, lambda: original(self, step))

    return make_function


def within_steps(original, take_gradient):
    """Makes tapes return gradients of the whole batch; see `tfmulti.step.gradients`.

    Args:
        original: TensorFlow's own method.
        take_gradient: Function of `original` and its arguments.
    """

    def gradient(self, target, sources, output_gradients=None, *args, **kwargs):
        if args:
            kwargs["unconnected_gradients"] = args[0]
        if in_vectorized_loop():
            # The gradient of one row or one element, which the user's code combines later.
            return original(self, target, sources, output_gradients, **kwargs)
        return take_gradient(original, self, target, sources, output_gradients, **kwargs)

    return gradient


def in_vectorized_loop() -> bool:
    """Whether `tf.vectorized_map` or `tf.GradientTape.jacobian` is tracing its function."""
    # TensorFlow names these loops so, and has no other sign of them.
    scopes = tf.get_current_name_scope().split("/")
    return any(scope == "loop_body" or scope.startswith("loop_body_") for scope in scopes)


def inline_functions(original, inlines):
    """Traces each `tf.function` that a step calls as a part of the step, unless XLA compiles it.

    Args:
        original: `__call__` of the object that `tf.function` returns.
        inlines: Function that returns whether this thread traces a step.
    """

    def call(self, *args, **kwargs):
        # Traced as a part of the step, it would no longer be compiled by XLA, and TensorFlow makes
        # vectorized loops of eager steps in a graph only.
        is_loop = getattr(self._python_function, "__module__", None) == parallel_for.__name__
        if not inlines() or self._jit_compile or is_loop:
            return original(self, *args, **kwargs)
        function, status = self._python_function, ag_ctx.Status.DISABLED
        if self._autograph:
            function = autograph_util.py_func_from_autograph(function)
            status = ag_ctx.Status.ENABLED
        # Its signature makes tensors of Python's values, as in a trace of its own.
        bound = function_type_utils.canonicalize_function_inputs(
            args, kwargs, self._function_type, self._default_values, self._is_pure
        )
        # As there, too: Keras's steps are traced with AutoGraph disabled.
        with ag_ctx.ControlStatusCtx(status):
            args = [_with_tensors(each) for each in bound.args]
            return function(*args, **{k: _with_tensors(v) for k, v in bound.kwargs.items()})

    return call


def _with_tensors(argument):
    """Returns an argument with tensors in place of NumPy's arrays."""
    # What has none stays the same object, as a list that the function fills.
    if not any(map(_is_array, tf.nest.flatten(argument))):
        return argument
    return tf.nest.map_structure(
        lambda each: tf.convert_to_tensor(each) if _is_array(each) else each, argument
    )


def _is_array(value):
    # TensorFlow treats NumPy's strings as Python's.
    return isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.str_)


def keep_losses_apart(kind):
    """Returns a `make` that gives an attribute of layers a separate value for each replica.

    Keras's layers have one list for all replicas, whose threads take turns wherever they reduce, as
    in synchronized batch normalization.

    Args:
        kind: The type of the attribute, such as `list`.
    """

    def make(original, notes_of_step):
        # There is no original attribute of the class: each layer has its own.
        return _OfStep(kind, notes_of_step)

    return make


class _OfStep:
    """An attribute with a value for each replica's step, and one for outside of steps."""

    def __init__(self, kind, notes_of_step):
        self._name, self._kind, self._notes_of_step = "", kind, notes_of_step

    def __set_name__(self, owner, name):
        # Keras's own name, so that a layer that is copied or used without us keeps its value.
        self._name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        notes = self._notes_of_step()
        if notes is None:
            return instance.__dict__.setdefault(self._name, self._kind())
        # The instance is kept with its value, so that no other object gets its id.
        return notes.setdefault((self._name, id(instance)), (instance, self._kind()))[1]

    def __set__(self, instance, value):
        # Only `Layer.__init__` assigns it.
        instance.__dict__[self._name] = value
