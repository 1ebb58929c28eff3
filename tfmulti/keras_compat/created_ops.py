"""Lets the outputs of ops be replaced as the ops are created, or run, in one thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

from tensorflow.core.function.polymorphism import function_cache
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.polymorphic_function import function_context

_LOCAL = threading.local()
_LOCK = threading.Lock()
_INSTALLED: list[tuple] = []
_SCOPES: list[_Scope] = []


class _Scope:
    """One use of `replaced_ops`; it marks the traces of `tf.function`s that are made in it."""

    def __init__(self, replace):
        self.replace = replace
        self.traces = []

    def forget_traces(self):
        """Takes the traces out of the functions' caches; nobody finds them there again."""
        for cache, function_type, key in self.traces:
            cache.delete(function_type, key)
        self.traces.clear()


@contextlib.contextmanager
def replaced_ops(replace: Callable) -> Iterator[None]:
    """Lets the outputs of every op that is created or run in this thread be replaced.

    TensorFlow's callbacks of ops (`op_callbacks`) replace outputs in graphs, those of branches,
    loops and nested functions among them; eagerly they only look, and so both ways by which ops
    are run are surrounded as long as anybody is in here. Every `tf.function` that is called is
    traced anew, and no such trace is found by anybody else.

    Cures what a trace of before would do with its own outputs, outputs that stay replaced in a
    function that was traced within, and one replica's tensors in the trace of another.

    Args:
        replace: Function of an op's type, its inputs, its outputs, its name (None where it ran
            eagerly) and `eager`, that returns as many outputs, or None where they stay. What it
            creates in a graph is not given to it again; what it runs eagerly is.
    """
    scope, local = _Scope(replace), context.context()._thread_local_data
    before, callbacks = _current(), local.op_callbacks
    _install(scope)
    # A list of its own: the threads of replicas share their parent's.
    others = [callback for callback in callbacks if callback is not _on_created]
    _LOCAL.scope, local.op_callbacks = scope, [*others, _on_created]
    try:
        yield
    finally:
        _LOCAL.scope, local.op_callbacks = before, callbacks
        _uninstall(scope)
        scope.forget_traces()


def _current():
    return getattr(_LOCAL, "scope", None)


def _on_created(op_type, inputs, attrs, outputs, op_name=None, graph=None):
    scope = _current()
    if graph is None or scope is None:
        return None
    return scope.replace(op_type, inputs, outputs, op_name, eager=False)


def _on_run(op_type, inputs, outputs):
    """What an op that ran eagerly returns: one tensor by itself, or a list, as it was."""
    scope = _current()
    if scope is None:
        return outputs
    is_list = isinstance(outputs, (list, tuple))
    new = scope.replace(op_type, inputs, outputs if is_list else [outputs], None, eager=True)
    if new is None:
        return outputs
    return new if is_list else new[0]


def _around_fast_path(original):
    @functools.wraps(original)
    def run(ctx, op_type, name, *args):
        return _on_run(op_type, args, original(ctx, op_type, name, *args))

    return run


def _around_execute(original):
    @functools.wraps(original)
    def run(op_name, num_outputs, inputs, attrs, ctx, name=None):
        outputs = original(op_name, num_outputs, inputs, attrs, ctx, name)
        op_type = op_name.decode() if isinstance(op_name, bytes) else op_name
        return _on_run(op_type, inputs, outputs)

    return run


def _around_function_context(original):
    @functools.wraps(original)
    def make(*args, **kwargs):
        made, scope = original(*args, **kwargs), _current()
        return made if scope is None else made._replace(context=(made.context, scope))

    return make


def _around_add(original):
    @functools.wraps(original)
    def add(self, fn, context=None):
        original(self, fn, context)
        scope = _current()
        if scope is not None and context is not None and scope in context.context:
            scope.traces.append((self, fn.function_type, context))

    return add


_AROUND = (
    (pywrap_tfe, "TFE_Py_FastPathExecute", _around_fast_path),
    (execute, "execute", _around_execute),
    (function_context, "make_function_context", _around_function_context),
    (function_cache.FunctionCache, "add", _around_add),
)


def _install(scope):
    with _LOCK:
        if not _SCOPES:
            for holder, name, around in _AROUND:
                original = getattr(holder, name)
                _INSTALLED.append((holder, name, original))
                setattr(holder, name, around(original))
        _SCOPES.append(scope)


def _uninstall(scope):
    with _LOCK:
        _SCOPES.remove(scope)
        while not _SCOPES and _INSTALLED:
            setattr(*_INSTALLED.pop())
