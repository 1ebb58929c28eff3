"""Why many devices can give another result than one, by name, and what to write instead."""

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
SCALED = "a step that knows the number of replicas"
SUM_STEP = "a step that sums over the batch"
BATCH_STEP = "a step that depends on the whole batch at once"
INPUT_GRADIENT = "a gradient with respect to inputs that is not each row's own"
STATE = "state made from local rows"
METRIC = "a metric that compares rows"
METRIC_OF_NUMBERS = "a metric that is given a number of its replica's rows"
LOG = "a log that is no mean over rows"
PREDICTION = "a prediction that depends on other rows"
COARSE = "coarse rounding"
WORKERS = "workers disagree"
REPLICAS = "replicas disagree"
ROUNDING = "rounding, amplified by the model"
UNKNOWN = "unknown"

_GATHER = "tfmulti.gather_batch(rows), which gives the rows of all replicas"
_MEAN = (
    "a mean over rows (reduce_mean), with no division by a fixed batch size or by the number of "
    "replicas"
)
# In the order in which causes are told: what makes any comparison pointless comes first.
ADVICE = {
    DATA: "Read the same examples in the same order at every call: seed every generator, list "
    "files sorted, and leave shuffling to distribute_train.",
    START: "Take random numbers for weights from keras.initializers or keras.random, which "
    "--seed sets, and from nothing else.",
    RANDOMNESS: "Nothing is wrong: each replica draws random numbers of its own, so equality with "
    "one device is impossible. To compare the rest of the model, set the rate of these "
    "layers to 0.",
    STATISTICS: f"Compute what meets rows in the call of a layer, from {_GATHER}.",
    SUM_LOSS: f"Return one value for each row, or {_MEAN}; for a sum use a keras.losses.Loss with "
    "reduction='sum'.",
    BATCH_LOSS: "Each replica sees its own rows only, so that this loss is another one there. "
    f"In compile write tfmulti.WholeBatchLoss(loss); elsewhere compute it from {_GATHER}.",
    SUM_ADD_LOSS: "Write a mean over rows, as add_loss(ops.mean(...)); the mean over all replicas' "
    "rows is then exact.",
    BATCH_ADD_LOSS: f"Compute what is added from {_GATHER}.",
    SCALED: f"Write the loss as on one device: {_MEAN}.",
    SUM_STEP: f"Write the loss as {_MEAN}.",
    INPUT_GRADIENT: "Take it of a sum over rows (reduce_sum) of terms that each depend on one row, "
    "not of a mean, and normalize it row by row: each row's is then what it is on one device.",
    BATCH_STEP: f"Compute what meets rows from {_GATHER}.",
    STATE: f"Update it from {_GATHER}.",
    METRIC: "Write tfmulti.WholeBatchMetric(metric), which gives it the rows of all replicas.",
    METRIC_OF_NUMBERS: "Give it a value for each row, or compute the number from "
    "tfmulti.gather_batch(rows).",
    LOG: "Return means over rows, results of metrics, or numbers computed from "
    "tfmulti.gather_batch(rows).",
    PREDICTION: f"Compute each row's from that row alone, or from {_GATHER}.",
    COARSE: "The model computes with so few digits that sums over fewer rows round to other "
    "numbers. Compare under the dtype policy float32, or with a larger --tolerance.",
    WORKERS: "Each worker must do the same: look for random numbers without a seed, for files or "
    "times that differ, and for variables that a worker updates by itself.",
    REPLICAS: "A variable took other values on the replicas of one process: update it with numbers "
    "that are reduced over all of them.",
    ROUNDING: "Another order of rows on one device makes as large a difference. A bias before "
    "batch normalization, or a maximum over equal values, does this.",
    UNKNOWN: "Leave out parts of the model until the difference is gone; please report the case.",
}
_SYNCHRONIZED = "Write keras.layers.BatchNormalization(synchronized=True)."


@dataclasses.dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        cause: Its name, one of this module's.
        where: The layer, variable or function; can be empty.
        advice: What to write instead.
    """

    cause: str
    where: str
    advice: str


def find(cause: str, *where: str, advice: str | None = None) -> Finding:
    """Returns a finding with the cause's own advice, unless another is given."""
    return Finding(cause, ", ".join(where), advice or ADVICE[cause])


def find_local_normalization(*layers: str) -> Finding:
    """Returns the finding for batch normalization that is not synchronized."""
    return find(STATISTICS, *layers, advice=_SYNCHRONIZED)


def in_order(findings: list[Finding]) -> list[Finding]:
    """Returns the findings, the one to read first at the front."""
    return sorted(findings, key=lambda finding: list(ADVICE).index(finding.cause))
