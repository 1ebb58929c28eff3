"""Launches collectives of two shapes on two devices: `collective_keys.py taken_out kind`.

In a process of its own: TensorFlow's collectives are of no use after an error.
"""

import sys

import tensorflow as tf
from tensorflow.python.distribute import collective_util, cross_device_ops

import tfmulti
from tfmulti import devices, keras_compat
from tfmulti.keras_compat import TABLE
from tfmulti.strategies import base

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
ANY_ROWS = [tf.TensorSpec([None])]


def take_out(name):
    for entry in TABLE:
        if entry.name == name:
            there = getattr(entry.owner, entry.name)
            cell = there.__closure__[there.__code__.co_freevars.index("new")]
            cell.cell_contents = there.tfmulti_replaces


def reduce_under_several_strategies():
    """Adds tensors of several shapes under strategies that reduce on CPUs as others do on GPUs."""
    for count in (2, 3, 2, 2):
        strategy = base.MirroredStrategy(DEVICES[:count])

        def add(count=count):
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([count]))

        sums = tf.function(lambda strategy=strategy, add=add: strategy.run(add))()
        print(len(strategy.experimental_local_results(sums)[0]))


def main(taken_out, kind):
    devices.set_logical_cpus(len(DEVICES))
    if kind == "strategies":
        if taken_out == "use_own_groups":
            keras_compat.use_own_groups = lambda strategy: None
        return reduce_under_several_strategies()
    tfmulti.create_strategy("one_device", devices=DEVICES[:1])
    take_out(taken_out)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = collective_util.Options(implementation=ring)
    launchers = cross_device_ops.CollectiveAllReduce(DEVICES[:2], 2, options)._launchers
    for launcher in launchers:
        launcher.tfmulti_launches = True

    @tf.function(input_signature=ANY_ROWS)
    def launch(x):
        if kind == "gather":
            return [launcher._all_gather(x, None) for launcher in launchers]
        return [launcher.all_reduce(x) for launcher in launchers]

    @tf.function(input_signature=ANY_ROWS)
    def nested(x):
        # As Keras does at the end of data.
        return tf.cond(tf.size(x) > 0, lambda: launch(x), lambda: launch(x + 1))

    for count in (2, 3, 2):
        values = (nested if kind == "nested" else launch)(tf.ones([count]))
        print(*(len(value) for value in values))


if __name__ == "__main__":
    main(*sys.argv[1:])
