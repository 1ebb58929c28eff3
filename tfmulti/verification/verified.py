"""What has been verified of a model since it was compiled, and is not verified again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tfmulti import keras_compat, marks
from tfmulti.verification.case import Case, Feed


@dataclasses.dataclass
class Verified:
    """The steps of a model that were verified.

    Attributes:
        compiled: What changes with each `compile`.
        forms: Kinds of steps, each with a form of data, and the numbers of rows with which it was
            verified; None for any number.
        next_functions: Kinds of steps whose next function is made for what was verified last.
        moves: By kind of step, `keras_compat.num_moves` after its last verification.
    """

    compiled: Any
    forms: dict[tuple, set | None] = dataclasses.field(default_factory=dict)
    next_functions: set[str] = dataclasses.field(default_factory=set)
    moves: dict[str, int] = dataclasses.field(default_factory=dict)

    def is_stale(self, kind: str) -> bool:
        """Whether weights have moved to other workers or devices since a kind was verified."""
        moves = keras_compat.num_moves()
        return self.moves.get(kind, moves) != moves


@dataclasses.dataclass
class _Notes:
    """What stays true as long as a step has the same function."""

    compiled: Any
    function: Any
    found: dict = dataclasses.field(default_factory=dict)


def notes(model: keras.Model, kind: str) -> dict:
    """Returns a dict for what a search of a model has found, for as long as that stays true.

    It is so until the function of the step is made anew, after its first one. A step that runs
    eagerly can change with each call, so its dict is not kept.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    if keras_compat.runs_eagerly(model):
        return {}
    compiled = keras_compat.compiled_state(model)
    function = getattr(model, f"{kind}_function", None)
    known = marks.NOTES.get(model).get(kind)
    is_same = known is not None and known.compiled is compiled
    if not is_same or known.function not in (None, function):
        known = _Notes(compiled, function)
        marks.NOTES.set(model, {**marks.NOTES.get(model), kind: known})
    known.function = function
    return known.found


def note(case: Case, any_worker: Callable[[bool], bool]) -> tuple | None:
    """Notes that a step is verified now, with data of this form.

    Args:
        case: The step.
        any_worker: Returns whether something is true on any worker; all must call it.

    Returns:
        Its kind and the form of its data; None if it was verified with such data before, and with
        their numbers of rows, where it has only been run on some.
    """
    compiled = keras_compat.compiled_state(case.model)
    done = marks.VERIFIED.get(case.model)
    if done is None or done.compiled is not compiled:
        done = Verified(compiled)
        marks.VERIFIED.set(case.model, done)
    if done.is_stale(case.kind):
        forget(case.model, case.kind)
    form, sizes = _form_of(case), _sizes_of(case)
    known = [done.forms[each] for each in (form, _form_of(case, small=True)) if each in done.forms]
    is_new = not any(before is None or sizes <= before for before in known)
    # Workers can have other numbers of rows, and must all verify it or none.
    if not any_worker(is_new):
        return None
    before = done.forms.get(form, set())
    done.forms[form] = None if before is None else sizes | before
    done.next_functions.add(case.kind)
    return form


def note_done(case: Case, form: tuple) -> None:
    """Notes that a verification has ended, in which optimizers may have moved weights.

    The numbers of rows that it has run with stand for any other, unless they were those of its data
    only, as all have one, or as it needs groups of rows.

    Args:
        case: The step, after its verification.
        form: What `note` returned.
    """
    done = marks.VERIFIED.get(case.model)
    done.moves[case.kind] = keras_compat.num_moves()
    if case.is_replicated or not (case.static or case.is_traced_static):
        done.forms[form] = None


def withdraw(model: keras.Model, form: tuple) -> None:
    """Has the next call verify a step again with data of a form that `note` returned."""
    done = marks.VERIFIED.get(model)
    done.forms.pop(form, None)
    done.next_functions.discard(form[0])


def forget(model: keras.Model, kind: str) -> None:
    """Has the next call verify a kind of step again, whatever its data; no spot check precedes it.

    What was verified may not be what runs: spot checks would compare the old step with itself.
    """
    marks.CHECKED.set(model, {**marks.CHECKED.get(model), kind: None})
    done = marks.VERIFIED.get(model)
    if done is not None:
        done.forms = {form: sizes for form, sizes in done.forms.items() if form[0] != kind}


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
    is_old = done is None or done.compiled is not keras_compat.compiled_state(model)
    if is_old or done.is_stale(kind):
        return False
    any_size = all(sizes is None for form, sizes in done.forms.items() if form[0] == kind)
    return any_size and (kind, feed.key) in done.forms


def note_feed(model: keras.Model, kind: str, feed: Feed) -> None:
    """Notes that a step was verified, with a batch after its function was made.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        feed: The description of its data.
    """
    done = marks.VERIFIED.get(model)
    if done is not None:
        done.forms[kind, feed.key] = None
        if getattr(model, f"{kind}_function") is not None:
            done.next_functions.discard(kind)


def _form_of(case, small=False):
    shares = case.rows.are_unequal and tuple(case.shares_alike(each) for each in case.sizes())
    return case.kind, case.rows.form(), case.padded, small or case.may_leave_empty, shares


def _sizes_of(case) -> set:
    counts = tuple(case.rows.counts)
    return {
        counts,
        *(each * len(counts) if len(each) == 1 else each for each in case.batches or ()),
    }
