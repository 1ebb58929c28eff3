"""Keras under TensorFlow's own MirroredStrategy, a replica on each of several logical CPUs."""

from benchmarks.peers import peer

KIND = peer(
    "stock_mirrored",
    "stock MirroredStrategy on logical CPUs",
    {"create": f"{__name__}:create"},
    baseline="plain",
)


def create(task):
    """Returns a function that does steps of training."""
    import tensorflow as tf

    from benchmarks.training import train_stock

    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(task["replicas"])]
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(task["replicas"])])
    return train_stock(strategy, task)
