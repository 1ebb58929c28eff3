"""What TensorFlow's strategies leave to their `extended` object: devices, variables, reductions."""

from __future__ import annotations

import types
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms


class AllDtypesExtended(mwms.CollectiveAllReduceExtended):
    """Creates variables of every numeric dtype.

    `MultiWorkerMirroredStrategy` broadcasts the chief's initial values with a collective for only
    six dtypes, so it cannot create variables of bfloat16, int8 or complex64.
    """

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        create = super()._get_variable_creator_initial_value
        # Further replicas of a worker copy the value of its first, and send nothing.
        if replica_id != 0:
            return create(replica_id, device, primary_var, **kwargs)

        def receive():
            initial = kwargs["initial_value"]
            with tf.device(device):
                value = initial() if callable(initial) else initial
                # So TensorFlow passes values that it restores from a checkpoint.
                value = getattr(value, "wrapped_value", value)
                # Without a dtype, that of the value counts.
                value = tf.convert_to_tensor(value, kwargs.get("dtype"))
                carried = _carried_as(value.dtype)
                sent = value if carried is None else _converted(value, carried)
            settings = {**kwargs, "initial_value": sent, "dtype": sent.dtype}
            received = create(replica_id, device, primary_var, **settings)()
            return received if carried is None else _converted(received, value.dtype)

        return receive


_BROADCAST = (tf.bool, tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)
_CARRIERS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    # No dtype of this size is sent: each number is sent as two.
    tf.complex128: tf.float64,
}


def _carried_as(dtype):
    """Returns the dtype in which to send values without loss; None if they need none or have none.

    Args:
        dtype: The dtype of the value.
    """
    if dtype in _BROADCAST:
        return None
    if dtype.is_floating:
        return tf.float32
    return _CARRIERS.get(dtype, tf.int32 if dtype.is_integer else None)


def _converted(value, dtype):
    """Returns a value in another dtype; for dtypes of the same size its bits in that dtype."""
    by_bits = dtype in _CARRIERS or value.dtype in _CARRIERS
    return tf.bitcast(value, dtype) if by_bits else tf.cast(value, dtype)


class LogicalCpusExtended(AllDtypesExtended):
    """Uses `num_cpus` logical CPUs in each worker.

    `MultiWorkerMirroredStrategy` uses all GPUs of a worker or, without GPUs, a single CPU.
    """

    def __init__(self, strategy, cluster_resolver, communication_options, num_cpus):
        # Before `super().__init__`, which asks for the devices.
        self._num_cpus = num_cpus
        super().__init__(
            strategy,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
        )

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        devices = [f"{worker_device}/device:CPU:{i}" for i in range(self._num_cpus)]
        return tuple(devices), "CPU"


class CustomAllReduceExtended(AllDtypesExtended):
    """Reduces dense tensors of replicas with functions other than TensorFlow's collectives.

    On CPUs TensorFlow's own cost 6 times a copy of the bytes. They still reduce sparse gradients,
    and what is reduced outside of replicas. The attributes are set after creation; see
    `tfmulti.mpi.all_reduce.MpiAllReduce` for their arguments.

    Attributes:
        add: Function that returns the sums of tensors over all workers.
        receive: Function that returns a tensor of its owner.
        broadcast: Function that returns tensors of their owners.
        reduce_to_owners: Function that returns the sums of tensors that this worker owns.
    """

    add = broadcast = receive = reduce_to_owners = None

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values = [value for value, _ in value_destination_pairs]
        if self.add is None or not all(isinstance(value, tf.Tensor) for value in values):
            return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)
        sums = self.add(values)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            sums = [part / tf.cast(self._num_replicas_in_sync, part.dtype) for part in sums]
        return sums


def place_variables(
    strategy: tf.distribute.Strategy,
    bytes_on_servers: list[int],
    fill: Callable[[tf.Variable], None],
) -> None:
    """Makes a strategy create each variable on the server that has the fewest bytes so far.

    TensorFlow takes the servers in turn: with a large table and many small variables, one server
    would hold nearly everything.

    Args:
        strategy: A `tf.distribute.ParameterServerStrategy`.
        bytes_on_servers: The bytes on each server, which this updates.
        fill: Function of each new variable that may assign its initial values.
    """
    extended = strategy.extended

    def create(self, next_creator, **kwargs):
        server = bytes_on_servers.index(min(bytes_on_servers))
        # From this count TensorFlow takes the server.
        self._variable_count = server
        variable = type(self)._create_variable_round_robin(self, next_creator, **kwargs)
        size = (variable.shape.num_elements() or 1) * (variable.dtype.size or 8)
        bytes_on_servers[server] += size
        fill(variable)
        return variable

    extended._create_variable_round_robin = types.MethodType(create, extended)
