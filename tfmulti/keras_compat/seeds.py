"""The seeds of random operations, for several replicas."""

from __future__ import annotations

import contextlib
import random

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.ops import stateful_random_ops

from tfmulti.keras_compat import reference
from tfmulti.runtime.scoped import Scoped

# The distance between the seeds of two replicas: 2**32 times the golden ratio, as in hashing.
_SEED_STEP = 0x9E3779B1
# Keras's name for it among its global attributes; Keras 3.12 has no constant for it.
_GENERATOR = "global_seed_generator"
_drawn = Scoped(None)
_stream = Scoped(0)


def noting_seeds() -> contextlib.AbstractContextManager[set]:
    """Yields a set of references to the seeds that Keras's generators draw in this thread."""
    return _drawn.set_to(set())


def global_seed() -> keras.Variable:
    """Returns the variable with the state from which random operations without a seed draw."""
    # Where a step is traced, it must exist before the step draws.
    with tf.init_scope():
        return seed_generator.global_seed_generator().state


def global_seed_state() -> list[int]:
    """Returns the state from which random operations without a seed draw."""
    return global_seed().numpy().tolist()


def set_global_seed_state(state: list[int]) -> None:
    """Restores a state that `global_seed_state` has returned."""
    seed_generator.global_seed_generator().state.assign(state)


def global_states(strategy: tf.distribute.Strategy) -> list:
    """Returns the variables from which steps draw that have no generator of their own.

    They are Keras's for all replicas of a strategy and TensorFlow's, as far as these exist.
    """
    keras_seeds = getattr(strategy, "global_seeds", None)
    of_tensorflow = stateful_random_ops.global_generator
    states = [] if keras_seeds is None else [keras_seeds.generator.state]
    return states + ([] if of_tensorflow is None else [of_tensorflow.state])


class GlobalSeeds:
    """The generator of random operations without a seed, for all replicas of a strategy.

    Keras creates one when a thread first asks for it, and seeds it with Python's random numbers.
    This class creates it earlier, but advances Python's random numbers only when a step first draws
    from it, as on one device.

    Args:
        strategy: The strategy.

    Attributes:
        generator: The generator.
        is_asked_for: Whether a step has drawn from it in this run.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        state, self.is_asked_for = random.getstate(), _present() is not None
        with strategy.scope():
            generator = seed_generator.global_seed_generator()
            value = generator.state.value
            own = getattr(value, "distribute_strategy", None)
            if strategy.num_replicas_in_sync > 1 and own is not strategy:
                # Here another strategy's variable can be read only through one of its copies.
                drawn = getattr(value, "values", (value,))[0].numpy().tolist()
                generator = keras.random.SeedGenerator()
                generator.state.assign(drawn)
                global_state.set_global_attribute(_GENERATOR, generator)
        self.generator = generator
        random.setstate(state)

    def ask(self) -> keras.random.SeedGenerator:
        """Returns the generator, in a step."""
        if not self.is_asked_for and not reference.in_separate_traces():
            self.is_asked_for = True
            # For its effect on Python's random numbers: with this call Keras seeds its generator.
            seed_generator.make_default_seed()
        return self.generator


def prepare_global_seeds(strategy: tf.distribute.Strategy) -> None:
    """Creates the `GlobalSeeds` of a strategy, unless Keras still uses its generator."""
    if strategy.global_seeds is None or strategy.global_seeds.generator is not _present():
        strategy.global_seeds = GlobalSeeds(strategy)


def has_seeded(strategy: tf.distribute.Strategy) -> bool:
    """Whether a step under a strategy has drawn from Keras's generator in this run."""
    seeds = getattr(strategy, "global_seeds", None)
    return seeds is not None and seeds.is_asked_for


def note_seeding(strategy: tf.distribute.Strategy) -> None:
    """Keeps a resumed run from drawing a seed again, which it had drawn before it was saved."""
    if hasattr(strategy, "global_seeds"):
        prepare_global_seeds(strategy)
        strategy.global_seeds.is_asked_for = True


def _present():
    return global_state.get_global_attribute(_GENERATOR)


def share_global_seeds(original):
    """Gives the threads of all replicas one generator; Keras has one for each thread."""

    def global_seed_generator():
        seeds = tf.distribute.get_strategy().global_seeds
        if seeds is None or tf.distribute.get_replica_context() is None:
            return original()
        return seeds.ask()

    return global_seed_generator


def random_stream(number: int) -> contextlib.AbstractContextManager:
    """Makes each replica draw from another random stream within the context.

    Args:
        number: The number of the stream; 0 is the stream outside of the context.
    """
    return _stream.set_to(number)


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state"


def vary_seeds(original):
    """Gives each replica a random stream of its own, and further ones with `random_stream`.

    The generators' state stays the same on all replicas, and is saved as by one device.
    """

    def draw(self, *args, **kwargs):
        seed = original(self, *args, **kwargs)
        if _drawn.value is not None:
            _drawn.value.add(seed.ref())
        context = tf.distribute.get_replica_context()
        if context is None:
            return seed
        # In a local step a worker counts as the only replica, and still draws numbers of its own.
        is_apart = getattr(context.strategy, "takes_local_step", False)
        if context.num_replicas_in_sync == 1 and not is_apart and not _stream.value:
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        number = _stream.value * context.num_replicas_in_sync
        replica += tf.cast(tf.constant(number), seed.dtype)
        step = tf.cast(tf.constant(_SEED_STEP, tf.int64), seed.dtype)
        # The first number is the seed; the second one counts the draws.
        return seed + tf.stack([replica * step, tf.zeros_like(replica)])

    return draw
