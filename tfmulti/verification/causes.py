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
SCALED = "a training step that knows the number of replicas"
SUM_STEP = "a train_step whose gradient sums over the batch"
BATCH_STEP = "a train_step that depends on the whole batch at once"
BARE = "an optimizer that is not distributed"
STATE = "state made from local rows"
COARSE = "coarse rounding"
WORKERS = "workers disagree"
REPLICAS = "replicas disagree"
ROUNDING = "rounding, amplified by the model"
UNKNOWN = "unknown"
# The order in which causes are told: what makes any comparison pointless comes first.
_ORDER = [
    DATA,
    START,
    RANDOMNESS,
    STATISTICS,
    SUM_LOSS,
    BATCH_LOSS,
    SUM_ADD_LOSS,
    BATCH_ADD_LOSS,
    SCALED,
    BARE,
    SUM_STEP,
    BATCH_STEP,
    STATE,
    COARSE,
    WORKERS,
    REPLICAS,
    ROUNDING,
    UNKNOWN,
]

ADVICE = {
    DATA: "Read the same examples in the same order at every call: seed every generator, list "
    "files sorted, and leave shuffling to distribute_train.",
    START: "Take random numbers for weights from keras.initializers or keras.random, which "
    "--seed sets, and from nothing else.",
    RANDOMNESS: "Nothing is wrong: each replica draws random numbers of its own, so equality with "
    "one device is impossible. To compare the rest of the model, set the rate of these "
    "layers to 0.",
    STATISTICS: "Reduce over the rows of all replicas: "
    "tf.distribute.get_replica_context().all_reduce('SUM', ...) of sums and of counts; or "
    "normalize each row by itself.",
    SUM_LOSS: "Return one value for each row, or the mean over rows (reduce_mean), without any "
    "division by replicas or by the global batch size; for a sum use a keras.losses.Loss with "
    "reduction='sum'.",
    BATCH_LOSS: "Each replica sees its own rows only, so that this loss is another one there. "
    "Write tfmulti.WholeBatchLoss(loss), which gives it the rows of all replicas.",
    SUM_ADD_LOSS: "Write a mean over rows, as add_loss(ops.mean(...)); the mean over all replicas' "
    "rows is then exact.",
    BATCH_ADD_LOSS: "Write a mean over rows of terms that each depend on one row, or gather the "
    "rows of all replicas with tfmulti.gather_batch.",
    SCALED: "Write the loss as on one device: a mean over rows, with no division or product by "
    "num_replicas_in_sync.",
    SUM_STEP: "Write the loss as a mean over rows (reduce_mean), with no division by a fixed batch "
    "size.",
    BATCH_STEP: "Write a loss that is a mean over rows, of terms that each depend on one row, or "
    "gather the rows of all replicas with tfmulti.gather_batch.",
    BARE: "Wrap it: tfmulti.DistributedOptimizer(optimizer), and update variables through it only.",
    STATE: "Update it with a mean over all replicas' rows: "
    "tf.distribute.get_replica_context().all_reduce('SUM', ...) of sums and of counts.",
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
    return sorted(findings, key=lambda finding: _ORDER.index(finding.cause))
