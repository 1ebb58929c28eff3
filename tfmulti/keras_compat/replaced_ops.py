"""Replaces outputs of TensorFlow's ops, in graphs and eagerly, while a context lasts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

from tensorflow.core.function.polymorphism import function_cache
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.polymorphic_function import function_context

from tfmulti.runtime.scoped import Scoped

_SCOPE = Scoped(None)
_LOCK = threading.Lock()
_INSTALLED: list[tuple] = []
_SCOPES: list[_Scope] = []


class _Scope:
    """One use of `replaced_ops`; it marks the traces of `tf.function`s that are made in it."""

    def __init__(self, replace, observe):
        self.replace, self.observe = replace, observe
        self.traces = []

    def forget_traces(self):
        """Removes the traces from the functions' caches."""
        for cache, function_type, key in self.traces:
            cache.delete(function_type, key)
        self.traces.clear()


@contextlib.contextmanager
def replaced_ops(replace: Callable, observe: Callable | None = None) -> Iterator[None]:
    """Replaces outputs of ops that are created or run in this thread.

    TensorFlow's `op_callbacks` can replace outputs in graphs, including those of branches, loops
    and nested functions. For eager ops they can only observe, so both functions that run eager ops
    are wrapped while any thread is in the context. Every `tf.function` that is called is traced
    again, and code outside of the context never finds such a trace.

    Otherwise an older trace would keep its original outputs, a function traced within would keep
    its replaced ones, and one replica's tensors would be in another's trace.

    Args:
        replace: Function of an op's type, its inputs, its outputs, its name (None if it ran
            eagerly) and `eager`, that returns as many outputs, or None to keep them. It is not
            called for ops that it creates in a graph itself, but for those that it runs eagerly.
        observe: Function of each op's type, inputs and name, called first; None for none.
    """
    scope, local = _Scope(replace, observe), context.context()._thread_local_data
    callbacks = local.op_callbacks
    _install(scope)
    # A separate list: the threads of replicas share that of their parent.
    others = [callback for callback in callbacks if callback is not _on_created]
    # Once, also where contexts are nested: TensorFlow calls each entry of the list.
    local.op_callbacks = [*others, _on_created]
    try:
        with _SCOPE.set_to(scope):
            yield
    finally:
        local.op_callbacks = callbacks
        _uninstall(scope)
        scope.forget_traces()


def observed_ops(observe: Callable) -> contextlib.AbstractContextManager[None]:
    """Calls a function of the type, the inputs and the name of each op; none is replaced anew."""
    # Those that a context around this one replaces still are, and by the same function.
    return replaced_ops(current_replace() or _keep, observe)


def traces_of_its_own() -> contextlib.AbstractContextManager[None]:
    """Lets each `tf.function` that is called be traced anew, in a trace that nothing else finds."""
    scope = _SCOPE.value
    return replaced_ops(current_replace() or _keep, None if scope is None else scope.observe)


def _keep(*_, **__):
    return None


def _as_text(op_type: str | bytes) -> str:
    return op_type.decode() if isinstance(op_type, bytes) else op_type


def _on_created(op_type, inputs, attrs, outputs, op_name=None, graph=None):
    scope = _SCOPE.value
    if graph is None or scope is None:
        return None
    op_type = _as_text(op_type)
    if scope.observe is not None:
        scope.observe(op_type, inputs, op_name)
    return scope.replace(op_type, inputs, outputs, op_name, eager=False)


def _on_run(op_type, inputs, outputs):
    """Returns the outputs of an op that ran eagerly: a tensor or a list, like the original."""
    scope = _SCOPE.value
    if scope is None:
        return outputs
    if scope.observe is not None:
        scope.observe(op_type, inputs, None)
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
        return _on_run(_as_text(op_name), inputs, outputs)

    return run


def _around_function_context(original):
    @functools.wraps(original)
    def make(*args, **kwargs):
        made, scope = original(*args, **kwargs), _SCOPE.value
        return made if scope is None else made._replace(context=(made.context, scope))

    return make


def _around_add(original):
    @functools.wraps(original)
    def add(self, fn, context=None):
        original(self, fn, context)
        scope = _SCOPE.value
        if scope is not None and context is not None and scope in context.context:
            scope.traces.append((self, fn.function_type, context))

    return add


# TensorFlow's functions of ops take the fast path, and `execute` where it refuses an input.
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
        # Only the last one: other threads may still be in contexts of their own.
        while not _SCOPES and _INSTALLED:
            setattr(*_INSTALLED.pop())


def current_replace() -> Callable | None:
    """Returns the function that replaces ops in this thread, or None."""
    return getattr(_SCOPE.value, "replace", None)
