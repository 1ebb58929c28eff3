"""Records the calls of layers and losses in one step, and plays a single one again.

When a call is played again, the calls within it answer with what they gave the first time. So
each layer is judged by its own code, whatever the layers before it and inside of it do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass
class Call:
    """One call of a layer or a loss.

    Attributes:
        thing: The layer or loss.
        function: Its `call`, as its author wrote it.
        args: What it was given.
        kwargs: What it was given by name.
        outputs: What it gave.
        added: The losses that it added by `add_loss`.
        within: The calls within this one, in order.
        first: Of a call that was answered: the one that gave the answer.
    """

    thing: Any
    function: Any = None
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    outputs: Any = None
    added: list = dataclasses.field(default_factory=list)
    within: list[Call] = dataclasses.field(default_factory=list)
    first: Call | None = None


class Calls:
    """The calls of one step.

    Args:
        things: Layers and losses to watch.

    Attributes:
        finished: The calls, in the order in which they ended: inner ones first.
    """

    def __init__(self, things):
        self._things = list({id(thing): thing for thing in things}.values())
        self._stack: list[Call] = []
        self._answers: list[Call] | None = None
        self._cut = self._playing = None
        self.finished: list[Call] = []

    @contextlib.contextmanager
    def watched(self):
        """Watches the things: first a step is recorded, then calls can be played again."""
        for thing in self._things:
            object.__setattr__(thing, "call", self._around_call(thing, thing.call))
            if hasattr(thing, "add_loss"):
                object.__setattr__(thing, "add_loss", self._around_add_loss(thing, thing.add_loss))
        try:
            yield self
        finally:
            for thing in self._things:
                for name in ("call", "add_loss"):
                    vars(thing).pop(name, None)

    def play(self, call: Call, cut) -> Call:
        """Plays a call again with other rows.

        Args:
            call: One of `finished`.
            cut: Function of a nested structure of tensors that gives the same of some rows.

        Returns:
            What came of it.
        """
        again = Call(call.thing, call.function)
        self._stack, self._answers, self._cut = [again], list(call.within), cut
        args, kwargs = cut(call.args), cut(call.kwargs)
        if isinstance(call.thing, keras.Layer):
            # As Keras calls it, in the precision of its policy.
            self._playing = call.thing
            again.outputs = call.thing(*args, **kwargs)
        else:
            again.outputs = call.function(*args, **kwargs)
        return again

    def _around_call(self, thing, function):
        @functools.wraps(function)
        def watched_call(*args, **kwargs):
            if self._playing is thing:
                self._playing = None
                return function(*args, **kwargs)
            if self._answers is not None:
                return self._answer(thing, function, args, kwargs)
            call = Call(thing, function, args, kwargs)
            self._stack.append(call)
            try:
                call.outputs = function(*args, **kwargs)
            finally:
                self._stack.pop()
            if self._stack:
                self._stack[-1].within.append(call)
            self.finished.append(call)
            return call.outputs

        return watched_call

    def _answer(self, thing, function, args, kwargs):
        for number, call in enumerate(self._answers):
            if call.thing is thing:
                del self._answers[number]
                outputs = self._cut(call.outputs)
                self._stack[0].within.append(
                    Call(thing, function, args, kwargs, outputs, first=call)
                )
                return outputs
        return function(*args, **kwargs)

    def _around_add_loss(self, thing, function):
        @functools.wraps(function)
        def watched_add_loss(loss):
            # Keras adds penalties on activities after a call; recorded, they are no one's.
            if self._stack and self._stack[-1].thing is thing:
                self._stack[-1].added += tf.nest.flatten(loss)
            if self._answers is None:
                function(loss)

        return watched_add_loss


def cut_rows(structure, num_rows: int, start: int, stop: int):
    """Returns rows `start` to `stop` of every tensor in a structure that has `num_rows` of them.

    Where a tensor has a multiple of them, as when time steps are folded into rows, its part of
    that multiple.
    """

    def cut(value):
        if not is_of_rows(value, num_rows):
            return value
        times = int(value.shape[0]) // num_rows
        return value[start * times : stop * times]

    return tf.nest.map_structure(cut, structure)


def is_of_rows(value, num_rows: int) -> bool:
    """Whether a value is a tensor whose first axis is the batch's rows, or a multiple of them."""
    if not isinstance(value, (tf.Tensor, tf.RaggedTensor)) or not value.shape.rank:
        return False
    return bool(value.shape[0]) and value.shape[0] % num_rows == 0
