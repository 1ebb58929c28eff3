"""What a checkpoint says of a model's optimizers, beside the values of their variables."""

from __future__ import annotations

from collections.abc import Callable

import keras

from tfmulti import keras_compat
from tfmulti.checkpoint import generations
from tfmulti.step import model_contents


def describe(model: keras.Model) -> dict:
    """Returns the optimizers' classes and which variables they update, as JSON."""
    found = _optimizers_of(model)
    return {
        "optimizer_classes": [type(optimizer).__name__ for optimizer in found],
        "optimizers": _what_they_update(model, found),
    }


def check_classes(state: dict, model: keras.Model) -> None:
    """Raises CheckpointError if an optimizer has another class than in the checkpoint.

    Adam and AdamW have the same variables, so the classes are compared.

    Args:
        state: The checkpoint's.
        model: The model.
    """
    now = describe(model)["optimizer_classes"]
    # Earlier versions did not save it.
    before = state.get("optimizer_classes", now)
    if before != now:
        raise generations.CheckpointError(
            "A checkpoint must be of the same model and optimizer. "
            f"Received: {', '.join(before)} in the checkpoint, {', '.join(now)} in this run. "
            "Use the same optimizer, or begin in another folder."
        )


def build(state: dict, model: keras.Model) -> None:
    """Builds optimizers that Keras would build at their first update, to restore their state.

    Args:
        state: The checkpoint's.
        model: The model.
    """
    for optimizer, updated in zip(_optimizers_of(model), state.get("optimizers", ())):
        if updated and not optimizer.built and max(updated) < len(model.variables):
            with model.distribute_strategy.scope():
                optimizer.build([model.variables[index] for index in updated])


def check_updated(state: dict, model: keras.Model) -> None:
    """Raises CheckpointError if an optimizer has slots of other variables than the checkpoint.

    Slots are matched by index, and those of other variables may have the same shapes. Where
    the numbers of variables differ, the slots do, or each worker has a part of the model.

    Args:
        state: The checkpoint's.
        model: The model, with its optimizers built.
    """
    found = _optimizers_of(model)
    updated = zip(found, state.get("optimizers", ()), _what_they_update(model, found))
    for optimizer, before, now in updated:
        has_slots = any(len(variable.shape) for variable in optimizer.variables)
        if not (has_slots and before and now and len(before) == len(now) and before != now):
            continue
        places = next(pair for pair in zip(before, now) if pair[0] != pair[1])
        paths = {index: variable.path for index, variable in enumerate(model.variables)}
        earlier, later = (paths.get(index, f"variable {index}") for index in places)
        raise generations.CheckpointError(
            "A checkpoint must be of the same model and optimizer. "
            f"Received: slots of {earlier} in the checkpoint, and of {later} in their place in "
            "this run. Train the same variables, or begin in another folder."
        )


def rates_of(model: keras.Model) -> list[float | None]:
    """Returns the optimizers' learning rates now.

    It is None for a schedule, which is no state, and for an optimizer around others, which have
    the rates: its own is a 0 that nothing uses.
    """
    return list(map(_rate_of, _optimizers_of(model)))


def report_rates(
    begun: list, given: list, model: keras.Model, print_fn: Callable[[str], None]
) -> None:
    """Tells of a learning rate that the checkpoint's replaces, unless callbacks had changed it.

    Args:
        begun: The rates with which the run had begun.
        given: The rates of this run before it resumed.
        model: The model, with the checkpoint's rates.
        print_fn: Function of one line of text.
    """
    for before, rate, now in zip(begun, given, rates_of(model)):
        if rate not in (before, now):
            print_fn(
                f"the checkpoint's learning rate {now} is used, and not {rate}: to train with "
                "another, begin in another folder, or do not resume"
            )
            return


def _optimizers_of(model) -> list:
    return model_contents.optimizers_of(model, nested=True)


def _what_they_update(model, found) -> list:
    """Returns for each optimizer the indices in `model.variables` of its variables."""
    indices = {id(variable): index for index, variable in enumerate(model.variables)}
    built = []
    for optimizer in found:
        updated = [indices.get(id(v)) for v in keras_compat.updated_variables(optimizer)]
        built.append(updated if optimizer.built and None not in updated else None)
    return built


def _rate_of(optimizer) -> float | None:
    if hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers"):
        return None
    rates = [v for v in optimizer.variables if v.name == "learning_rate"]
    # As it was written: 0.1, and not the float32 next to it.
    return float(str(keras.ops.convert_to_numpy(rates[0]))) if rates else None
