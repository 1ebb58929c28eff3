"""What has been verified of a model since it was compiled, and is not verified again."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfmulti import keras_compat, marks
from tfmulti.verification.case import Case, Feed


@dataclasses.dataclass
class Verified:
    """The steps of a model that were verified.

    Attributes:
        compiled: What changes with each `compile`.
        forms: Kinds of steps, each with a form of data.
        next_functions: Kinds of steps whose next function is made for what was verified last.
    """

    compiled: Any
    forms: set[tuple] = dataclasses.field(default_factory=set)
    next_functions: set[str] = dataclasses.field(default_factory=set)


def note(case: Case) -> tuple | None:
    """Notes that a step is verified now, with data of this form.

    Args:
        case: The step.

    Returns:
        Its kind and the form of its data; None if it was verified with such data before.
    """
    compiled = keras_compat.compiled_state(case.model)
    done = marks.VERIFIED.get(case.model)
    if done is None or done.compiled is not compiled:
        done = Verified(compiled)
        marks.VERIFIED.set(case.model, done)
    form = _form_of(case)
    if not done.forms.isdisjoint((form, _form_of(case, small=True))):
        return None
    done.forms.add(form)
    done.next_functions.add(case.kind)
    return form


def withdraw(model: keras.Model, form: tuple) -> None:
    """Has the next call verify a step again with data of a form that `note` returned."""
    marks.VERIFIED.get(model).forms.discard(form)


def forget(model: keras.Model, kind: str) -> None:
    """Has the next call verify a kind of step again, whatever its data."""
    done = marks.VERIFIED.get(model)
    if done is not None:
        done.forms = {form for form in done.forms if form[0] != kind}


def expect_function(model: keras.Model, kind: str) -> None:
    """Notes that the next function of a step is made for what was verified here, if anything."""
    done = marks.VERIFIED.get(model)
    if done is not None:
        done.next_functions.add(kind)


def take_function(model: keras.Model, kind: str) -> bool:
    """Notes that the function of a step is made; returns whether it is for what was verified last.

    If it is not, the step may compute something else than the one that was verified, by a Python
    attribute that a callback has changed.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
    """
    done = marks.VERIFIED.get(model)
    if done is None or kind not in done.next_functions:
        return False
    done.next_functions.remove(kind)
    return True


def knows(model: keras.Model, kind: str, feed: Feed) -> bool:
    """Whether a step was verified with data of this form, as far as that is known unread.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        feed: The description of its data.
    """
    done = marks.VERIFIED.get(model)
    is_current = done is not None and done.compiled is keras_compat.compiled_state(model)
    return is_current and (kind, feed.key) in done.forms


def note_feed(model: keras.Model, kind: str, feed: Feed) -> None:
    """Notes that a step was verified, with a batch after its function was made.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        feed: The description of its data.
    """
    done = marks.VERIFIED.get(model)
    if done is not None:
        done.forms.add((kind, feed.key))
        if getattr(model, f"{kind}_function") is not None:
            done.next_functions.discard(kind)


def _form_of(case, small=False):
    shares = case.rows.are_unequal and tuple(case.shares_alike(each) for each in case.sizes())
    return case.kind, case.rows.form(), case.padded, small or case.may_leave_empty, shares
