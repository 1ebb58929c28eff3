"""What tfmulti notes on objects of Keras, TensorFlow and the user: every attribute that it adds.

A note lives as long as its object, and whatever copies the object's attributes copies it. Its
name begins with `tfmulti_`; Keras does not track it.
"""

from __future__ import annotations

PREFIX = "tfmulti_"


class Mark:
    """One attribute.

    Args:
        name: Its name, without `tfmulti_`.
        default: What `get` returns for an object that does not have it.

    >>> class Anything: pass
    >>> thing, mark = Anything(), Mark("size", 0)
    >>> mark.get(thing), mark.set(thing, 3), mark.get(thing)
    (0, None, 3)
    """

    def __init__(self, name: str, default=None):
        self._name, self._default = f"{PREFIX}{name}", default

    def get(self, thing):
        """Returns the value that an object has, or the default; of None, too."""
        return getattr(thing, self._name, self._default)

    def set(self, thing, value) -> None:
        """Notes a value."""
        object.__setattr__(thing, self._name, value)

    def delete(self, thing) -> None:
        """Removes the value that an object has."""
        object.__delattr__(thing, self._name)


# Optimizers.
DISTRIBUTED = Mark("distributed", False)
"""Whether `DistributedOptimizer` has made it one."""
OWN_METHODS = Mark("own_methods", {})
"""By name, methods that the user has set on it, such as `apply`, which tfmulti's call."""
COMPRESSION = Mark("compression")
"""The dtype in which its gradients are sent."""
SYNCHRONIZE_EVERY = Mark("synchronize_every", 1)
"""The steps between two averages over workers."""
SHARDS = Mark("shards")
"""Its sharded state, `step.sharded_state.Shards`."""
GUARD = Mark("guard")
"""What checks its gradients during some calls of `fit`, `step.finite.FiniteGuard`."""
UPDATES_ALIKE = Mark("updates_alike", False)
"""Whether it updates replicas alike in any step."""
HAS_LOCAL_SUMS = Mark("has_local_sums", False)
"""Whether each replica accumulates gradients of its own."""
SETTLING = Mark("settling", ((), None))
"""Its accumulated gradients, and the function that adds them over all replicas."""
SETTLED_AT = Mark("settled_at")
"""After how many steps every replica was last given the sum of all; see `step.accumulation`."""

# Models.
KEEPS_WHOLE_SUMS = Mark("keeps_whole_sums", False)
"""Whether a checkpoint may store its accumulated gradients, which must then be the whole sums."""
CALL = Mark("call", ("", False))
"""Keras's method that runs, the innermost one, and whether it also validates."""
VERIFIED = Mark("verified")
"""The compiled state, what was verified with it, and the kinds whose function comes after that."""
NOTES = Mark("notes", {})
"""For each kind of step what stays true until its function is made anew; see `verified.notes`."""
SETTINGS = Mark("settings")
"""Handles and values of small variables that its `train_step` reads, and a callback may change.

None if it reads none on any worker; one that holds other weights than the others may have none."""
ATTRIBUTES = Mark("attributes")
"""What it and its objects held when its `train_step` was verified, or was found not to need it.

None once the step has been traced: a later change has no effect on it."""
FEED = Mark("feed")
"""While `fit` runs, the description of its data, `verification.case.Feed`."""
ORDER_SEED = Mark("order_seed")
"""The seed by which all workers shuffle arrays in a call; None with one worker."""
TRAINS_FROM = Mark("trains_from")
"""While `fit` runs, the data that it was given as `x`."""
CHECKED = Mark("checked", {})
"""Its verified steps, `verification.case.Case` by kind, for spot checks."""
SAMPLES = Mark("samples", {})
"""By kind of step, the batches that are kept of the data that it has, or None."""
PENDING = Mark("pending", {})
"""By kind of step, the data with which it will be verified when its first batch has been drawn."""
PARTS_GIVEN = Mark("parts_given", {})
"""How often `train_on_batch` and `test_on_batch` were called on several workers; see
`strategies.same_batches`."""
ANY_ROWS = Mark("any_rows", frozenset())
"""The kinds of steps that are traced for any number of rows, as they were verified."""
REPLICATED = Mark("replicated", (None, frozenset()))
"""The compiled state, and the kinds of steps that every replica computes from the whole batch."""
OTHER_FUNCTION = Mark("other_function")
"""Of its function for training: the one with a check of the gradients, or without, instead."""
PREDICT = Mark("predict", (None, None))
"""The function of `predict_on_batch`, and what it was made for."""
MOVES = Mark("moves", {})
"""By kind of step, `keras_compat.num_moves` when its function was made."""
TABLE_READS = Mark("table_reads")
"""How each embedding table is read, by the variable's id: see `step.sparse_gradients`."""
AVERAGE = Mark("average")
"""What averages it over workers, `step.local_steps.Average`."""
LAST_LOGS = Mark("last_logs")
"""The logs of the last step of an epoch after which training has resumed, or None."""
WARNED_OF_STATISTICS = Mark("warned_of_statistics", False)
"""Whether the user was warned of local batch statistics."""
WARNED_OF_LOCAL_STEPS = Mark("warned_of_local_steps", False)
"""Whether the user was warned that workers train apart."""

# Layers and variables.
SEES_BATCH = Mark("sees_batch", False)
"""Whether a layer's call has all rows of the global batch."""
GATHERS = Mark("gathers", False)
"""Whether a layer gathers sharded weights for its call."""
CHECKPOINTED = Mark("checkpointed", False)
"""Whether a layer, or a model in parts, keeps only its inputs for gradients."""
OF_GROUP = Mark("of_group", False)
"""Whether the gradient of a bias is that of the rows of a group of workers."""
OF_LAYER = Mark("of_layer")
"""Of the value of a state of a layer: a weak reference to the layer; None once it was told of."""
DEVICE = Mark("device")
"""The device of a weight whose stage of a pipeline is on a device of this process."""
AVERAGES = Mark("averages", ())
"""What averages a variable over workers: an `Average` for each model that takes local steps."""
IN_STAGE = Mark("in_stage", False)
"""Whether a weight belongs to such a stage."""
MICRO_BATCHES_ON_DEVICES = Mark("micro_batches_on_devices", 0)
"""The micro-batches into which a model with such stages divides a batch; 0 for any other."""
MICRO_BATCHES = Mark("micro_batches", 0)
"""The same for a model with stages on devices or on workers; 0 for any other."""
IS_SHARDED = Mark("is_sharded", False)
"""Whether a slot has one owner."""
NUM_ASSIGNED = Mark("num_assigned", 0)
"""How often a variable of several replicas was assigned a value outside of steps."""
NUMBER = Mark("number")
"""A variable's number, which no other one gets."""

# Strategies, and what takes part in a pass over data.
PARAMETERS = Mark("parameters")
"""A strategy's sharded parameters, `step.parameters.Parameters`."""
LAUNCHES = Mark("launches", False)
"""Whether a launcher of collectives belongs to one of our strategies."""
AGREED = Mark("agreed", False)
"""Whether workers have agreed on the number of batches of an iterator."""
SAMPLE = Mark("sample")
"""The batches that are kept of a distributed dataset, `step.samples.Samples`."""
STEP = Mark("step")
"""The kind of step that a function is, and its model."""
ON_ALL_WORKERS = Mark("on_all_workers", False)
"""Whether a callback must be given on every worker, because it waits for the others."""
PATH = Mark("path")
"""Where a callback would write, were its worker the chief."""
FOLDER = Mark("folder")
"""Where it writes instead, a temporary folder."""
