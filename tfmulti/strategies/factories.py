"""`create_strategy`, and one factory for each strategy."""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import os
from collections.abc import Mapping

import tensorflow as tf
from absl import logging

from tfmulti import cluster as cluster_lib
from tfmulti import devices as devices_lib
from tfmulti import keras_compat
from tfmulti.choices import (
    COMMUNICATIONS,
    DEFAULT_HEARTBEAT_TIMEOUT_S,
    ON_DIFFERENCE,
    REPLICATE,
    STRATEGIES,
    VERIFY,
)
from tfmulti.cluster import schedulers
from tfmulti.cluster.scheduler_variables import check_num_ps
from tfmulti.cluster.task import SERVER_TYPE
from tfmulti.parallel import activations, partitioned
from tfmulti.rendezvous import find_timeout
from tfmulti.settings import check_choice, check_used, check_whole_number
from tfmulti.step import (
    accumulation,
    finite,
    gradients,
    local_steps,
    logs,
    losses,
    rows,
    sharded_state,
    whole_batch,
)
from tfmulti.step.optimizer import distribute_loaded, update_of_keras
from tfmulti.strategies import (
    alike,
    checks,
    coordination,
    feeds,
    fit_callbacks,
    nested_calls,
    predict_on_batch,
    program_order,
    saving,
    spot_checks,
)
from tfmulti.strategies.base import (
    MirroredStrategy,
    OneDeviceStrategy,
    TPUStrategy,
    first_local_value,
)
from tfmulti.strategies.coordination import CoordinationRequests
from tfmulti.strategies.multi_worker import create_multi_worker, try_nccl
from tfmulti.strategies.parameter_server import create_parameter_server


def create_strategy(
    name: str = "auto",
    *,
    devices: list[str] | None = None,
    logical_cpus: int = 0,
    tf_config=None,
    communication: str = "auto",
    bucket_bytes: int | None = None,
    start_timeout: float | None = None,
    heartbeat_timeout: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    must_agree: Mapping[str, object] | None = None,
    verify: str = "auto",
    on_difference: str = REPLICATE,
    distribute_optimizers: bool = True,
    num_ps: int | None = None,
) -> tf.distribute.Strategy:
    """Creates a strategy by name.

    Args:
        name: `"one_device"`, `"mirrored"` (all local GPUs; without a GPU two logical
            CPUs), `"multi_worker"` (the cluster of TF_CONFIG, or of the scheduler: see
            `resolve_cluster`), `"parameter_server"` (a cluster with a chief, workers and
            servers; see `train_async` and `num_ps`), `"tpu"`, or `"auto"`: a TPU if there is one,
            else a cluster in the environment, else several GPUs, else one device. The log shows
            the choice and the reason.
        devices: TensorFlow's names, such as `["GPU:0", "GPU:1"]`; for `one_device` and
            `mirrored`.
        logical_cpus: Number of logical CPUs into which to split this machine's CPU; 0 does not
            split it. With `mirrored` and `multi_worker` each becomes a replica.
        tf_config: Path of a file or a folder with the cluster, or a mapping; by default the
            environment variable TF_CONFIG.
        communication: How workers add gradients, for `multi_worker`: `"nccl"` between GPUs,
            `"mpi"` between CPUs if MPI has started the job, `"ring"` for TensorFlow's own ring;
            `"auto"` uses the first one that applies.
        bucket_bytes: Bytes of small gradients that workers send together; by default 4 MiB over
            MPI, 16 MiB over TensorFlow's ring, and all of them over NCCL.
        start_timeout: Seconds that workers wait for one another; by default the environment
            variable TFMULTI_START_TIMEOUT, else 60.
        heartbeat_timeout: Seconds without a heartbeat after which a worker, or with
            `parameter_server` also a chief or a server, counts as lost; at least 1.
        must_agree: Settings that must be equal on all workers: a dict from names to values that
            JSON can represent.
        verify: Whether to check with a few rows, before the first step, that several replicas
            give the result of one device: `"always"`, `"never"`, or `"auto"` for models with
            custom parts only.
        on_difference: What happens to a step of which verification finds another result:
            `"replicate"` warns, and every replica computes the step from the whole global batch,
            with the result and the speed of one device; `"error"` raises an error.
        distribute_optimizers: Whether every optimizer that a step uses is distributed, also one
            that a library has created. False raises an error for an optimizer that is not wrapped
            in `DistributedOptimizer`.
        num_ps: For `parameter_server` in a scheduler's job: how many of its tasks, the last ones,
            are parameter servers; the first is the chief, the others are workers. By default
            the environment variable TFMULTI_NUM_PS.

    Returns:
        A `tf.distribute.Strategy`; its attribute `why` describes the choice and the reason.

    Raises:
        ValueError: For an argument that is unknown, that the strategy does not use, or that is
            incompatible with the others.
        RuntimeError: If devices or other workers are missing, workers have different settings, or
            TensorFlow was used before.

    Example:
    >>> strategy = create_strategy("one_device", devices=["CPU:0"])
    >>> strategy.num_replicas_in_sync
    1
    """
    checks.refuse_keras_distribution()
    # At this point the local names are the arguments.
    _check_arguments(locals())
    _check_heartbeats(heartbeat_timeout)
    _check_verification(verify, on_difference)
    check_num_ps(num_ps, name)
    _repair_keras()
    cluster, reason = _find_cluster(name, tf_config, num_ps), "as requested"
    if name == "auto":
        name, reason = _choose(cluster, devices, logical_cpus)
    elif cluster is not None:
        reason = f"as requested, {_origin(cluster)}"
    if name in ("one_device", "mirrored", "tpu"):
        schedulers.warn_of_others(os.environ, name, cluster)
    devices_lib.grow_gpu_memory()
    if logical_cpus:
        devices_lib.set_logical_cpus(logical_cpus)
    if name == "parameter_server":
        strategy = create_parameter_server(cluster, start_timeout, heartbeat_timeout)
        strategy.why = f"{name}: {_sizes(cluster)} ({reason})"
        strategy.verify = verify
        return _registered(strategy)
    strategy = _create(
        name,
        cluster,
        devices,
        logical_cpus,
        communication=communication,
        bucket_bytes=bucket_bytes,
        start_timeout=start_timeout,
        heartbeat_timeout=heartbeat_timeout,
        must_agree={"verify": verify, "on_difference": on_difference, **(must_agree or {})},
    )
    strategy.requests = CoordinationRequests(strategy.num_replicas_in_sync)
    names = ", ".join(d.split("device:")[-1] for d in strategy.extended.worker_devices)
    strategy.verify, strategy.on_difference = verify, on_difference
    strategy.distribute_optimizers = distribute_optimizers
    strategy.why = f"{name} on {names} ({reason})"
    if name == "multi_worker":
        strategy.why += f", over {strategy.communication}"
    keras_compat.mark_launchers(strategy)
    checks.note_strategy(strategy)
    if name == "multi_worker":
        try_nccl(strategy, find_timeout(start_timeout))
    return _registered(strategy)


def _create(name, cluster, devices, logical_cpus, **of_workers):
    if name == "tpu":
        return create_tpu()
    if name == "multi_worker":
        return create_multi_worker(cluster, logical_cpus=logical_cpus, **of_workers)
    create = create_mirrored if name == "mirrored" else create_one_device
    return create(devices, logical_cpus)


def _registered(strategy):
    keras_compat.note_strategy(strategy)
    logging.info("create_strategy: %s.", strategy.why)
    return strategy


def _find_cluster(name, tf_config, num_ps):
    """Returns the cluster that a strategy needs, and hides GPUs of other processes."""
    cluster = None
    blank = not os.environ.get("TF_CONFIG", "absent").strip()
    if name in ("auto", "multi_worker", "parameter_server") or blank:
        servers = name in ("auto", "parameter_server")
        cluster = cluster_lib.resolve_cluster(tf_config, servers=servers, num_ps=num_ps)
    if cluster is not None and cluster.visible_gpus is not None:
        devices_lib.see_gpus(cluster.visible_gpus)
    return cluster


def _sizes(cluster) -> str:
    kinds = ("chief", "worker", SERVER_TYPE)
    return ", ".join(f"{len(cluster.spec[kind])} {kind}" for kind in kinds)


def _before_call(model, name, given):
    data = given.get("x")
    checks.refuse_calls_on_servers(model, name)
    program_order.compare_call(model.distribute_strategy, name, given)
    local_steps.average_weights(model)
    for each in (data, given.get("validation_data")):
        feeds.refuse_behind_others(each)
    checks.check_scope(model, name, data)
    checks.adopt_optimizers(model, name)
    if name == "fit":
        # A callback of this `fit` may have every step reduce, which begins with whole sums.
        accumulation.settle_compiled(model)
    alike.compare(model, name, given)
    checks.before_call(model, name, data)


@contextlib.contextmanager
def _during_call(model, name):
    with (
        coordination.call_together(model, name),
        nested_calls.keeping_outer(model, name),
        keras_compat.shuffling_for(model),
        spot_checks.verifying_predictions(model, name),
        spot_checks.keeping_samples(model, name),
    ):
        yield


def _before_batch(model, name, given):
    checks.refuse_calls_on_servers(model, name)
    checks.adopt_optimizers(model, name)
    fit_callbacks.before_batch(model, name, given)
    between_averages = local_steps.num_pending(model) > 0
    if name == "test_on_batch" or (between_averages and local_steps.steps_of(model) == 1):
        local_steps.average_weights(model)


def _settle(model):
    """Makes the model the same on all workers, before code outside of steps reads it."""
    local_steps.average_weights(model)
    accumulation.settle_compiled(model)


def _repair_keras():
    keras_compat.install(
        accumulate=accumulation.accumulate,
        agree=coordination.agree_on_stopping,
        average_loss=losses.average_loss,
        before_batch=_before_batch,
        before_call=_before_call,
        during_call=_during_call,
        before_making=spot_checks.verify_again,
        watch=spot_checks.watched,
        before_pass=coordination.before_pass,
        before_saving=saving.before_saving,
        build_table=partitioned.build,
        build_by_step=checks.build_by_step,
        call_loss=whole_batch.call_loss,
        compare_variable=program_order.compare_variable,
        current_replica_batch=rows.current_replica_batch,
        distribute_loaded=distribute_loaded,
        first_local_value=first_local_value,
        gradients_are_global=gradients.has_reduced,
        inlines=gradients.inlines_functions,
        keep_swapped=sharded_state.keep_swapped,
        keep_means=losses.keep_means,
        more_callbacks=fit_callbacks.callbacks_for,
        notes_of_step=gradients.notes_of_step,
        once_built=checks.verify_once_built,
        predict=predict_on_batch.predict,
        prepare_callback=fit_callbacks.prepare_callback,
        recompute=activations.recomputed,
        reduce_loss=losses.reduce_loss,
        refuse=checks.refuse_outside_scope,
        regularization_loss=losses.regularization_loss,
        settle=_settle,
        take_gradient=functools.partial(gradients.take_gradient, accumulation.defers_reduction),
        finite_on_all=finite.finite_on_all,
        result_or_logs=program_order.result_or_logs,
        update_metric_function=whole_batch.update_metric_function,
        update_of_keras=update_of_keras,
        weight_mean=logs.weight_mean,
        note_result=logs.note_result,
    )


def _check_verification(verify, on_difference):
    advice = "Use 'auto' to verify models with custom parts only."
    check_choice("verify", verify, VERIFY, advice)
    advice = "Use 'replicate' for one device's result in every case."
    check_choice("on_difference", on_difference, ON_DIFFERENCE, advice)


def _check_arguments(given):
    advice = "Use 'auto' to have it chosen."
    check_choice("name", given["name"], STRATEGIES, advice)
    check_choice("communication", given["communication"], COMMUNICATIONS, advice)
    defaults, advice = create_strategy.__kwdefaults__, "Leave it out, or use {strategy!r}."
    gpus = "Leave it out; set CUDA_VISIBLE_DEVICES to choose among a worker's GPUs."
    check_used("name", {each: given[each] for each in ("name", "devices")}, defaults, gpus)
    check_used("name", given, defaults, advice)
    check_whole_number(
        "bucket_bytes", given["bucket_bytes"], "Leave it out for the default.", optional=True
    )
    if given["devices"] is not None:
        devices_lib.check_names(given["devices"])
    advice = "Use 0 to leave the CPU unsplit."
    check_whole_number("logical_cpus", given["logical_cpus"], advice, at_least=0)


def _check_heartbeats(timeout_s):
    # Workers send heartbeats, and look at servers, every second or so.
    if not isinstance(timeout_s, numbers.Real) or not 1 <= timeout_s < math.inf:
        raise ValueError(
            "`heartbeat_timeout` must be a number of seconds, at least 1. "
            f"Received: heartbeat_timeout={timeout_s!r}. "
            f"Leave it out for {DEFAULT_HEARTBEAT_TIMEOUT_S:g}."
        )


def _choose(cluster, devices, logical_cpus) -> tuple[str, str]:
    num_gpus = devices_lib.count_gpus()
    if devices is not None:
        name, why = ("mirrored" if len(devices) > 1 else "one_device"), f"devices={devices}"
    elif devices_lib.has_tpu() or cluster_lib.tpu_in_environment():
        name, why = "tpu", "there is a TPU"
    elif cluster is not None and cluster.has_servers:
        name, why = "parameter_server", _origin(cluster)
    elif cluster is not None and (cluster.num_workers > 1 or cluster.source == "TF_CONFIG"):
        name, why = "multi_worker", _origin(cluster)
    elif num_gpus > 1 or logical_cpus > 1:
        name, why = "mirrored", f"there are {num_gpus} GPUs, logical_cpus={logical_cpus}"
    else:
        name, why = "one_device", f"no TPU, no TF_CONFIG, {num_gpus} GPUs"
    return name, f"chosen because {why}"


def _origin(cluster) -> str:
    return f"{cluster.source} names a cluster: {cluster.describe()}"


def create_one_device(devices=None, logical_cpus=0) -> OneDeviceStrategy:
    """Creates a strategy with one replica, on the first GPU if there is one."""
    if devices is None:
        devices = ["GPU:0" if devices_lib.has_gpu() and not logical_cpus else "CPU:0"]
    if len(devices) != 1:
        raise ValueError(
            "`devices` must name one device for one_device. "
            f"Received: devices={devices}. Use 'mirrored' for several."
        )
    return OneDeviceStrategy(devices_lib.check_devices(devices)[0])


def create_mirrored(devices=None, logical_cpus=0) -> MirroredStrategy:
    """Creates a strategy with one replica on each local device."""
    if devices is not None:
        devices = devices_lib.check_devices(devices)
    elif devices_lib.has_gpu() and not logical_cpus:
        devices = devices_lib.list_gpus()
    else:
        devices_lib.set_logical_cpus(logical_cpus or 2)
        devices = devices_lib.list_cpus()[: logical_cpus or None]
    return MirroredStrategy(devices, cross_device_ops=_cross_device_ops(devices))


def _cross_device_ops(devices):
    """How replicas reduce: GPUs by TensorFlow's collectives, CPUs in the memory they share."""
    on_cpu = any(name.startswith("CPU") for name in devices)
    return tf.distribute.ReductionToOneDevice() if on_cpu else None


def create_tpu() -> TPUStrategy:
    """Creates a strategy over all cores of the TPU, in Colab or on a TPU VM."""
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return TPUStrategy(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise RuntimeError(
            "`tpu` needs a TPU and a TensorFlow built for it. "
            f"Received: {type(error).__name__}: {str(error).splitlines()[0]} "
            "In Colab choose a TPU runtime and run: pip install tensorflow-tpu "
            '(then restart the runtime); without a TPU use "auto".'
        ) from error
