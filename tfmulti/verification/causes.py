"""The causes of a difference between many devices and one, with advice for each."""

from __future__ import annotations

import dataclasses

DATA = "data that differ from call to call"
START = "initial weights that differ"
RANDOMNESS = "per-replica randomness"
STATISTICS = "local batch statistics"
SUM_LOSS = "a loss that sums over the batch"
BATCH_LOSS = "a loss that depends on the whole batch at once"
SUM_ADD_LOSS = "add_loss that sums over the batch"
BATCH_ADD_LOSS = "add_loss that depends on the whole batch at once"
SCALED = "a step that depends on the number of replicas"
SUM_STEP = "a step that sums over the batch"
BATCH_STEP = "a step that depends on the whole batch at once"
INPUT_GRADIENT = "a gradient with respect to inputs that mixes rows"
STATE = "state made from local rows"
PYTHON_STATE = "a Python number that changes with each call"
METRIC = "a metric that compares rows"
METRIC_OF_LIST = "a metric that keeps a Python list"
METRIC_OF_NUMBERS = "a metric that is given a number computed from local rows"
LOG = "a log that is not a mean over rows"
PREDICTION = "a prediction that depends on other rows"
UNEQUAL = "parts of a batch of which replicas get unlike shares"
REPEATED_NOISE = "random numbers for rows, which are the same on each replica"
DRIFT = "random numbers that reach the weights after gradients were reduced"
COARSE = "coarse rounding"
WORKERS = "workers disagree"
REPLICAS = "replicas disagree"
ROUNDING = "rounding, amplified by the model"
UNKNOWN = "unknown"

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
ADVICE = {
    DATA: "Read the same examples in the same order at every call: seed every generator, list "
    "files sorted, and leave shuffling to distribute_train.",
    START: "Take random numbers for weights from keras.initializers or keras.random, which "
    "--seed sets, and from nothing else.",
    RANDOMNESS: "Nothing is wrong: each replica draws its own random numbers, so the result cannot "
    "equal that of one device. To compare the rest of the model, set the rate of these layers "
    "to 0.",
    STATISTICS: f"Compute statistics over rows in the call of a layer, from {ALL_ROWS}.",
    SUM_LOSS: f"Return one value for each row, or {_MEAN}; for a sum use a keras.losses.Loss with "
    "reduction='sum'.",
    BATCH_LOSS: "Each replica sees only its own rows, so this loss has another value there. "
    f"In compile write tfmulti.WholeBatchLoss(loss); elsewhere compute it from {ALL_ROWS}.",
    SUM_ADD_LOSS: "To keep the sum, add that of one number for each row of the whole batch: "
    "add_loss(tf.reduce_sum(tfmulti.gather_batch(losses))). A mean over rows, "
    "add_loss(ops.mean(losses)), is exact as it is, but another loss.",
    BATCH_ADD_LOSS: f"Compute the added loss from {ALL_ROWS}.",
    SCALED: f"Write the loss as on one device: {_MEAN}. With run_eagerly=True add losses of "
    "gathered rows with tf.reduce_sum, not with reduction='sum'.",
    SUM_STEP: f"Write the loss as {_MEAN}; to keep the sum, as "
    "tf.reduce_sum(tfmulti.gather_batch(losses)) of one number for each row.",
    INPUT_GRADIENT: "Differentiate a sum over rows (reduce_sum) of terms that each depend on one "
    "row, not a mean, and normalize the gradient row by row; compute terms that depend on several "
    "rows from tfmulti.gather_batch(rows). For the product of second derivatives with a vector, "
    "differentiate the sum of gradients times the vector with a second tape.",
    BATCH_STEP: "Compute terms that compare or combine rows, and the numbers by which the step "
    f"decides, clips or takes a maximum, from {ALL_ROWS}; make a loss for each gathered row one "
    "number: tf.reduce_sum, which a tape does by itself on one device, or tf.reduce_mean. A weight "
    "that the step itself assigns from rows needs trainable=False: replicas then average its "
    "changes.",
    STATE: f"Update it from {ALL_ROWS}. A mean over rows may stay in self.add_weight(..., "
    "trainable=False), of which replicas average the changes, but not in a tf.Variable.",
    PYTHON_STATE: "TensorFlow reads it once for each trace, so its value depends on how often the "
    "step is traced, and each replica changes it: keep the number in a variable, "
    "self.add_weight(..., trainable=False), or count with optimizer.iterations.",
    METRIC: "Write tfmulti.WholeBatchMetric(metric), which gives it the rows of all replicas.",
    METRIC_OF_LIST: "Keep what it needs in variables, self.add_variable(...), which replicas have "
    "copies of; or compute it in a callback's on_epoch_end, from model.predict.",
    METRIC_OF_NUMBERS: "Pass it a value for each row of the replica: of gathered values, "
    "tfmulti.local_rows(values).",
    LOG: "Return means over rows, results of metrics, or numbers computed from "
    "tfmulti.gather_batch(rows).",
    PREDICTION: f"Compute the prediction of a row from that row alone, or from {ALL_ROWS}.",
    UNEQUAL: "A replica weights all of its means by its share of the rows of the first part. Batch "
    "the parts so that their numbers of rows divide by the number of replicas in every batch, the "
    "last one too (drop_remainder=True), or compute the means of the other parts from "
    f"{ALL_ROWS}, where every replica has a row of them.",
    REPEATED_NOISE: "Draw the numbers of the whole batch, and take the part of this replica: "
    "tfmulti.local_rows(tf.random.stateless_normal(tf.shape(tfmulti.gather_batch(x)), seed)).",
    DRIFT: f"{SAME_DRAWS}, or add the random numbers to rows or to the loss, before gradients are "
    "taken.",
    COARSE: "The model computes in low precision, so sums over fewer rows are rounded "
    "differently. Compare under the dtype policy float32, or with a larger --tolerance.",
    WORKERS: "All workers must compute the same: look for random numbers without a seed, for files "
    "or times that differ, and for variables that only one worker updates.",
    REPLICAS: "A variable has different values on the replicas of one process: update it with "
    "numbers that are reduced over all of them.",
    ROUNDING: "Another order of rows on one device causes as large a difference. Typical reasons "
    "are a bias before batch normalization, and a maximum over equal values.",
    UNKNOWN: "Remove parts of the model until the difference disappears; please report the case.",
}
_SUM_OVER_ROWS = (
    "Keras divides what an activity regularizer returns by the number of rows: return a sum over "
    "rows, of a mean within each row if you like. For a term of all rows together, write a layer "
    "that calls add_loss with a number computed from tfmulti.gather_batch(rows)."
)
_SYNCHRONIZED = "Write keras.layers.BatchNormalization(synchronized=True)."


@dataclasses.dataclass(frozen=True)
class Finding:
    """One cause of a difference.

    Attributes:
        cause: Its name, a constant of this module.
        where: The layer, variable or function; can be empty.
        advice: What to write instead.
    """

    cause: str
    where: str
    advice: str


def find(cause: str, *where: str, advice: str | None = None) -> Finding:
    """Returns a finding, with the default advice of its cause unless `advice` is given."""
    return Finding(cause, ", ".join(where), advice or ADVICE[cause])


def find_local_normalization(*layers: str) -> Finding:
    """Returns the finding for batch normalization that is not synchronized."""
    return find(STATISTICS, *layers, advice=_SYNCHRONIZED)


def find_activity_regularizer(*layers: str) -> Finding:
    """Returns the finding for an activity regularizer that is not a sum over rows."""
    return find(BATCH_ADD_LOSS, *layers, advice=_SUM_OVER_ROWS)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Returns the findings, the most important one first."""
    return sorted(findings, key=lambda finding: list(ADVICE).index(finding.cause))
