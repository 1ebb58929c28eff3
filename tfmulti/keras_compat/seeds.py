"""The seeds of random operations, for several replicas."""

from __future__ import annotations

import contextlib
import random

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from tfmulti.keras_compat import reference
from tfmulti.runtime.scoped import Scoped

# What makes the seeds of two replicas differ: the golden ratio of 2**32, as hashes use it.
_SEED_STEP = 0x9E3779B1
# Keras's name for it among its global attributes; Keras 3.12 has no constant for it.
_GENERATOR = "global_seed_generator"
_drawn = Scoped(None)
_stream = Scoped(0)


def noting_seeds() -> contextlib.AbstractContextManager[set]:
    """Yields the seeds that generators of Keras draw in this thread, references of tensors."""
    return _drawn.set_to(set())


def global_seed_state() -> list[int]:
    """The state from which random operations without a seed draw."""
    return seed_generator.global_seed_generator().state.numpy().tolist()


def set_global_seed_state(state: list[int]) -> None:
    """Puts back what `global_seed_state` returned."""
    seed_generator.global_seed_generator().state.assign(state)


class GlobalSeeds:
    """The generator of random operations without a seed, for all replicas of a strategy.

    Keras makes it where a thread first asks for it, from Python's random numbers. That is
    followed: these go on only once a step has drawn from it, as on one device.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        state, self._is_asked_for = random.getstate(), _present() is not None
        with strategy.scope():
            generator = seed_generator.global_seed_generator()
            value = generator.state.value
            own = getattr(value, "distribute_strategy", None)
            if strategy.num_replicas_in_sync > 1 and own is not strategy:
                # Another strategy's variable can be read here by one of its copies alone.
                drawn = getattr(value, "values", (value,))[0].numpy().tolist()
                generator = keras.random.SeedGenerator()
                generator.state.assign(drawn)
                global_state.set_global_attribute(_GENERATOR, generator)
        self.generator = generator
        random.setstate(state)

    def ask(self) -> keras.random.SeedGenerator:
        """Returns the generator, in a step."""
        if not self._is_asked_for and not reference.in_separate_traces():
            self._is_asked_for = True
            seed_generator.make_default_seed()
        return self.generator


def prepare_global_seeds(strategy: tf.distribute.Strategy) -> None:
    """Makes the `GlobalSeeds` of a strategy, unless Keras still has its generator."""
    if strategy.global_seeds is None or strategy.global_seeds.generator is not _present():
        strategy.global_seeds = GlobalSeeds(strategy)


def _present():
    return global_state.get_global_attribute(_GENERATOR)


def share_global_seeds(original):
    """Gives the threads of all replicas one generator: Keras keeps one for each thread."""

    def global_seed_generator():
        seeds = tf.distribute.get_strategy().global_seeds
        if seeds is None or tf.distribute.get_replica_context() is None:
            return original()
        return seeds.ask()

    return global_seed_generator


def random_stream(number: int) -> contextlib.AbstractContextManager:
    """Within it, a replica draws from another random stream of its own.

    Args:
        number: The number of the stream; 0 for the one outside of the context.
    """
    return _stream.set_to(number)


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state"


def vary_seeds(original):
    """Gives each replica a random stream of its own, and more by `random_stream`.

    The state stays the same everywhere, so that what is saved is what one device would save.
    """

    def draw(self, *args, **kwargs):
        seed = original(self, *args, **kwargs)
        if _drawn.value is not None:
            _drawn.value.add(seed.ref())
        context = tf.distribute.get_replica_context()
        if context is None:
            return seed
        is_apart = getattr(context.strategy, "takes_local_step", False)
        if context.num_replicas_in_sync == 1 and not is_apart and not _stream.value:
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        number = _stream.value * context.num_replicas_in_sync
        replica += tf.cast(tf.constant(number), seed.dtype)
        step = tf.cast(tf.constant(_SEED_STEP, tf.int64), seed.dtype)
        return seed + tf.stack([replica * step, tf.zeros_like(replica)])

    return draw
