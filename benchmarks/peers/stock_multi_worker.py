"""Keras under TensorFlow's own MultiWorkerMirroredStrategy; the cluster is in TF_CONFIG."""

from benchmarks.peers import peer
from tfmulti.runtime import processes


def _environments(count):
    return [{"TF_CONFIG": text} for text in processes.tf_configs(count)]


KIND = peer(
    "stock_multi_worker",
    "stock MultiWorkerMirroredStrategy",
    {"create": f"{__name__}:create"},
    is_distributed=True,
    environments=_environments,
    baseline="plain",
)


def create(task):
    """Returns a function that does steps of training."""
    import tensorflow as tf

    from benchmarks.training import train_stock

    return train_stock(tf.distribute.MultiWorkerMirroredStrategy(), task)
