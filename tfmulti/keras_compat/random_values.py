"""Substitutes for random numbers that depend only on the draw, the row and the column."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

# The bits of a random number that its dtype can represent with one half added.
_BITS = {tf.float16: 10, tf.bfloat16: 7, tf.float32: 23, tf.float64: 31}
_MASK = 0xFFFFFFFF


def _mixed(number: int) -> int:
    """Spreads a whole number over 31 bits; the same steps as `_mix`, on a Python integer."""
    number = (number ^ (number >> 15)) * 0x2C1B3C6D & _MASK
    number = (number ^ (number >> 12)) * 0x297A2D39 & _MASK
    return (number ^ (number >> 15)) >> 1


def _mix(numbers: tf.Tensor) -> tf.Tensor:
    """Hashes int64 numbers to 32 bits with multiplications and shifts, which every device has.

    Both factors are below 2**31, so that products fit in 63 bits. The constants are those of
    Wellons, "Prospecting for hash functions" (2018).
    """
    xor, shift = tf.bitwise.bitwise_xor, tf.bitwise.right_shift
    numbers = tf.bitwise.bitwise_and(numbers, _int64(_MASK))
    for bits, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        numbers = xor(numbers, shift(numbers, _int64(bits))) * factor
        numbers = tf.bitwise.bitwise_and(numbers, _int64(_MASK))
    return xor(numbers, shift(numbers, _int64(15)))


def _int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


def _known(size: int | tf.Tensor) -> int | None:
    """Returns a size if it is known statically; TensorFlow's shape inference knows most sizes."""
    return size if isinstance(size, int) else tf.zeros([size, 0]).shape[0]


@dataclasses.dataclass(frozen=True)
class Draw:
    """One random tensor that will be replaced.

    Attributes:
        output: The output of the op; its shape and dtype are kept.
        number: How many draws came before it.
        first_row: Number of this replica's first row in the global batch, an int or a scalar.
        num_rows: This replica's rows, an int or a scalar.
        salt: Changes all numbers if it is not 0, an int or a scalar.
        without_rows: Whether the first axis is known not to be that of rows.
        same_along: An axis along which all numbers are the same, or None.
    """

    output: tf.Tensor
    number: int
    first_row: int | tf.Tensor
    num_rows: int | tf.Tensor
    salt: int | tf.Tensor = 0
    without_rows: bool = False
    same_along: int | None = None

    def size(self, axis: int) -> int | tf.Tensor:
        """Returns the size of an axis of the output: an int if known, else an int64 scalar."""
        known = self.output.shape[axis]
        return tf.shape(self.output, tf.int64)[axis] if known is None else known

    def rows(self, count: int | tf.Tensor) -> tf.Tensor:
        """Returns codes of the entries of a first axis of size `count`, int64 of shape `(count,)`.

        If `count` is `num_rows`, entry i belongs to row `first_row + i`. If it is a multiple, the
        entries of a row may be adjacent, as folded time steps are, or in several views of the batch
        one after the other; since nobody knows, all entries get the same code. Any other tensor has
        no rows: the code of entry i is that of i on every replica. If the graph knows `count` but
        not `num_rows`, `count` does not grow with the batch, so there are no rows either.
        """
        entries = tf.range(tf.cast(count, tf.int64))
        if self.without_rows:
            return entries * _mixed(1)
        if isinstance(count, int):
            known = _known(self.num_rows)
            if not known or count % known:
                return entries * _mixed(1)
        first_row, num_rows = tf.cast(self.first_row, tf.int64), tf.cast(self.num_rows, tf.int64)
        count = tf.cast(count, tf.int64)
        some = tf.maximum(num_rows, 1)
        has_rows = (num_rows > 0) & (count % some == 0)
        codes = tf.where(count == num_rows, (first_row + entries) * _mixed(1), 0)
        return tf.where(has_rows, codes, entries * _mixed(1))

    def may_have_rows(self) -> bool:
        """Whether the first axis may be that of the batch's rows."""
        if self.without_rows:
            return False
        if not self.output.shape.rank:
            return self.output.shape.rank is None
        size, known = self.output.shape[0], _known(self.num_rows)
        return size is None or (bool(known) and size % known == 0)

    def hashes(self, *more: int | tf.Tensor) -> tf.Tensor:
        """Returns whole numbers below 2**32, int64 of the output's shape with `more` axes after it.

        Each axis adds a code of its own, so a longer axis (more padding) changes no other numbers.
        """
        # Numbers that no axis uses: the rows use 1, and axis n uses n + 2.
        start = _int64(_mixed(self.number + 0x1000))
        start += tf.cast(self.salt, tf.int64) * _mixed(0x800)
        rank = self.output.shape.rank
        if rank is None:
            return self._hashes_of_unknown_rank(start)
        sizes = [self.size(axis) for axis in range(rank)] + list(more)
        code = start
        for axis, size in enumerate(sizes):
            steps = self.rows(size) if axis == 0 else self._steps(size, axis)
            code = code + tf.reshape(steps, [-1] + [1] * (len(sizes) - axis - 1))
        return _mix(code)

    def _steps(self, size, axis):
        factor = 0 if axis == self.same_along else _mixed(axis + 2)
        return tf.range(tf.cast(size, tf.int64)) * factor

    def _hashes_of_unknown_rank(self, start):
        shape = tf.shape(self.output, tf.int64)
        count = tf.concat([shape, [1]], 0)[0]
        columns = tf.size(self.output, tf.int64) // tf.maximum(count, 1)
        codes = start + self.rows(count)[:, None] + self._steps(columns, 1)
        return _mix(tf.reshape(codes, shape))

    def uniform(self, dtype: tf.DType, *more: int | tf.Tensor) -> tf.Tensor:
        """Returns numbers between 0 and 1, both excluded; `more` as in `hashes`."""
        bits = _BITS[dtype]
        high = tf.bitwise.right_shift(self.hashes(*more), _int64(32 - bits))
        return (tf.cast(high, dtype) + tf.cast(0.5, dtype)) * tf.cast(2.0**-bits, dtype)


def _normal_between(draw, low, high):
    """Returns standard normal numbers between two bounds, by the inverse distribution function.

    It computes in float64: in float32 vectorized code and its scalar remainder differ in last bits.
    """
    below, above = (_distribution(tf.cast(bound, tf.float64)) for bound in (low, high))
    uniform = below + (above - below) * draw.uniform(tf.float64)
    return tf.cast(tf.math.ndtri(uniform), draw.output.dtype)


def _distribution(bound):
    return 0.5 * tf.math.erfc(-bound / math.sqrt(2.0))


def _normal(draw, inputs):
    return tf.cast(tf.math.ndtri(draw.uniform(tf.float64)), draw.output.dtype)


def _bounded_normal(draw, inputs):
    names = ("means", "stddevs" if "stddevs" in inputs else "stdevs", "minvals", "maxvals")
    mean, deviation, low, high = (_by_row(inputs[name], draw.output) for name in names)
    standard = _normal_between(draw, (low - mean) / deviation, (high - mean) / deviation)
    return mean + deviation * standard


def _by_row(parameter, output):
    """Returns a parameter for each entry of the first axis, or for all, to broadcast to outputs."""
    parameter = tf.convert_to_tensor(parameter, output.dtype)
    if parameter.shape.rank == 1 and parameter.shape[0] != 1 and output.shape.rank:
        return tf.reshape(parameter, [-1] + [1] * (output.shape.rank - 1))
    return parameter


def _integer(draw, inputs):
    low, high = (tf.cast(inputs[name], tf.int64) for name in ("minval", "maxval"))
    return tf.cast(low + draw.hashes() % tf.maximum(high - low, 1), draw.output.dtype)


def _categorical(draw, inputs):
    """Returns the class with the largest sum of logit and Gumbel noise, `(rows, samples)`."""
    logits = tf.convert_to_tensor(inputs["logits"])
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    num_classes = logits.shape[1] or tf.shape(logits, tf.int64)[1]
    noise = -tf.math.log(-tf.math.log(draw.uniform(logits.dtype, num_classes)))
    return tf.argmax(logits[:, None, :] + noise, axis=-1, output_type=draw.output.dtype)


def _mean(mean, draw):
    """Returns a distribution's mean; for integers, a whole number near it."""
    mean = tf.broadcast_to(mean, tf.shape(draw.output))
    if draw.output.dtype.is_integer:
        mean = tf.floor(mean + tf.cast(0.4142, mean.dtype))
    return tf.cast(mean, draw.output.dtype)


def _mean_of(name):
    return lambda draw, inputs: _mean(tf.convert_to_tensor(inputs[name]), draw)


def _binomial(draw, inputs):
    counts, probs = (tf.cast(inputs[name], tf.float64) for name in ("counts", "probs"))
    return _mean(counts * probs, draw)


def _by(replace, *op_types):
    return dict.fromkeys(op_types, replace)


#: For each type of op, a function of its `Draw` and its inputs by name that replaces its output.
REPLACEMENTS = {
    **_by(
        lambda draw, inputs: draw.uniform(draw.output.dtype),
        "RandomUniform",
        "StatelessRandomUniform",
        "StatelessRandomUniformV2",
        "StatefulUniform",
    ),
    **_by(
        _normal,
        "RandomStandardNormal",
        "StatelessRandomNormal",
        "StatelessRandomNormalV2",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
    ),
    **_by(
        lambda draw, inputs: _normal_between(draw, -2.0, 2.0),
        "TruncatedNormal",
        "StatelessTruncatedNormal",
        "StatelessTruncatedNormalV2",
        "StatefulTruncatedNormal",
    ),
    **_by(_bounded_normal, "ParameterizedTruncatedNormal", "StatelessParameterizedTruncatedNormal"),
    **_by(
        _integer,
        "RandomUniformInt",
        "StatelessRandomUniformInt",
        "StatelessRandomUniformIntV2",
        "StatefulUniformInt",
    ),
    **_by(
        lambda draw, inputs: tf.cast(draw.hashes(), draw.output.dtype),
        "StatelessRandomUniformFullInt",
        "StatelessRandomUniformFullIntV2",
        "StatefulUniformFullInt",
    ),
    **_by(_categorical, "Multinomial", "StatelessMultinomial"),
    **_by(
        lambda draw, inputs: tf.identity(inputs["value"]),
        "RandomShuffle",
        "StatelessShuffle",
    ),
    **_by(_mean_of("alpha"), "RandomGamma", "StatelessRandomGammaV2", "StatelessRandomGammaV3"),
    **_by(_mean_of("rate"), "RandomPoisson", "RandomPoissonV2"),
    **_by(_mean_of("lam"), "StatelessRandomPoisson"),
    **_by(_binomial, "StatelessRandomBinomial", "StatefulRandomBinomial"),
}
