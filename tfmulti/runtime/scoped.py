"""Values that hold within a context, in one thread: each replica's step is traced in its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Scoped(threading.local):
    """A value of the current thread.

    Attributes:
        value: The value; in a thread that has not set it, the default.

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
        self.value = default

    @contextlib.contextmanager
    def set_to(self, value) -> Iterator:
        """Sets the value within the context; yields it."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before
