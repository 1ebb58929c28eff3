"""The causes of a difference between many devices and one, with advice for each."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause of a difference.

    Attributes:
        name: What it is, in the words of messages and of `docs/exact.md`.
        advice: What to write instead.
    """

    name: str
    advice: str


ALL_ROWS = "tfmulti.gather_batch(rows), which gives the rows of all replicas"
_MEAN = (
    "a mean over rows (reduce_mean), with no division by a fixed batch size or by the number of "
    "replicas"
)
SAME_DRAWS = (
    "Draw there what is the same on all replicas, as "
    "tf.random.stateless_normal(shape, seed=[7, optimizer.iterations])"
)
# In the order of the report: causes that make any comparison pointless come first.
DATA = Cause(
    "data that differ from call to call",
    "Read the same examples in the same order at every call: seed every generator, list "
    "files sorted, and leave shuffling to distribute_train.",
)
START = Cause(
    "initial weights that differ",
    "Take random numbers for weights from keras.initializers or keras.random, which "
    "--seed sets, and from nothing else.",
)
RANDOMNESS = Cause(
    "per-replica randomness",
    "Nothing is wrong: each replica draws its own random numbers, so the result cannot "
    "equal that of one device. To compare the rest of the model, set the rate of these layers "
    "to 0.",
)
STATISTICS = Cause(
    "local batch statistics",
    f"Compute statistics over rows in the call of a layer, from {ALL_ROWS}.",
)
SUM_LOSS = Cause(
    "a loss that sums over the batch",
    f"Return one value for each row, or {_MEAN}; for a sum use a keras.losses.Loss with "
    "reduction='sum'.",
)
BATCH_LOSS = Cause(
    "a loss that depends on the whole batch at once",
    "Each replica sees only its own rows, so this loss has another value there. "
    f"In compile write tfmulti.WholeBatchLoss(loss); elsewhere compute it from {ALL_ROWS}.",
)
SUM_ADD_LOSS = Cause(
    "add_loss that sums over the batch",
    "To keep the sum, add that of one number for each row of the whole batch: "
    "add_loss(tf.reduce_sum(tfmulti.gather_batch(losses))). A mean over rows, "
    "add_loss(ops.mean(losses)), is exact as it is, but another loss.",
)
BATCH_ADD_LOSS = Cause(
    "add_loss that depends on the whole batch at once",
    f"Compute the added loss from {ALL_ROWS}.",
)
SCALED = Cause(
    "a step that depends on the number of replicas",
    f"Write the loss as on one device: {_MEAN}. With run_eagerly=True add losses of "
    "gathered rows with tf.reduce_sum, not with reduction='sum'.",
)
SUM_STEP = Cause(
    "a step that sums over the batch",
    f"Write the loss as {_MEAN}; to keep the sum, write "
    "tf.reduce_sum(tfmulti.gather_batch(losses)), where losses has one number for each row.",
)
INPUT_GRADIENT = Cause(
    "a gradient with respect to inputs that mixes rows",
    "Differentiate a sum over rows (reduce_sum) of terms that each depend on one "
    "row, not a mean, and normalize the gradient row by row; compute terms that depend on several "
    "rows from tfmulti.gather_batch(rows). For the product of second derivatives with a vector, "
    "differentiate the sum of gradients times the vector with a second tape.",
)
BATCH_STEP = Cause(
    "a step that depends on the whole batch at once",
    "Compute terms that compare or combine rows, and the numbers by which the step "
    f"decides, clips or takes a maximum, from {ALL_ROWS}; reduce a loss with one value for each "
    "gathered row to one number: by tf.reduce_sum, as a tape does on one device, or "
    "tf.reduce_mean. A weight "
    "that the step itself assigns from rows needs trainable=False: replicas then average its "
    "changes.",
)
STATE = Cause(
    "state made from local rows",
    f"Update it from {ALL_ROWS}. A mean over rows may stay in self.add_weight(..., "
    "trainable=False), of which replicas average the changes, but not in a tf.Variable.",
)
PYTHON_STATE = Cause(
    "a Python number that changes with each call",
    "TensorFlow reads it once for each trace, so its value depends on how often the "
    "step is traced, and each replica changes it: keep the number in a variable, "
    "self.add_weight(..., trainable=False), or count with optimizer.iterations.",
)
METRIC = Cause(
    "a metric that compares rows",
    "Write tfmulti.WholeBatchMetric(metric), which gives it the rows of all replicas.",
)
METRIC_OF_LIST = Cause(
    "a metric that keeps a Python list",
    "Keep what it needs in variables, self.add_variable(...), which replicas have "
    "copies of; or compute it in a callback's on_epoch_end, from model.predict.",
)
METRIC_OF_NUMBERS = Cause(
    "a metric that is given a number computed from local rows",
    "Pass it a value for each row of the replica: of gathered values, tfmulti.local_rows(values).",
)
LOG = Cause(
    "a log that is not a mean over rows",
    "Return means over rows, results of metrics, or numbers computed from "
    "tfmulti.gather_batch(rows).",
)
PREDICTION = Cause(
    "a prediction that depends on other rows",
    f"Compute the prediction of a row from that row alone, or from {ALL_ROWS}.",
)
UNEQUAL = Cause(
    "parts of a batch of which replicas get unequal shares",
    "A replica weights all of its means by its share of the rows of the first part. Batch "
    "the parts so that their sizes are multiples of the number of replicas in every batch, the "
    "last one too (drop_remainder=True), or compute the means of the other parts from "
    f"{ALL_ROWS}, where every replica has a row of them.",
)
REPEATED_NOISE = Cause(
    "random numbers for rows, which are the same on each replica",
    "Draw the numbers of the whole batch, and take the part of this replica: "
    "tfmulti.local_rows(tf.random.stateless_normal(tf.shape(tfmulti.gather_batch(x)), seed)).",
)
DRIFT = Cause(
    "random numbers that reach the weights after gradients were reduced",
    f"{SAME_DRAWS}, or add the random numbers to rows or to the loss, before gradients are taken.",
)
COARSE = Cause(
    "coarse rounding",
    "The model computes in low precision, so sums over fewer rows are rounded "
    "differently. Compare under the dtype policy float32, or with a larger --tolerance.",
)
WORKERS = Cause(
    "workers disagree",
    "All workers must compute the same: look for random numbers without a seed, for files "
    "or times that differ, and for variables that only one worker updates.",
)
REPLICAS = Cause(
    "replicas disagree",
    "A variable has different values on the replicas of one process: update it with "
    "numbers that are reduced over all of them.",
)
ROUNDING = Cause(
    "rounding, amplified by the model",
    "Another order of rows on one device causes as large a difference. Typical reasons "
    "are a bias before batch normalization, and a maximum over equal values.",
)
UNKNOWN = Cause(
    "unknown",
    "Remove parts of the model until the difference disappears; please report the case.",
)

# All of the above, in this order.
CAUSES = [each for each in list(globals().values()) if isinstance(each, Cause)]

SUM_OVER_ROWS = (
    "Keras divides what an activity regularizer returns by the number of rows: return a sum over "
    "rows, of a mean within each row if you like. For a term of all rows together, write a layer "
    "that calls add_loss with a number computed from tfmulti.gather_batch(rows)."
)
SYNCHRONIZED = "Write keras.layers.BatchNormalization(synchronized=True)."
"""Advice in place of a cause's own: for activity regularizers, and for batch normalization."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One cause of a difference.

    Attributes:
        cause: The name of a cause of this module.
        where: The layer, variable or function; can be empty.
        advice: What to write instead.
    """

    cause: str
    where: str
    advice: str


def find(cause: Cause, *where: str, advice: str | None = None) -> Finding:
    """Returns a finding, with the default advice of its cause unless `advice` is given."""
    return Finding(cause.name, ", ".join(where), advice or cause.advice)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Returns the findings, the most important one first."""
    order = [cause.name for cause in CAUSES]
    return sorted(findings, key=lambda finding: order.index(finding.cause))
