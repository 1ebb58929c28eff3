"""Makes every tape of a training step return the gradients of the whole batch.

Within a Keras step on several replicas, `tf.GradientTape.gradient` with respect to variables
weights the target where the backward pass begins (see `tfmulti.step.weighting`), and adds the
gradients over all replicas. All later code, such as an optimizer, manual clipping, a second
backward pass or `assign_sub`, then has the same values on every replica. The idea is that of
Horovod's `DistributedGradientTape` (Sergeev and Del Balso, 2018,
https://arxiv.org/abs/1802.05799).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.runtime.scoped import Scoped
from tfmulti.step import (
    local_steps,
    parameters,
    sharded_state,
    sparse_gradients,
    weighting,
)
from tfmulti.step.first_replica import gradients_of_first_replica, in_replicated_step
from tfmulti.step.rows import current_replica_batch, in_this_graph
from tfmulti.step.sums import add_by_dtype, values_of_gradient, with_values

_state_of_thread = Scoped(None)
_unreduced = Scoped(False)
_of_inputs: weakref.WeakSet = weakref.WeakSet()
_IN_BRANCH = (
    "Replicas must not reduce within tf.cond, tf.while_loop or tf.map_fn: one replica could enter "
    "the branch and another not. Received: a gradient with respect to variables, synchronized "
    "batch normalization or another reduction in a branch or a loop of a step. Take gradients "
    "before the branch, and put only `optimizer.apply` into it."
)


@dataclasses.dataclass
class _StepState:
    """What tapes have done in the function that a thread traces for a replica.

    Attributes:
        reduced: Whether gradients are those of the whole batch.
        applied: Whether an optimizer has applied some since.
        deferred: Whether their reduction is left to the accumulating optimizer.
        weighted: Whether a target was multiplied by the replica's weight.
        in_step: Whether this is within such a function.
        notes: What else is kept until the outermost such function of the thread ends.
    """

    reduced: bool = False
    applied: bool = True
    deferred: bool = False
    weighted: bool = False
    in_step: bool = False
    notes: dict = dataclasses.field(default_factory=dict)


def _state() -> _StepState:
    """Returns the state of this thread's step, or one of its own outside of steps."""
    if _state_of_thread.value is None:
        _state_of_thread.value = _StepState()
    return _state_of_thread.value


def no_sync() -> contextlib.AbstractContextManager:
    """Makes tapes within the context return local, unreduced gradients.

    Use it to accumulate gradients over parts of a batch within one step, and then call
    `reduce_gradients` once on the sum. Do not keep local gradients in variables from one step to
    the next: after each step, such variables are averaged over replicas, weighted by rows. To
    accumulate over steps with one reduction for each update, use Keras's
    `gradient_accumulation_steps`. The name is that of PyTorch's `DistributedDataParallel.no_sync`.

    Example:
    >>> with no_sync():
    ...     with tf.GradientTape() as tape:
    ...         x = tf.Variable(3.0)
    ...         y = x * x
    ...     part = tape.gradient(y, x)
    >>> float(reduce_gradients([part])[0])
    6.0
    """
    return _unreduced.set_to(True)


def reduce_gradients(grads) -> list:
    """Adds gradients of each replica's rows over all replicas.

    Args:
        grads: Gradients that were taken within `no_sync`, or means over this replica's rows that
            were computed from the gradients of single rows; a list of tensors, `tf.IndexedSlices`
            and None.

    Returns:
        The gradients of the whole batch, in the same order; on one replica the list unchanged.
    """
    grads = list(grads)
    if not topology.is_one_of_several_replicas():
        return grads
    _state().reduced = True
    replica_batch = current_replica_batch()
    if replica_batch is not None and not _state().weighted:
        # They come from `jacobian` or `tf.gradients`, not from a tape's `gradient`.
        grads = [None if grad is None else _scaled(grad, replica_batch.weight) for grad in grads]
    return _reduce_present(grads, [None] * len(grads), replica_batch)


@contextlib.contextmanager
def one_update(grads) -> Iterator[list]:
    """Yields the gradients of the whole batch for one update; reduces them if no tape has done so.

    In a loop of the user's own, plain tapes reduce nothing: each optimizer adds what it gets over
    replicas, as under TensorFlow's own strategies, but before it clips.

    Args:
        grads: The optimizer's input, a list of tensors, `tf.IndexedSlices` and None.
    """
    state = _state()
    reduced = state.reduced
    if in_replicated_step():
        yield gradients_of_first_replica(grads)
    else:
        yield list(grads) if has_reduced() else reduce_gradients(grads)
    state.applied = True
    # Every optimizer of such a loop adds its own gradients: this reduction is not the next one's.
    if current_replica_batch() is None:
        state.reduced = reduced


def has_reduced() -> bool:
    """Whether a tape has reduced gradients in the step that this thread traces."""
    return _state().reduced


def is_reduction_deferred() -> bool:
    """Whether a tape has left the reduction of its gradients to the accumulating optimizer."""
    return _state().deferred


def with_step_state(fn, reduced: bool = False):
    """Wraps the function that a replica runs, to record whether its tapes have reduced gradients.

    Args:
        fn: A step, or a part of one.
        reduced: Whether its gradients are already those of the whole batch.
    """

    @functools.wraps(fn)
    def step(*args, **kwargs):
        notes = notes_of_step()
        state = _StepState(reduced=reduced, in_step=True, notes={} if notes is None else notes)
        try:
            with _state_of_thread.set_to(state), _unreduced.set_to(False), in_this_graph():
                return fn(*args, **kwargs)
        except RuntimeError as error:
            if "merge_call` called while defining" not in str(error):
                raise
            raise ValueError(_IN_BRANCH) from error

    return step


def in_step() -> bool:
    """Whether this thread traces a function that a replica runs."""
    return _state().in_step


def notes_of_step() -> dict | None:
    """Returns what is kept until the step that this thread traces ends; None outside of steps."""
    return _state().notes if in_step() else None


def inlines_functions() -> bool:
    """Whether a `tf.function` that this thread calls is traced as a part of the current step.

    That is so in a Keras step on several replicas, where a replica computes the result of one
    device, and where new values of variables are recorded, as in a step for parameter servers: a
    trace of its own would leave them in its graph.
    """
    if keras_compat.is_recording():
        return True
    is_reference = keras_compat.computes_like_one_device(tf.distribute.get_strategy())
    return in_step() and (current_replica_batch() is not None or is_reference)


def has_taken_of_inputs(model: keras.Model) -> bool:
    """Whether a step of a model has taken a gradient with respect to inputs, not variables."""
    return model in _of_inputs


def take_gradient(
    defers_reduction, original, tape, target, sources, output_gradients=None, **kwargs
):
    """Replaces `tf.GradientTape.gradient`.

    Args:
        defers_reduction: Function that returns whether a model's optimizer reduces gradients.
        original: TensorFlow's own method.
        tape: The tape.
        target: The value to differentiate.
        sources: The variables or tensors with respect to which to differentiate.
        output_gradients: Gradients of the target. Where the target is reduced gradients, as in a
            product with the Hessian, the result is reduced. Otherwise a caller that passes them
            runs a partial backward pass, such as that of recomputed activations; its gradients
            stay unreduced.
        **kwargs: Further arguments of `original`.
    """
    sources = _as_read(sources)
    replica_batch = current_replica_batch()
    flat = tf.nest.flatten(sources)
    is_variable = [isinstance(source, tf.Variable | keras.Variable) for source in flat]
    is_reduced = replica_batch is not None and replica_batch.are_reduced(target)
    is_partial = output_gradients is not None and not is_reduced
    if replica_batch is not None and replica_batch.model is not None and not any(is_variable):
        _of_inputs.add(replica_batch.model)
    several = replica_batch is not None and topology.is_one_of_several_replicas()
    if replica_batch is None and any(is_variable):
        _note_plain_gradients()
    if is_partial or not several or not any(is_variable):
        grads = original(tape, target, sources, output_gradients, **kwargs)
        is_of_weights = output_gradients is None and all(is_variable)
        return _of_local_step(grads, replica_batch) if is_of_weights else grads
    ends = [_as_tensor(tensor) for tensor in tf.nest.flatten(target)]
    roots = weighting.initial_gradients(ends, output_gradients, replica_batch)
    grads = original(tape, ends, flat, roots, **kwargs)
    parts = [sparse_gradients.parts_of(grad) for grad in grads]
    owners = [place for place, some in enumerate(parts) for _ in some]
    is_unreduced = [parameters.is_unreduced(source) for source in flat]
    is_summed = [variable and left for variable, left in zip(is_variable, is_unreduced)]
    values = [part for some in parts for part in some]
    own = [v if parameters.may_have_dummy_row(flat[i]) else None for i, v in zip(owners, values)]
    own = _without_dummy_row(own, replica_batch)
    values = [value if mine is None else mine for value, mine in zip(values, own)]
    _state().weighted = True
    if all(is_variable) and defers_reduction(replica_batch.model):
        # The update reduces the accumulated gradients; see `tfmulti.step.accumulation`.
        _state().reduced = _state().deferred = True
    elif not _unreduced.value:
        _state().reduced, _state().applied = True, False
        chosen = [value if is_summed[i] else None for value, i in zip(values, owners)]
        sums = _reduce_present(chosen, [flat[i] for i in owners], replica_batch)
        values = [value if total is None else total for value, total in zip(values, sums)]
    values = iter(values)
    grads = [sparse_gradients.join([next(values) for _ in some]) for some in parts]
    if has_reduced() and not _unreduced.value and not is_reduction_deferred():
        replica_batch.note_reduced(g for g, summed in zip(grads, is_summed) if summed)
    # Gradients of inputs are of this replica's rows: the weight of the target is taken out.
    inverse = weighting.inverse_weight(replica_batch)
    grads = [
        g if known or g is None else _scaled(g, inverse) for g, known in zip(grads, is_variable)
    ]
    return tf.nest.pack_sequence_as(sources, grads)


def _note_plain_gradients():
    """Notes that a plain tape of a loop of the user's own leaves its gradients unreduced."""
    state = _state()
    if not state.in_step or not topology.is_one_of_several_replicas():
        return
    if state.reduced and not state.applied:
        raise ValueError(
            "In a custom training loop, `tfmulti.DistributedGradientTape` all-reduces gradients "
            "and a plain `tf.GradientTape` does not. Received: gradients from both, before an "
            "optimizer applied either. Use DistributedGradientTape for both, or apply the first "
            "gradients before taking the second."
        )
    state.reduced = False


def _of_local_step(grads, replica_batch):
    """Returns the gradients of a local step, which are 0 if the worker has no rows."""
    if replica_batch is None or not local_steps.in_local_step():
        return grads
    values = _without_dummy_row(tf.nest.flatten(grads), replica_batch)
    return tf.nest.pack_sequence_as(grads, values)


def _reduce_values(grads, kinds, compression, owners) -> list:
    """Adds gradients over all replicas, and optionally sends dense ones in half precision.

    Args:
        grads: The gradients, none of them None.
        kinds: For each gradient, how the rows of its table were read; see `sparse_gradients`.
        compression: The dtype in which to send, or None.
        owners: For each gradient, the worker that alone needs the sum, or None if all need it; None
            instead of a list if all need all. Sparse and half-precision gradients are added for
            all workers.
    """
    if not grads:
        return []
    # Positions: all replicas have the same rows of the table, so only the values are added.
    grads = sparse_gradients.with_equal_lengths(grads, kinds)
    at_positions = [kind == sparse_gradients.POSITIONS for kind in kinds]
    sent = [grad.values if same else grad for grad, same in zip(grads, at_positions)]
    dtypes = [grad.dtype for grad in sent]
    is_full = [not isinstance(grad, tf.IndexedSlices) and grad.dtype.size > 2 for grad in sent]
    if compression is not None:
        sent = [tf.cast(grad, compression) if f else grad for grad, f in zip(sent, is_full)]
    owners = [None] * len(sent) if compression is not None or owners is None else owners
    owners = [owner if f else None for owner, f in zip(owners, is_full)]
    added = add_by_dtype(sent, owners)
    added = [tf.cast(grad, dtype) if f else grad for grad, dtype, f in zip(added, dtypes, is_full)]
    added = [
        with_values(grad, total) if same else total
        for total, grad, same in zip(added, grads, at_positions)
    ]
    return [
        sparse_gradients.add_equal_rows(grad) if kind == sparse_gradients.UNIQUE else grad
        for grad, kind in zip(added, kinds)
    ]


def _reduce_present(grads, variables, replica_batch) -> list:
    """Reduces gradients, some of which may be None; their variables may be unknown, None."""
    model = replica_batch.model if replica_batch is not None else None
    present = [(g, v) for g, v in zip(grads, variables) if g is not None]
    kinds = [_kind_of(g, v, model) for g, v in present]
    compression = _compression(model)
    owners = None
    # What the user reduces by hand may be read on every worker.
    if all(variable is not None for _, variable in present):
        owners = sharded_state.owners_of_gradients(model, [variable for _, variable in present])
    reduced = iter(_reduce_values([g for g, _ in present], kinds, compression, owners))
    return [None if grad is None else next(reduced) for grad in grads]


def _compression(model) -> str | None:
    optimizer = getattr(model, "optimizer", None)
    # Under loss scaling the user can have wrapped either of the two optimizers.
    inner = keras_compat.inner_optimizer(optimizer)
    return marks.COMPRESSION.get(optimizer) or marks.COMPRESSION.get(inner)


def _kind_of(grad, variable, model) -> str:
    """Returns how the rows of a gradient's table were read."""
    if tf.executing_eagerly():
        return sparse_gradients.noted_kind(grad, variable, model)
    return sparse_gradients.kind_of(grad)


def _without_dummy_row(grads, replica_batch):
    """Sets the gradients of an empty replica batch to 0; multiplying by 0 would keep NaN."""
    if not replica_batch.may_be_empty:
        return grads
    present = [grad for grad in grads if grad is not None]
    if not present:
        return grads
    values = [tf.convert_to_tensor(values_of_gradient(grad)) for grad in present]
    values = tf.cond(
        replica_batch.num_real > 0,
        lambda: [tf.identity(value) for value in values],
        lambda: [tf.zeros_like(value) for value in values],
    )
    made = iter(with_values(grad, value) for grad, value in zip(present, values))
    return [None if grad is None else next(made) for grad in grads]


def _scaled(grad, factor):
    values = values_of_gradient(grad)
    return with_values(grad, values * tf.cast(factor, values.dtype))


def _as_read(sources):
    """Returns sources; across replicas the copy that was read, as on one device."""
    if not tf.distribute.in_cross_replica_context():
        return sources
    with keras_compat.held_values():
        return tf.nest.map_structure(_one_copy, sources)


def _one_copy(source):
    value = source.value if isinstance(source, keras.Variable) else source
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


def _as_tensor(value):
    return tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value
