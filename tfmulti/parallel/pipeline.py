"""Pipelines: a model's layers are on several workers or devices, and micro-batches pass through."""

from __future__ import annotations

import numbers

import keras
import tensorflow as tf

from tfmulti import devices as devices_lib
from tfmulti import keras_compat, marks, topology
from tfmulti.parallel.cutting import refuse_own_call, starts_at, starts_by_cost
from tfmulti.parallel.device_stages import DeviceStages
from tfmulti.parallel.layer_costs import estimated_costs, measured_costs
from tfmulti.parallel.stages import refuse_assigned_weights
from tfmulti.parallel.worker_stages import WorkerStages
from tfmulti.settings import check_type, check_whole_number
from tfmulti.step import normalization, split_weights


def pipeline(
    model: keras.Model,
    stages: int | list[str] | None = None,
    micro_batches: int = 4,
    checkpoint_activations: bool = False,
    measure_rows: int | None = None,
    devices: list[str] | None = None,
) -> keras.Model:
    """Cuts a model into stages, each on a worker or a device, and passes micro-batches through.

    Each worker, or each of `devices`, holds only the weights of its stage, with their gradients
    and slots. The rows of all stages' workers are cut into micro-batches: while one stage computes
    the second micro-batch, the next stage computes the first. Losses, gradients and metrics are
    those of the whole batch. With more workers than stages there are copies of the stages, which
    share the rows. With one replica in total and no `devices`, the call has no effect.

    Args:
        model: A built Functional or Sequential model, created in the strategy's scope. If it is
            created within `tfmulti.sharded_parameters()`, no worker or device ever holds all of it.
        stages: The number of stages, which must divide the number of workers; None for the number
            of workers or devices. The model is then cut so that stages compute about the same
            amount. Or a list of the names of the layers at which the second and later stages begin.
        micro_batches: The number of micro-batches of a step. With s stages and m micro-batches a
            stage is idle for (s - 1) / (m + s - 1) of the time, so more of them waste less.
        checkpoint_activations: Whether each stage keeps only its inputs, and runs again for the
            gradients of a micro-batch.
        measure_rows: The number of rows on which worker 0 times each layer, so that the stages take
            equal times; use the rows of a micro-batch. None estimates costs from the weights.
        devices: The devices of this process for the stages of a model of `one_device`, such as
            `["GPU:0", "GPU:1"]`, in the order of the stages; None for stages on workers.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is not Functional or Sequential, has a `call` of its own, cannot be
            cut that way, has been compiled, or has synchronized batch normalization with several
            micro-batches; if the number of workers is not a multiple of the stages, or workers have
            several replicas or no MPI; if `devices` do not exist, are not one for each stage, or
            the strategy is not `one_device`; if two stages would change the same state; if another
            pipeline has a layer in another stage; when it is called, if its layers have changed.

    Example:
        >>> import tfmulti
        >>> strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
        >>> with strategy.scope():
        ...     hidden = [keras.layers.Dense(4) for _ in range(3)]
        ...     model = keras.Sequential([keras.Input((4,)), *hidden])
        ...     model = tfmulti.pipeline(model, micro_batches=2)

    Sources: Huang et al., 2019, "GPipe: Efficient Training of Giant Neural Networks using
    Pipeline Parallelism".
    """
    stages = _check_stages(stages)
    _refuse_model(model, micro_batches)
    _refuse_layers(model, micro_batches)
    advice = "Call it once, and do what is not Keras's in a layer, or use shard='parameters'."
    refuse_own_call(model, "pipeline", advice)
    _refuse_rows(measure_rows, stages)
    strategy = model.distribute_strategy
    topology.refuse_servers(strategy, "pipeline", "Use the strategy multi_worker, over MPI.")
    starts = starts_at(model, stages) if isinstance(stages, list) else None
    if strategy.num_replicas_in_sync == 1 and devices is None:
        return model
    if devices is None:
        _refuse_several_replicas(strategy)
    else:
        devices = _check_devices(strategy, devices)
    number = _number_of_stages(stages, strategy, devices)
    if devices is None:
        _refuse_workers(strategy, number)
    if starts is None:
        costs = measured_costs(model, measure_rows) if measure_rows else estimated_costs(model)
        starts = starts_by_cost(model, costs, number)
    settings = model, starts, int(micro_batches), checkpoint_activations
    staged = WorkerStages(*settings) if devices is None else DeviceStages(*settings, devices)
    staged.install()
    return model


def _check_stages(stages) -> int | list[str] | None:
    """Returns the number of stages as Python's own, or a list of names."""
    if isinstance(stages, str):
        return [stages]
    if stages is None or hasattr(stages, "__iter__"):
        return stages if stages is None else list(stages)
    # What is too small is told later, with the number of workers or devices.
    at_least = stages if isinstance(stages, numbers.Integral) else 2
    check_whole_number("stages", stages, "Use 2 for two of them, or names of layers.", at_least)
    return int(stages)


def _refuse_model(model, micro_batches):
    check_whole_number("micro_batches", micro_batches, "Use 4 for each stage.")
    advice = "Pass a built Functional or Sequential model."
    check_type("model", model, keras.Model, "a Keras model", advice)
    if not model.built or keras_compat.nodes_of(model) is None:
        raise ValueError(
            "`pipeline` needs a built Functional or Sequential model, whose graph it cuts. "
            f"Received: {model.name!r}, a {type(model).__name__} that "
            f"{'is neither' if model.built else 'has not been built'}. Give it an `Input`; "
            "for a subclassed model use shard='parameters'."
        )
    unsupported = [x for x in model.inputs if not _is_dense_number(x)]
    if unsupported:
        raise ValueError(
            "The inputs of a pipeline must be dense tensors of numbers. Received: the input "
            f"{unsupported[0].name}, of strings, sparse or ragged. Convert it in the dataset."
        )
    if getattr(model, "optimizer", None) is not None:
        raise ValueError(
            "`pipeline` must be called before `compile`. Received: "
            f"{model.name!r}, which is compiled. Call it first."
        )


def _refuse_layers(model, micro_batches):
    split = [v.path for v in model.weights if isinstance(v, split_weights.SplitParameter)]
    if split:
        raise ValueError(
            "`pipeline` cannot cut a model whose layers are split. Received: "
            f"{model.name!r}, with the split weight {split[0]}. Use either "
            "tfmulti.tensor_parallel or tfmulti.pipeline."
        )
    if any(map(marks.CHECKPOINTED.get, [model, *keras_compat.all_layers(model)])):
        raise ValueError(
            "`tfmulti.checkpoint_activations` cannot be combined with a pipeline, which has its "
            f"own option for it. Received: {model.name!r}, whose activations are checkpointed. "
            "Leave out that call, and use tfmulti.pipeline(..., checkpoint_activations=True)."
        )
    refuse_assigned_weights(
        layer.layer.weights[0].path
        for layer in keras_compat.all_layers(model)
        if isinstance(layer, keras.layers.SpectralNormalization)
    )
    stateful = keras_compat.stateful_layers(model)
    if stateful and micro_batches > 1:
        raise ValueError(
            "A layer with `stateful=True` keeps a state for each row of the batch, which has fewer "
            f"rows in a micro-batch. Received: {stateful[0].name}, stateful=True, "
            f"micro_batches={micro_batches}. Use micro_batches=1 or stateful=False."
        )
    synchronized = [layer.name for layer in normalization.synchronized_layers(model)]
    if synchronized and micro_batches > 1:
        raise ValueError(
            "Synchronized batch normalization needs the rows of the whole batch at once. "
            f"Received: {', '.join(synchronized)}, micro_batches={micro_batches}. Use "
            "micro_batches=1, synchronized=False for the statistics of each micro-batch, or "
            "keras.layers.GroupNormalization."
        )


def _refuse_rows(measure_rows, stages):
    if measure_rows is None:
        return
    is_number = isinstance(measure_rows, int) and measure_rows > 0 and measure_rows is not True
    if not is_number or not (stages is None or isinstance(stages, int)):
        raise ValueError(
            "`measure_rows` must be a number of rows to time layers on, without names in `stages`. "
            f"Received: measure_rows={measure_rows!r}, stages={stages!r}. Use the rows of a "
            "micro-batch, for example 8, or leave it out."
        )


def _is_dense_number(tensor):
    is_dense = not (getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False))
    return is_dense and tensor.dtype != "string"


def _check_devices(strategy, devices) -> list[str]:
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        raise ValueError(
            "`devices` must be used with one copy of the model, in one process. Received: "
            f"devices={list(devices)}, {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas. Create the model in the scope of "
            "tfmulti.create_strategy('one_device'); for copies of the stages start workers: "
            "python -m tfmulti.launch --mpi, without `devices`."
        )
    devices = devices_lib.check_devices(devices)
    if len(devices) < 2:
        raise ValueError(
            "`devices` must name two devices or more, one for each stage. "
            f"Received: devices={devices}. Name another one, or leave `devices` and `pipeline` out."
        )
    return devices


def _refuse_several_replicas(strategy):
    replicas = topology.num_local_replicas(strategy)
    if replicas > 1:
        raise ValueError(
            "`pipeline` needs workers with one replica each, or one process with one replica and "
            f"`devices`. Received: {replicas} replicas in this process. Use "
            "tfmulti.create_strategy('one_device') and devices=['GPU:0', 'GPU:1'] (tfmulti.train: "
            "--strategy one_device), or start one worker for each device: python -m "
            "tfmulti.launch --num_workers N --mpi."
        )


def _number_of_stages(stages, strategy, devices) -> int:
    most = topology.num_workers(strategy) if devices is None else len(devices)
    if stages is None:
        number = most
    else:
        number = stages if isinstance(stages, int) else len(stages) + 1
    if number < 2:
        places = "workers" if devices is None else "devices"
        raise ValueError(
            "`stages` must be two or more, or the names of the layers at which all stages but the "
            f"first begin. Received: stages={stages!r}, {most} {places}. Leave it out for one "
            f"stage on each; a pipeline needs at least two {places}."
        )
    if devices is not None and number != most:
        raise ValueError(
            "`devices` must name one device for each stage. "
            f"Received: devices={devices}, {number} stages. Leave `stages` out for one each."
        )
    return number


def _refuse_workers(strategy, number):
    workers = topology.num_workers(strategy)
    if workers % number:
        raise ValueError(
            "The number of workers must be a multiple of `stages`. "
            f"Received: {number} stages, {workers} workers. Start {number} workers, or a "
            f"multiple of that: python -m tfmulti.launch --num_workers {number} --mpi."
        )
    if getattr(strategy.extended, "send", None) is None:
        raise ValueError(
            "`pipeline` needs MPI, with which one worker sends to another. Received: "
            f"communication {strategy.communication}. Start the workers with python -m "
            "tfmulti.launch --mpi, after pip install 'tfmulti[mpi]'; on GPUs set communication "
            'to "mpi" (--communication mpi).'
        )
