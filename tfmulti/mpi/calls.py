"""The thread of a worker that makes all its MPI calls, one after the other."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from tfmulti.mpi.order import CollectiveOrder

PROGRESS_S = 0.0005
"""How often MPI is called while messages are under way: it makes progress only while it is."""
COMPARE_S = 20.0
"""How long a result is awaited before workers compare collectives; then twice as long each time."""
_POLL_S = 0.3


class _Call:
    """One MPI call that is under way: a function, its arrays, and whether anyone awaits it."""

    def __init__(self, method, arrays, is_awaited):
        self.method, self.arrays, self.is_awaited = method, arrays, is_awaited
        self.done = threading.Event()
        self.result, self.error = None, None


class MpiCalls:
    """Makes MPI calls in a thread.

    Args:
        check_peers: Function that is called repeatedly while a result is awaited, and raises if
            another worker does not answer.
        order: The collectives that were called; compared now and then while a result is awaited for
            long.

    Attributes:
        sending: Pairs of an MPI request and the memory that is sent until it is done.
    """

    def __init__(self, check_peers: Callable[[], None], order: CollectiveOrder):
        self._check_peers, self._order = check_peers, order
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        # The error of what nobody awaits: a call that does raises it.
        self._failed: Exception | None = None
        self.sending: list[tuple] = []
        threading.Thread(target=self._serve, name="tfmulti-mpi", daemon=True).start()

    def begin(self, method: Callable, *arrays, is_awaited: bool = True) -> np.int64:
        """Hands a call to the thread, and returns its number.

        Args:
            method: What the thread calls.
            *arrays: Its arguments.
            is_awaited: Whether `finish` will be called with the number.
        """
        self._refuse(self._failed)
        number = next(self._numbers)
        arrays = [np.asarray(array, order="C") for array in arrays]
        call = _Call(method, arrays, is_awaited)
        if is_awaited:
            self._calls[number] = call
        self._work.put(call)
        return np.int64(number)

    def begin_and_finish(self, methods, arrays) -> list:
        """Makes a call for each array; returns the number of the last one, and their results."""
        numbers = [self.begin(method, array) for method, array in zip(methods, arrays)]
        return [numbers[-1], *(self.finish(number) for number in numbers)]

    def finish(self, number) -> np.ndarray:
        """Waits for a call, and returns its result."""
        call = self._calls.pop(int(number))
        end, longer = time.monotonic() + COMPARE_S, COMPARE_S
        while not call.done.wait(_POLL_S):
            self._check_peers()
            self._refuse(self._failed)
            if time.monotonic() > end:
                self._order.compare()
                end, longer = time.monotonic() + longer, 2 * longer
        self._refuse(call.error or self._failed)
        return call.result

    def _refuse(self, error):
        """Raises an error of the thread, if there is one."""
        if error is None:
            return
        if not type(error).__module__.startswith("mpi4py"):
            # This worker's own, such as too little memory for a result.
            raise error
        self._check_peers()
        raise RuntimeError(f"Broken pipe to another worker: {error}")

    def _serve(self):
        """Makes the calls one after the other, in MPI's thread."""
        while True:
            try:
                call = self._work.get(timeout=PROGRESS_S if self.sending else None)
            except queue.Empty:
                self.sending = [each for each in self.sending if self._is_under_way(*each)]
                continue
            try:
                call.result = call.method(*call.arrays)
            except Exception as error:
                call.error = error
                if not call.is_awaited:
                    self._failed = error
            call.arrays = None
            call.done.set()

    def _is_under_way(self, request, memory):
        try:
            return not request.Test()
        except Exception as error:
            self._failed = error
            return False
