"""Values that hold within a context."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator


class Scoped:
    """A value of the current thread: each replica's step is traced in its own.

    A thread that goes on with another one's work runs in a copy of its `contextvars` context.

    Args:
        default: Its value outside of `set_to`.

    >>> depth = Scoped(0)
    >>> with depth.set_to(1):
    ...     depth.value
    1
    >>> depth.value
    0
    """

    def __init__(self, default):
        self._here = contextvars.ContextVar("tfmulti_scoped", default=default)

    @property
    def value(self):
        """The value; in a thread that has not set it, the default."""
        return self._here.get()

    @value.setter
    def value(self, value):
        self._here.set(value)

    @contextlib.contextmanager
    def set_to(self, value) -> Iterator:
        """Sets the value within the context; yields it."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before


@contextlib.contextmanager
def with_attributes(thing, /, **values) -> Iterator[None]:
    """Gives an object attributes of its own within the context.

    >>> box = type("Box", (), {"size": 1})()
    >>> with with_attributes(box, size=2):
    ...     box.size
    2
    >>> vars(box)
    {}
    """
    # Not by `setattr`, which Keras watches.
    own = vars(thing)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)
        for name in values.keys() - before.keys():
            own.pop(name, None)
