"""Keeps rows of some batches on their way to the replicas, to verify a step with them later."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import tensorflow as tf

from tfmulti.step import rows
from tfmulti.step.digests import Digests, fibonacci

# Of each pass over the data, the first batches and then fewer and fewer.
_ALL_UNTIL = 64
# How many batches are kept: those that are read ahead come after the one that is trained on.
_NUM_KEPT = 16
# A larger batch is cut.
_MAX_BYTES = 2**22
_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


_LATER = tuple(number - 1 for number in fibonacci())


class Samples:
    """Batches of a dataset, by their number in a pass over it.

    Args:
        wanted: Whether any are to be kept.
        compared: Whether workers compare the batches that they read.

    Attributes:
        digests: What they compare, or None.
        unpack: Function that makes a batch, as the replicas receive it, of an element.
    """

    def __init__(self, wanted: bool = True, compared: bool = False):
        self.digests = Digests() if compared else None
        self.unpack: Callable = lambda element: element
        # A thread of tf.data keeps them while the training looks for one.
        self._wanted, self._lock = wanted, threading.Lock()
        self._kept: collections.OrderedDict[int, list] = collections.OrderedDict()
        self._spec = None

    def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset; some of its elements are kept as they are read.

        Args:
            dataset: Batches, or the replica batches of this worker.
        """
        self._spec = dataset.element_spec
        known = all(isinstance(spec, _SPECS) for spec in tf.nest.flatten(self._spec))
        if not (self._wanted and known):
            return dataset

        def note(number, element):
            tensors = tf.nest.flatten(element, expand_composites=True)
            later = tf.constant(_LATER, tf.int64)
            is_wanted = (number < _ALL_UNTIL) | tf.reduce_any(number == later)

            def keep():
                tf.py_function(self._keep, [number, *tensors], [])
                return True

            tf.cond(is_wanted, keep, lambda: False)
            return element

        return dataset.enumerate().map(note)

    def digested(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of batches of all rows, whose digests are kept if they are compared."""
        return dataset if self.digests is None else self.digests.of(dataset)

    def latest(self, number: int):
        """Returns the latest batch that was kept of a pass, or None.

        Args:
            number: Which one is being trained on, from 0: later ones may have been read.
        """
        with self._lock:
            numbers = [each for each in self._kept if each <= number]
            if not numbers:
                return None
            tensors = self._kept[numbers[-1]]
        element = tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)
        return self.unpack(element)

    def _keep(self, number, *tensors):
        number = int(number)
        # Kept batches must not take memory of an accelerator.
        with tf.device("CPU:0"):
            tensors = self._small(list(tensors))
        with self._lock:
            # Another pass begins: the batches of the last one have the same numbers.
            if not number:
                self._kept.clear()
            if tensors is not None:
                self._kept.pop(number, None)
                self._kept[number] = tensors
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)

    def _small(self, tensors):
        """Returns tensors of few bytes, or None: rows of another form than dense are not cut."""
        size = sum(tensor.shape.num_elements() * max(tensor.dtype.size, 1) for tensor in tensors)
        if size <= _MAX_BYTES:
            return tensors
        counts = {int(rows.count_rows(t)) for t in tensors if t.shape.rank}
        is_dense = all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(self._spec))
        number = int(max(counts) * _MAX_BYTES / size)
        # Replica batches of one batch may differ by a row.
        if not is_dense or max(counts) - min(counts) > 1 or not number:
            return None
        return [tf.identity(t[:number]) if t.shape.rank else t for t in tensors]
