"""Builds real `tf.distribute` strategies under which stock Keras 3 `fit` runs.

`create_strategy` is the only function a user needs. What it returns is a
`tf.distribute.MirroredStrategy`, `MultiWorkerMirroredStrategy`, `OneDeviceStrategy` or
`TPUStrategy` with three public methods repaired for Keras 3: `run`, `reduce` and
`experimental_distribute_dataset`.
"""

from __future__ import annotations

import os

import tensorflow as tf
from absl import logging

from tfmulti import cluster as cluster_lib
from tfmulti import devices as devices_lib
from tfmulti import keras_compat, shares

STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker", "tpu")
COMMUNICATIONS = ("auto", "ring", "nccl")
_RPC_LAYER = "grpc"


def first_local_value(strategy: tf.distribute.Strategy, values):
    """Takes each distributed value in a nested structure to the first local replica's."""

    def first(value):
        if isinstance(value, tf.distribute.DistributedValues):
            return strategy.experimental_local_results(value)[0]
        return value

    return tf.nest.map_structure(first, values, expand_composites=False)


class _ForKeras:
    """Repairs what Keras 3 asks of a strategy. Nothing changes for other callers."""

    repairs_keras = True
    # Set by the data pipeline when it marks filler rows in the sample weights.
    marks_padding = False

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on every replica; Keras's own steps also where a share has no row."""
        kind, model = keras_compat.step_of(fn)
        several = self.num_replicas_in_sync > 1
        if kind and len(args) == 1 and (several or self.marks_padding):
            fill = several and (kind != "train" or _has_distributed_optimizer(model))
            fn = shares.guard(fn, kind, model, fill=fill, padded=self.marks_padding)
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def reduce(self, reduce_op, value, axis):
        """Reduces as usual; scalars with `axis=0`, as Keras asks for logs, locally.

        Keras reduces every batch log so, which under several workers raises an error in
        stock TensorFlow. The answer is the mean or sum over this worker's replicas: batch
        logs are local, epoch logs are global.
        """
        if axis == 0 and _is_scalar(value):
            local = tf.stack(self.experimental_local_results(value))
            mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
            return tf.reduce_mean(local) if mean else tf.reduce_sum(local)
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a dataset; those of `tfmulti.data` know themselves how."""
        distribute_to = getattr(dataset, "distribute_to", None)
        if distribute_to is not None:
            return distribute_to(self)
        return super().experimental_distribute_dataset(dataset, options)


def _is_scalar(value) -> bool:
    if isinstance(value, tf.distribute.DistributedValues):
        return all(getattr(v, "shape", None) == () for v in getattr(value, "values", [None]))
    return isinstance(value, tf.Tensor) and value.shape.rank == 0


def _has_distributed_optimizer(model) -> bool:
    owned = [*vars(model).values(), getattr(model, "optimizer", None)]
    return any(getattr(value, "tfmulti_distributed", False) for value in owned)


class OneDeviceStrategy(_ForKeras, tf.distribute.OneDeviceStrategy):
    """All variables and computation on one device."""


class MirroredStrategy(_ForKeras, tf.distribute.MirroredStrategy):
    """One replica on each of several local devices."""


class MultiWorkerMirroredStrategy(_ForKeras, tf.distribute.MultiWorkerMirroredStrategy):
    """One or more replicas on each worker of a cluster."""

    def __init__(self, cluster_resolver, communication_options, num_cpus=1):
        if devices_lib.has_gpu() or num_cpus <= 1:
            super().__init__(cluster_resolver, communication_options)
            return
        extended = keras_compat.LocalCPUs(self, cluster_resolver, communication_options, num_cpus)
        tf.distribute.Strategy.__init__(self, extended)


class TPUStrategy(_ForKeras, tf.distribute.TPUStrategy):
    """One replica on each TPU core. Not tried: no TPU was at hand."""


def create_strategy(
    name: str = "auto",
    *,
    devices: list[str] | None = None,
    logical_cpus: int = 0,
    tf_config=None,
    communication: str = "auto",
) -> tf.distribute.Strategy:
    """Creates a strategy by name.

    Args:
        name: `"one_device"`, `"mirrored"` (all local GPUs; without a GPU two logical
            CPUs), `"multi_worker"` (the cluster of TF_CONFIG), `"tpu"`, or `"auto"`: a TPU
            where there is one, else a cluster in the environment, else several GPUs, else
            one device. The log says what was chosen and why.
        devices: TensorFlow's names, such as `["GPU:0", "GPU:1"]`; for `one_device` and
            `mirrored`.
        logical_cpus: Number of logical CPUs to split this machine's CPU into; 0 leaves it
            as it is. With `mirrored` and `multi_worker` each becomes a replica.
        tf_config: Path of a file or a folder with the cluster, or a mapping; by default the
            environment variable TF_CONFIG.
        communication: `"auto"`, `"ring"` or `"nccl"`, for `multi_worker`.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        ValueError: For an argument that is unknown or does not go with the others.
        RuntimeError: Where the devices are not there, or TensorFlow was used before.

    Example:

    >>> strategy = create_strategy("one_device", devices=["CPU:0"])
    >>> strategy.num_replicas_in_sync
    1
    """
    check_strategy_arguments(name, devices, logical_cpus, communication)
    keras_compat.install(first_local_value)
    keras_compat.count_shares_in_moments(shares.current_share)
    cluster = None
    if name in ("auto", "multi_worker"):
        cluster = cluster_lib.resolve_cluster(tf_config)
    if name == "auto":
        name = _choose(cluster, devices, logical_cpus)
    if name == "tpu":
        return create_tpu()
    devices_lib.grow_gpu_memory()
    if logical_cpus:
        devices_lib.set_logical_cpus(logical_cpus)
    if name == "multi_worker":
        return create_multi_worker(cluster, communication, logical_cpus)
    if name == "mirrored":
        return create_mirrored(devices, logical_cpus)
    return create_one_device(devices, logical_cpus)


def check_strategy_arguments(name, devices, logical_cpus, communication) -> None:
    """Raises ValueError for arguments of `create_strategy` that cannot be."""
    if name not in STRATEGIES:
        raise ValueError(
            f"`name` must be one of {', '.join(STRATEGIES)}. "
            f"Received: name={name!r}. Use 'auto' to have it chosen."
        )
    if communication not in COMMUNICATIONS:
        raise ValueError(
            f"`communication` must be one of {', '.join(COMMUNICATIONS)}. "
            f"Received: communication={communication!r}. Use 'auto' to have it chosen."
        )
    if devices is not None and name in ("multi_worker", "tpu"):
        raise ValueError(
            "`devices` goes with one_device, mirrored and auto. "
            f"Received: devices={devices}, name={name!r}. "
            "Leave it out; set CUDA_VISIBLE_DEVICES to choose among a worker's GPUs."
        )
    if logical_cpus < 0:
        raise ValueError(
            "`logical_cpus` must not be negative. "
            f"Received: logical_cpus={logical_cpus}. Use 0 to leave the CPU as it is."
        )


def _choose(cluster, devices, logical_cpus) -> str:
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if devices is not None:
        name, why = ("mirrored" if len(devices) > 1 else "one_device"), f"devices={devices}"
    elif devices_lib.has_tpu() or cluster_lib.tpu_in_environment():
        name, why = "tpu", "there is a TPU"
    elif cluster is not None:
        name, why = "multi_worker", f"TF_CONFIG names a cluster: {cluster.describe()}"
    elif num_gpus > 1 or logical_cpus > 1:
        name, why = "mirrored", f"there are {num_gpus} GPUs, logical_cpus={logical_cpus}"
    else:
        name, why = "one_device", f"no TPU, no TF_CONFIG, {num_gpus} GPUs"
    logging.info("create_strategy('auto') chose '%s': %s.", name, why)
    return name


def create_one_device(devices=None, logical_cpus=0) -> OneDeviceStrategy:
    """Creates a strategy with one replica, on the first GPU where there is one."""
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
    cross_device_ops = None
    if any(name.startswith("CPU") for name in devices):
        # TensorFlow's collectives on CPU allow one strategy and one model a process.
        cross_device_ops = tf.distribute.ReductionToOneDevice()
    logging.info("mirrored: %d replicas on %s.", len(devices), ", ".join(devices))
    return MirroredStrategy(devices, cross_device_ops=cross_device_ops)


def create_multi_worker(
    cluster: cluster_lib.Cluster | None, communication: str = "auto", logical_cpus: int = 0
) -> MultiWorkerMirroredStrategy:
    """Creates the strategy of one worker of a cluster; all workers must do the same."""
    if cluster is None:
        raise RuntimeError(
            "`multi_worker` needs a cluster in TF_CONFIG. "
            "Received: no TF_CONFIG in the environment and no `tf_config`. "
            "Set TF_CONFIG for each worker, or name a file: see tf_config/README.md."
        )
    os.environ["TF_CONFIG"] = cluster.to_json()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({kind: list(tasks) for kind, tasks in cluster.spec.items()}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer=_RPC_LAYER,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation(
            communication.upper()
        )
    )
    logging.info("multi_worker: %s.", cluster.describe())
    try:
        return MultiWorkerMirroredStrategy(resolver, options, logical_cpus or 1)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise RuntimeError(
            "`multi_worker` must be created before TensorFlow is used in this process. "
            f"Received: {error} "
            "Call create_strategy first, or restart the process (in a notebook: the kernel)."
        ) from error


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
