"""Trains the user's model on short epochs, as `tfmulti.train` would, and records it."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.data import distribute_train
from tfmulti.data.datasets import load_dataset
from tfmulti.data.sources import ArraySource, create_source
from tfmulti.parity.compare import Record, Summary
from tfmulti.parity.config import DEFAULT_GLOBAL_BATCH_SIZE, ParityConfig
from tfmulti.train.config import TrainConfig
from tfmulti.train.models import compile_model, create_model


@dataclasses.dataclass(frozen=True)
class Layout:
    """The steps of a comparison.

    Attributes:
        num_examples: Examples to train on.
        global_batch_size: Examples of a whole batch.
        epochs: Passes over them.
    """

    num_examples: int
    global_batch_size: int
    epochs: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass, the last of them short."""
        return -(-self.num_examples // self.global_batch_size)

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self.epochs * self.steps_per_epoch

    @property
    def last_batch(self) -> int:
        """Examples of each epoch's last batch."""
        return self.num_examples - (self.steps_per_epoch - 1) * self.global_batch_size

    def describe(self) -> str:
        """Returns the layout as text."""
        whole = self.steps_per_epoch - 1
        batches = f"{whole} {'batch' if whole == 1 else 'batches'} of {self.global_batch_size}"
        batches += f" and one of {self.last_batch}"
        return f"{self.steps} steps: {self.epochs} epochs, each of {batches} examples"


def choose_layout(available: int, config: ParityConfig) -> Layout:
    """Chooses how many of the examples to train on, and in how many epochs.

    The last batch of an epoch does not divide by any configuration's replicas, and training goes on
    after it.

    Args:
        available: Examples there are.
        config: The comparison.

    Raises:
        ValueError: Where there are too few examples.

    Example:
    >>> choose_layout(1437, ParityConfig(steps=20)).describe()
    '20 steps: 2 epochs, each of 9 batches of 64 and one of 31 examples'
    """
    counts = [count for _, count in config.setups]
    size = config.global_batch_size
    if size is None:
        size = max(max(counts), min(DEFAULT_GLOBAL_BATCH_SIZE, available // 3))
    whole = min(-(-config.steps // 2) - 1, (available - 1) // size)
    last = _uneven(min(size - 1, available - whole * size), counts)
    if available < max(counts) or last < 1:
        raise ValueError(
            "The training split must hold more examples than there are replicas. "
            f"Received: {available} examples, global_batch_size={size}, for {max(counts)} "
            "replicas. Use a larger split."
        )
    return Layout(whole * size + last, size, epochs=max(2, -(-config.steps // (whole + 1))))


def _uneven(most: int, counts: list[int]) -> int:
    """Returns a number of rows near `most` / 2 or below it that none of `counts` divides."""
    near = range(max(most // 2, 1), 0, -1)
    return next((rows for rows in near if all(rows % count for count in counts)), 0)


_ROUNDINGS = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-23, "float64": 2**-52}


@dataclasses.dataclass(frozen=True)
class Case:
    """The data of a comparison.

    Attributes:
        config: The comparison.
        split: The whole training split, for the model function.
        data: The part of it that is trained on.
        layout: The steps.
        digests: SHA-256 of two passes over `data`.
    """

    config: ParityConfig
    split: Any
    data: Any
    layout: Layout
    digests: list[str]


def load_case(config: ParityConfig) -> Case:
    """Loads the data, and cuts them to the rows that the steps need.

    Raises:
        ValueError: For data of the wrong form, or too few rows.
    """
    keras.utils.set_random_seed(config.seed)
    split, _ = load_dataset(config.dataset)
    source = create_source(split, shuffle_buffer=0)
    layout = choose_layout(source.num_examples, config)
    data = _cut(source, layout.num_examples)
    return Case(config, split, data, layout, [digest(data), digest(data)])


def _cut(source, count):
    if not isinstance(source, ArraySource):
        return source.dataset.take(count)
    # Spread over the split: its examples may be sorted by class.
    rows = np.arange(count) * source.num_examples // count
    return tf.nest.map_structure(lambda array: np.take(array, rows, axis=0), source.arrays)


def digest(data) -> str:
    """Returns SHA-256 over all examples, arrays or those of a `tf.data.Dataset`."""
    total = hashlib.sha256()
    examples = [data] if not isinstance(data, tf.data.Dataset) else data.as_numpy_iterator()
    for example in examples:
        for value in tf.nest.flatten(example, expand_composites=True):
            array = np.asarray(value)
            content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
            total.update(f"{array.dtype} {array.shape}".encode() + content)
    return total.hexdigest()


def create_data(case: Case, strategy: tf.distribute.Strategy):
    """Returns the training data under `strategy`."""
    size = case.layout.global_batch_size
    return distribute_train(case.data, strategy, size, seed=case.config.seed)


def create_compiled_model(case: Case, strategy: tf.distribute.Strategy, train) -> keras.Model:
    """Creates and compiles the model in the strategy's scope, from the comparison's seed."""
    config = case.config
    settings = TrainConfig(
        model=config.model,
        dataset=config.dataset,
        optimizer=config.optimizer,
        learning_rate=config.learning_rate,
        global_batch_size=case.layout.global_batch_size,
        seed=config.seed,
    )
    keras.utils.clear_session()
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        model = create_model(config.model, case.split)
        compile_model(model, settings, train)
    return model


def train_and_record(
    case: Case, strategy: tf.distribute.Strategy, record: Record, *, reorder: bool = False
) -> None:
    """Trains, and writes the record.

    Args:
        case: What is trained on.
        strategy: The configuration's strategy.
        record: Where to write.
        reorder: Whether to give the rows of each batch in another order, to measure noise.
    """
    train = create_data(case, strategy)
    model = create_compiled_model(case, strategy, train)
    if reorder:
        train = train.map(_reorder)
    summary = Summary(case.digests)
    recorder = Recorder(record, summary, case.layout.steps_per_epoch)
    model.fit(train, epochs=case.layout.epochs, shuffle=False, verbose=0, callbacks=[recorder])
    record.write_summary(summary)


def _reorder(*batch):
    """Permutes the rows of a batch, in the same way for all batches of its size."""
    rows = tf.nest.flatten(batch)[0]
    count = rows.bounding_shape(0) if isinstance(rows, tf.RaggedTensor) else tf.shape(rows)[0]
    order = tf.random.experimental.stateless_shuffle(tf.range(count), seed=[1, 0])
    batch = tf.nest.map_structure(lambda part: tf.gather(part, order), batch)
    return batch if len(batch) > 1 else batch[0]


class Recorder(keras.callbacks.Callback):
    """Writes the weights after every step; keeps losses and metrics.

    Args:
        record: Where to write the weights.
        summary: What is filled in.
        steps_per_epoch: Steps of one epoch.
    """

    def __init__(self, record: Record, summary: Summary, steps_per_epoch: int):
        super().__init__()
        self._record, self._summary, self._steps_per_epoch = record, summary, steps_per_epoch

    def on_train_begin(self, logs=None):
        """Writes the initial weights."""
        weights = self.model.weights
        self._summary.paths = _numbered([variable.path for variable in weights])
        trainable = {id(variable) for variable in self.model.trainable_variables}
        self._summary.trainable = [id(variable) in trainable for variable in weights]
        self._summary.rounding = rounding_of(self.model)
        self._keep(0)

    def on_train_batch_end(self, batch, logs=None):
        """Writes the weights, and records the loss."""
        step = len(self._summary.epochs) * self._steps_per_epoch + batch + 1
        self._keep(step)
        if "loss" in (logs or {}):
            self._summary.losses[step] = float(np.mean(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        """Records the logs."""
        numbers = {name: float(np.mean(value)) for name, value in (logs or {}).items()}
        self._summary.epochs.append(numbers)

    def _keep(self, step):
        weights = self.model.weights
        self._summary.steps.append(step)
        self._record.write_weights(step, [keras.ops.convert_to_numpy(v) for v in weights])
        local = self.model.distribute_strategy.experimental_local_results
        unlike = [
            path
            for path, variable in zip(self._summary.paths, weights)
            if _differ(local(variable.value))
        ]
        if unlike:
            self._summary.unlike[step] = unlike


def _differ(values) -> bool:
    """Whether the replicas of this process hold different values of a variable."""
    first, *others = [np.asarray(value).tobytes() for value in values]
    return any(other != first for other in others)


def _numbered(paths):
    """Makes equal names unique."""
    seen, names = {}, []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path} ({seen[path]})")
    return names


def rounding_of(model: keras.Model) -> float:
    """Returns the relative rounding of the model's coarsest arithmetic."""
    dtypes = {layer.compute_dtype for layer in [model, *keras_compat.all_layers(model)]}
    return max((_ROUNDINGS[dtype] for dtype in dtypes if dtype in _ROUNDINGS), default=2**-23)
