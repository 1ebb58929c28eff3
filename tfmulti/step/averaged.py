"""The variables of a model that workers average after local steps."""

from __future__ import annotations

import keras

from tfmulti import keras_compat
from tfmulti.step import model_contents


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the trainable weights, slots and floating-point states of layers.

    Learning rates and counters are the same on all workers anyway, and so are frozen weights that
    no step assigns.
    """
    optimizers = model_contents.optimizers_of(model, nested=True)
    optimizers = model_contents.without_idle(optimizers, model)
    built = [optimizer for optimizer in optimizers if optimizer.built]
    variables = list(model.trainable_variables)
    for optimizer in built:
        variables += keras_compat.updated_variables(optimizer)
    for optimizer in built:
        variables += keras_compat.slots_of(optimizer)
    variables += states_of(model)
    variables = {id(v): v for v in variables if keras.backend.is_float_dtype(v.dtype)}
    return list(variables.values())


def if_assigned(model: keras.Model) -> list[keras.Variable]:
    """Returns frozen weights and slots of idle optimizers, which only few steps assign."""
    optimizers = model_contents.optimizers_of(model, nested=True)
    some = [slot for each in optimizers if each.built for slot in keras_compat.slots_of(each)]
    models = (model, *model_contents.models_within(model))
    some += [weight for each in models for weight in each.weights]
    apart = {id(variable) for variable in variables_of(model)}
    some = {id(v): v for v in some if keras.backend.is_float_dtype(v.dtype)}
    return [variable for number, variable in some.items() if number not in apart]


def states_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the floating-point states of layers."""
    return keras_compat.states_from_rows(model, every=True, synchronized=True)


def accumulating(model: keras.Model) -> list[keras.Variable]:
    """Returns the weights and slots whose next update may be due in a step without rows."""
    optimizers = model_contents.optimizers_of(model, nested=True)
    some = [each for each in optimizers if each.built and each.gradient_accumulation_steps]
    updated = [v for each in some for v in keras_compat.updated_variables(each)]
    return [*updated, *(v for each in some for v in each.variables)]
