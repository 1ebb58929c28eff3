"""`--estimate_memory N`: prints the memory that each of N workers would need, without training.

The peak of a step is that of its graph: TensorFlow traces the step with the batch of one worker,
and the sizes of its tensors are added and taken away again in the order in which they are made.
TensorFlow runs an operation once its inputs are there, on several threads: the order is not known,
and the largest of three peaks counts. Layers with sharded weights compute again for gradients.
All gradients are there until the end of the update, as the check for finite numbers needs them;
those of another owner, until they are sent.
The process itself, its data and TensorFlow's runtime are measured, with a model of one weight.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from rich.table import Table

from tfmulti import devices, keras_compat
from tfmulti.choices import SHARDS
from tfmulti.cluster import mpi
from tfmulti.data import distribute_train
from tfmulti.data.datasets import load_dataset
from tfmulti.parallel import sharded_parameters
from tfmulti.runtime import console, memory
from tfmulti.step import model_contents, owners, parameters, split_weights
from tfmulti.step.rows import zeros_of
from tfmulti.strategies import create_strategy
from tfmulti.strategies.multi_worker import RING_BUCKET_BYTES
from tfmulti.train.config import TrainConfig
from tfmulti.train.models import compile_model, create_model, prepare_keras

# Their outputs are their inputs' memory.
_SAME_MEMORY = (
    *("Identity", "IdentityN", "PreventGradient", "Snapshot", "StopGradient"),
    *("Bitcast", "ExpandDims", "ReadVariableOp", "Reshape", "Squeeze"),
)
# They write into an input that nothing else needs any more.
_IN_PLACE = (
    *("Add", "AddN", "AddV2", "BiasAdd", "Maximum", "Minimum", "Mul", "Neg", "Pow", "RealDiv"),
    *("Exp", "Log", "Log1p", "Rsqrt", "Sqrt", "Square", "Sub", "Erf", "Erfc", "Cast"),
    *("Relu", "ReluGrad", "Sigmoid", "SigmoidGrad", "Tanh", "TanhGrad", "Softmax", "LogSoftmax"),
    *("Select", "SelectV2"),
)
_NO_MEMORY = ("Const", "Placeholder", "VarHandleOp")
# What malloc holds beside tensors: a fraction of these. On two kinds of CPU it was 0.05 to 0.35;
# with glibc's `MALLOC_MMAP_THRESHOLD_`, which returns large tensors at once, it was below 0.08.
_ALLOCATED = 0.2
# They have graphs of their own, in which tensors are not counted.
_INNER_GRAPHS = (
    *("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"),
    *("PartitionedCall", "StatefulPartitionedCall"),
)
# NCCL joins all gradients: they are there once more, and what is sent and what is received.
_COPIES_OF_NCCL = 3
# The ring sends two buckets at once, to each worker: measured with two and four.
_BUCKETS_OF_RING = 2

SHARDED = ("copies", *SHARDS)
"""What is sharded: nothing, the optimizer's state, or large weights as well."""
_PARTS = ("process", "weights", "slots", "step", "communication", "allocator", "peak")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one worker needs, in bytes.

    Attributes:
        process: Python, TensorFlow and the data.
        weights: The model's variables.
        slots: The optimizer's, of the worker that has the most.
        step: Activations and gradients, at the moment when they are largest.
        communication: What is sent and received of gradients.
        has_inner_graphs: Whether the step has loops, branches or functions, whose memory is not
            known.
    """

    process: int
    weights: int
    slots: int
    step: int
    communication: int
    has_inner_graphs: bool

    @property
    def allocator(self) -> int:
        """What malloc allocates beside tensors."""
        return round(_ALLOCATED * self._counted)

    @property
    def peak(self) -> int:
        """All of it."""
        return self._counted + self.allocator

    @property
    def _counted(self) -> int:
        return self.process + self.weights + self.slots + self.step + self.communication


def show(config: TrainConfig) -> None:
    """Prints what a worker needs, by what is sharded, and with checkpointed activations."""
    num_workers = config.estimate_memory
    names = ("sharded", "activations", *_PARTS)
    table = Table(*names, title=f"Memory of each of {console.count(num_workers, 'worker')}")
    states = SHARDED if num_workers > 1 else SHARDED[:1]
    kept = estimate(dataclasses.replace(config, checkpoint_activations=False))
    notes = []
    for state in states:
        table.add_row(state, "kept", *_sizes(kept[state]))
    try:
        less = estimate(dataclasses.replace(config, checkpoint_activations=True))
    except ValueError as error:
        notes.append(f"Activations cannot be checkpointed: {error}")
    else:
        for state in states:
            # The first model has left memory behind when the second is made.
            each = dataclasses.replace(less[state], process=kept[state].process)
            table.add_row(state, "checkpointed", *_sizes(each))
    console.create_console().print(table)
    if kept["copies"].has_inner_graphs:
        notes.append(
            "The step has loops, branches or functions (recurrent layers, tf.cond, @tf.function): "
            "what they keep is not counted."
        )
    if devices.has_gpu():
        notes.append("All but the process is in the memory of the GPU.")
    for note in notes:
        print(note)


def _sizes(each) -> list[str]:
    return [memory.show_size(getattr(each, name)) for name in _PARTS]


def estimate(config: TrainConfig) -> dict[str, Estimate]:
    """Returns what a worker with one replica needs, by what is sharded; see `SHARDED`.

    The model is created here, its weights and slots too; no step is run.

    Args:
        config: The run, with `estimate_memory` for the number of workers.
    """
    num_workers = config.estimate_memory
    strategy = create_strategy("one_device", verify="never")
    prepare_keras(config)
    split, _ = load_dataset(config.dataset)
    rows = -(-config.resolve_global_batch_size(num_workers) // num_workers)
    train = distribute_train(split, strategy, rows, seed=config.seed)
    _run_a_small_step()
    if num_workers > 1 and config.communication == "mpi":
        # Its buffers are a part of each process.
        mpi.world()
    before = memory.resident()
    model = _compiled_model(config, split, strategy, train)
    graph, gradients = _trace(model, strategy, train.element_spec, rows)
    weights = sum(map(owners.bytes_of, model.variables))
    slots = _bytes_of_all(each.variables for each in _optimizers(model))
    whole = Estimate(
        # Tracing takes memory too.
        process=max(before, memory.resident() - weights - slots),
        weights=weights,
        slots=slots,
        step=peak_of(graph, [gradient for gradient in gradients if gradient is not None]),
        communication=_bytes_to_send(config, model) if num_workers > 1 else 0,
        has_inner_graphs=any(op.type in _INNER_GRAPHS for op in graph.get_operations()),
    )
    if num_workers == 1:
        return {"copies": whole}
    state = _with_sharded_state(whole, model, num_workers, (graph, gradients))
    sharded_parameters.recompute_as_if_sharded(model)
    step = _trace(model, strategy, train.element_spec, rows)
    sharded = _with_sharded_weights(whole, model, num_workers, step)
    return {"copies": whole, "state": state, "parameters": sharded}


def _bytes_to_send(config, model) -> int:
    """Returns the bytes that are in memory, beside the gradients, while these are added."""
    sizes = [*map(owners.bytes_of, model.trainable_variables), 0]
    if config.communication == "mpi":
        # Small ones are joined, a large one is sent by itself.
        return max(sizes)
    if config.communication == "nccl" or (config.communication == "auto" and devices.has_gpu()):
        return _COPIES_OF_NCCL * sum(sizes)
    bucket = RING_BUCKET_BYTES if config.bucket_bytes is None else config.bucket_bytes
    # Without buckets all are joined.
    joined = max(bucket, *sizes) if bucket else sum(sizes)
    return _BUCKETS_OF_RING * config.estimate_memory * min(joined, sum(sizes))


def _compiled_model(config, split, strategy, train) -> keras.Model:
    """Returns the compiled model, with all variables of its optimizer."""
    with strategy.scope():
        model = create_model(config.model, split)
        if not model.built:
            model(zeros_of(train.element_spec[0], 1))
        compile_model(model, dataclasses.replace(config, shard=None), train)
        keras_compat.inner_optimizer(model.optimizer).build(model.trainable_variables)
    return model


def _optimizers(model):
    return model_contents.optimizers_of(model, nested=True)


def _with_sharded_state(whole, model, num_workers, step) -> Estimate:
    """Returns what the worker needs that updates the most, with whole weights.

    Args:
        whole: What a worker needs where nothing is sharded.
        model: The model.
        num_workers: The number of workers.
        step: The graph of a step, and a gradient or None for each trainable weight.
    """
    owned_by, updated = _updates(model, num_workers, by_rows=True)
    graph, gradients = step
    kept, sent = _kept_and_sent(gradients, owned_by, updated.index(max(updated)))
    undivided = _bytes_of_all(map(keras_compat.averages_and_sums, _optimizers(model)))
    slots = _slots_of_most(whole.slots, undivided, model, max(updated))
    return dataclasses.replace(whole, slots=slots, step=peak_of(graph, kept, sent))


def _updates(model, num_workers, by_rows) -> tuple[list[int | None], list[int]]:
    """Returns the worker that updates each trainable weight, and the bytes of each worker's."""
    optimizer, weights = keras_compat.inner_optimizer(model.optimizer), model.trainable_variables
    owned_by = split_weights.owners_of_updates(optimizer, weights, num_workers, by_rows)
    return owned_by, owners.bytes_of_each(weights, num_workers, owned_by)


def _slots_of_most(slots, undivided, model, most) -> int:
    """Returns the bytes of slots of the worker that updates the most bytes of weights.

    Args:
        slots: The bytes of all slots.
        undivided: Of these, the bytes that every worker has for all weights.
        model: The model.
        most: The bytes of weights that this worker updates.
    """
    trainable = sum(map(owners.bytes_of, model.trainable_variables))
    return undivided + round((slots - undivided) * most / max(1, trainable))


def _bytes_of_all(lists) -> int:
    """Returns the bytes of variables, each once: one optimizer may hold those of another."""
    variables = {id(variable): variable for each in lists for variable in each}
    return sum(map(owners.bytes_of, variables.values()))


def _kept_and_sent(gradients, owned_by, worker) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the dense gradients whose sums a worker keeps, and those of other owners."""
    pairs = [(g, owner) for g, owner in zip(gradients, owned_by) if g is not None]
    # Of one that is divided by rows, each worker keeps some.
    kept = [gradient for gradient, owner in pairs if owner in (worker, None)]
    return kept, [gradient for gradient, owner in pairs if owner not in (worker, None)]


def _with_sharded_weights(whole, model, num_workers, step) -> Estimate:
    """Returns what the worker needs that holds the most of the large weights.

    Args: see `_with_sharded_state`; `step` is that of layers which compute again for gradients.
    """
    large = [v for v in model.variables if parameters.is_large(v)]
    sizes = [owners.bytes_of(v) for v in large]
    owned_by = owners.in_order(sizes, num_workers)
    held = owners.bytes_of_each(large, num_workers, owned_by)
    owner_of = {id(v): owner for v, owner in zip(large, owned_by)}
    graph, gradients = step
    trainable_by = [owner_of.get(id(v)) for v in model.trainable_variables]
    kept, sent = _kept_and_sent(gradients, trainable_by, held.index(max(held)))
    _, updated = _updates(model, num_workers, by_rows=False)
    return dataclasses.replace(
        whole,
        weights=whole.weights - sum(sizes) + max(held, default=0),
        slots=_slots_of_most(whole.slots, 0, model, max(updated)),
        # A weight is gathered for one layer at a time; then its gradient is sent.
        step=peak_of(graph, kept, sent) + max(sizes, default=0),
    )


def peak_of(graph: tf.Graph, kept: Sequence[tf.Tensor] = (), sent: Sequence[tf.Tensor] = ()) -> int:
    """Returns the most bytes that a graph's tensors take together, in the worst of three orders.

    They are: the order of the program, and that in which of the operations whose inputs are there
    the first, or the last, runs next. Tensors whose shapes are unknown, and what loops and called
    functions keep, are not counted.

    Args:
        graph: The graph of a step.
        kept: Tensors that are needed to the end.
        sent: Tensors that another worker needs, and not this one.

    Example:
    >>> function = tf.function(lambda x: tf.reduce_sum(tf.matmul(x, x) @ x))
    >>> peak_of(function.get_concrete_function(tf.TensorSpec([10, 10])).graph)
    800
    """
    ops = graph.get_operations()
    orders = [ops, _as_inputs_come(ops, first=True), _as_inputs_come(ops, first=False)]
    return max(_peak_in_order(each, kept, sent) for each in orders)


def _as_inputs_come(ops, first: bool) -> list[tf.Operation]:
    """Returns operations in an order in which they can run: the first, or the last, that can."""
    missing, readers = {}, collections.defaultdict(list)
    for op in ops:
        before = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
        missing[op] = len(before)
        for each in before:
            readers[each].append(op)
    # What needs no inputs begins in the order of the program.
    ready, ordered = collections.deque(op for op in ops if not missing[op]), []
    add = ready.append if first else ready.appendleft
    while ready:
        ordered.append(ready.popleft())
        for reader in readers[ordered[-1]]:
            missing[reader] -= 1
            if not missing[reader]:
                add(reader)
    return ordered


def _peak_in_order(ops, kept, sent) -> int:
    owner, size = {}, {}
    for op in ops:
        for output, tensor in enumerate(op.outputs):
            if op.type in _SAME_MEMORY and op.inputs:
                source = op.inputs[min(output, len(op.inputs) - 1)].ref()
                owner[tensor.ref()] = owner.get(source, source)
            else:
                size[tensor.ref()] = 0 if op.type in _NO_MEMORY else _bytes_of_tensor(tensor)
    last, numbers = {}, {op.name: number for number, op in enumerate(ops)}
    for number, op in enumerate(ops):
        for tensor in (*op.inputs, *op.outputs):
            last[owner.get(tensor.ref(), tensor.ref())] = number
    for tensor in kept:
        last[owner.get(tensor.ref(), tensor.ref())] = len(ops)
    for tensor in sent:
        made = owner.get(tensor.ref(), tensor.ref())
        last[made] = numbers[made.deref().op.name]
    ends = collections.defaultdict(list)
    for tensor, number in last.items():
        ends[number].append(size.get(tensor, 0))
    live = most = 0
    for number, op in enumerate(ops):
        new = sum(size.get(tensor.ref(), 0) for tensor in op.outputs)
        freed = ends[number]
        reused = min(new, max(freed, default=0)) if op.type in _IN_PLACE else 0
        most = max(most, live + new - reused)
        live += new - sum(freed)
    return most


def _run_a_small_step():
    """Starts TensorFlow's runtime, which takes memory at the first step."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0)


def _trace(model, strategy, spec, rows) -> tuple[tf.Graph, list[tf.Tensor | None]]:
    """Returns the graph of a training step with a batch of so many rows, and its gradients.

    There is one for each trainable weight; None for a sparse one.
    """
    gradients, apply = [], model.optimizer.apply

    def noting(grads, *args, **kwargs):
        grads = list(grads)
        # A step can be traced more than once; the last trace is the one that is kept.
        gradients[:] = [grad if isinstance(grad, tf.Tensor) else None for grad in grads]
        return apply(grads, *args, **kwargs)

    object.__setattr__(model.optimizer, "apply", noting)
    spec = tf.nest.map_structure(
        lambda each: tf.TensorSpec([rows, *each.shape[1:]], each.dtype), spec
    )

    def step(*data):
        return strategy.run(model.train_step, args=(data,))

    function = tf.function(step, autograph=False)
    return function.get_concrete_function(*spec).graph, gradients


def _bytes_of_tensor(tensor) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
