"""Launches collectives of two shapes on two devices: `collective_keys.py taken_out kind`.

In a process of its own: TensorFlow's collectives are of no use after an error.
"""

import sys

import tensorflow as tf
from tensorflow.python.distribute import collective_util, cross_device_ops

import tfmulti
from tfmulti import devices
from tfmulti.keras_compat import TABLE

DEVICES = ["CPU:0", "CPU:1"]
ANY_ROWS = [tf.TensorSpec([None])]


def take_out(name):
    for entry in TABLE:
        if entry.name == name:
            there = getattr(entry.owner, entry.name)
            cell = there.__closure__[there.__code__.co_freevars.index("new")]
            cell.cell_contents = there.tfmulti_replaces


def main(taken_out, kind):
    devices.set_logical_cpus(2)
    tfmulti.create_strategy("one_device", devices=DEVICES[:1])
    take_out(taken_out)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = collective_util.Options(implementation=ring)
    launchers = cross_device_ops.CollectiveAllReduce(DEVICES, 2, options)._launchers
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
