"""Lookups of words and numbers, for a replica that has a dummy row only."""

from __future__ import annotations

import tensorflow as tf


def of_known_words(original, current_replica_batch):
    """Gives a dummy row a word of the vocabulary, where the layer refuses all others.

    Args:
        original: `IndexLookup._lookup_dense`.
        current_replica_batch: Function that returns the replica batch of the current step, or None.
    """

    def lookup_dense(self, inputs):
        replica_batch = current_replica_batch()
        if self.num_oov_indices or replica_batch is None or not replica_batch.may_be_empty:
            return original(self, inputs)

        def first_word():
            words, _ = self.lookup_table.export()
            return tf.fill(tf.shape(inputs), words[0])

        shape = inputs.shape
        words = tf.cond(replica_batch.num_real > 0, lambda: tf.identity(inputs), first_word)
        return original(self, tf.ensure_shape(words, shape))

    return lookup_dense
