"""Learning rates for large batches: scaling rules and gradual warm-up."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfmulti.choices import SCALING_RULES
from tfmulti.settings import check_choice


@keras.saving.register_keras_serializable(package="tfmulti")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule times a factor, with a gradual warm-up over the first steps.

    Args:
        schedule: The schedule for the base batch size, or a constant rate.
        factor: The factor of the rate after the warm-up.
        warmup_steps: Steps over which the factor rises, each by the same amount.
        start_factor: The factor that the warm-up begins from.
    """

    def __init__(self, schedule, factor=1.0, warmup_steps=0, start_factor=1.0):
        self.schedule = schedule
        self.factor = factor
        self.warmup_steps = warmup_steps
        self.start_factor = start_factor

    def __call__(self, step):
        """Returns the learning rate of a step, counted from 0."""
        base = self.schedule(step) if callable(self.schedule) else self.schedule
        if not self.warmup_steps:
            return base * self.factor
        done = (tf.cast(step, tf.float32) + 1.0) / self.warmup_steps
        rise = (self.factor - self.start_factor) * tf.minimum(done, 1.0)
        return base * (self.start_factor + rise)

    def get_config(self):
        """Returns the configuration for `from_config`."""
        schedule = self.schedule
        if callable(schedule):
            schedule = keras.optimizers.schedules.serialize(schedule)
        return {
            "schedule": schedule,
            "factor": self.factor,
            "warmup_steps": self.warmup_steps,
            "start_factor": self.start_factor,
        }

    @classmethod
    def from_config(cls, config):
        """Creates a schedule from the result of `get_config`."""
        schedule = config["schedule"]
        if isinstance(schedule, dict):
            schedule = keras.optimizers.schedules.deserialize(schedule)
        return cls(**{**config, "schedule": schedule})


def scale_learning_rate(
    learning_rate,
    global_batch_size: int,
    *,
    base_batch_size: int = 256,
    rule: str = "linear",
    warmup_epochs: float = 0.0,
    steps_per_epoch: int | None = None,
):
    """Scales a learning rate with the batch size, and warms up to it.

    The linear rule and the gradual warm-up are those of Goyal et al. (2017, "Accurate, Large
    Minibatch SGD: Training ImageNet in 1 Hour", https://arxiv.org/abs/1706.02677): the rate
    rises from the base rate to k times it, by the same amount at every step, k being the global
    over the base batch size. Where the rule does not raise the rate, the warm-up starts at 0.
    The square-root rule is Krizhevsky's (2014, https://arxiv.org/abs/1404.5997).

    Args:
        learning_rate: The rate for the base batch size: a float or a Keras schedule.
        global_batch_size: Examples per step over all replicas.
        base_batch_size: The batch size for which `learning_rate` was tuned.
        rule: `"none"`, `"linear"` or `"sqrt"`.
        warmup_epochs: Epochs of gradual warm-up; 0 for none.
        steps_per_epoch: Steps per epoch; needed with a warm-up.

    Returns:
        A float if `learning_rate` is a float and there is no warm-up, else a Keras schedule.

    Raises:
        ValueError: For an unknown rule, a batch size below 1, or a warm-up without
            `steps_per_epoch`.

    Example:
    >>> round(scale_learning_rate(0.1, 1024, base_batch_size=256), 6)
    0.4
    >>> round(scale_learning_rate(0.1, 1024, base_batch_size=256, rule="sqrt"), 6)
    0.2
    """
    check_choice("rule", rule, SCALING_RULES, "Use 'linear' for large batches of SGD.")
    if global_batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            "`global_batch_size` and `base_batch_size` must be at least 1. Received: "
            f"global_batch_size={global_batch_size}, base_batch_size={base_batch_size}. "
            "Use the number of examples per step."
        )
    if warmup_epochs < 0 or (warmup_epochs and not steps_per_epoch):
        raise ValueError(
            "`warmup_epochs` must not be negative, and needs `steps_per_epoch`. Received: "
            f"warmup_epochs={warmup_epochs}, steps_per_epoch={steps_per_epoch}. "
            "Use int(dataset.cardinality()) of what distribute_train returned."
        )
    ratio = global_batch_size / base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
    if not warmup_epochs and not callable(learning_rate):
        return learning_rate * factor
    warmup_steps = math.ceil(warmup_epochs * (steps_per_epoch or 0))
    start_factor = 1.0 if factor > 1.0 else 0.0
    return ScaledSchedule(learning_rate, factor, warmup_steps, start_factor)
