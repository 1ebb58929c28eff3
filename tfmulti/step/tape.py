"""A tape for loops of the user's own, outside of Keras's steps."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from tfmulti.step import losses
from tfmulti.step.rows import as_current, batch_of_loop


class DistributedGradientTape(tf.GradientTape):
    """A `tf.GradientTape` that returns gradients of the whole batch, also in custom loops.

    In a `train_step` under `fit`, a plain `tf.GradientTape` does the same. In a function that a
    script itself passes to `strategy.run`, the number of rows of each replica is unknown; there
    this class averages over replicas with equal weights. Within its context Keras's losses and
    `tf.nn.compute_average_loss` are not divided by the number of replicas, and their mean over
    replicas is that of one device. The optimizer does not reduce again.

    Arguments and methods are those of `tf.GradientTape`.
    """

    def __enter__(self):
        """Begins to record; see `tf.GradientTape`."""
        self._losses = losses.of_loop(batch_of_loop())
        self._losses.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        """Ends recording; see `tf.GradientTape`."""
        self._losses.__exit__(None, None, None)
        return super().__exit__(*error)

    def gradient(
        self,
        target,
        sources,
        output_gradients=None,
        unconnected_gradients=tf.UnconnectedGradients.NONE,
    ):
        """Returns the same as `tf.GradientTape.gradient`; gradients of variables are reduced."""
        replica_batch = batch_of_loop() if output_gradients is None else None
        # With a replica batch the tape reduces as it does in Keras's own steps.
        with contextlib.nullcontext() if replica_batch is None else as_current(replica_batch):
            return super().gradient(
                target, sources, output_gradients, unconnected_gradients=unconnected_gradients
            )
