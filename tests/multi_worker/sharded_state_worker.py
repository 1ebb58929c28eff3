"""One worker trains with sharded optimizer state: `python sharded_state_worker.py FOLDER CASES`.

Prints a line of JSON with what each case saw. A case trains with copies of the state, and with
sharded state, in the same process.
"""

import contextlib
import functools
import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cases
import keras
import numpy as np
import tensorflow as tf
from comparison import apart

import tfmulti
from tfmulti import topology

optimizers = keras.optimizers


def with_own(optimizer, name, change):
    """Sets a method on an optimizer object that changes the first argument of Keras's own."""
    plain = getattr(optimizer, name)
    setattr(optimizer, name, lambda first, *args: plain(change(first), *args))
    return optimizer


def normed(gradient):
    gradient = tf.convert_to_tensor(gradient)
    return gradient / (1e-3 + tf.norm(gradient))


def signs(gradients):
    return [tf.sign(tf.convert_to_tensor(each)) for each in gradients]


def bounded(gradients):
    return [tf.clip_by_value(tf.convert_to_tensor(each), -0.01, 0.01) for each in gradients]


OWN_METHODS = {
    "own update": ("update_step", normed),
    "own updates": ("_backend_update_step", signs),
    "own clipping": ("_clip_gradients", bounded),
}
OPTIMIZERS = {
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "averages": lambda: optimizers.Nadam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "muon": lambda: optimizers.Muon(0.01),
    "lamb": lambda: optimizers.Lamb(0.01, clipnorm=0.1),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=8.0),
    "averages at the end": lambda: optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "lion": lambda: optimizers.Lion(
        optimizers.schedules.ExponentialDecay(0.01, 3, 0.5), clipvalue=0.05
    ),
    "rmsprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
}


def of_object(name):
    sgd = optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)
    return with_own(sgd, *OWN_METHODS[name])


OPTIMIZERS |= {name: functools.partial(of_object, name) for name in OWN_METHODS}
if hasattr(optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule free"] = lambda: optimizers.ScheduleFreeAdamW(0.01)


def rows():
    rng = np.random.RandomState(0)
    return rng.randint(0, 20, (33, 5)), rng.randint(0, 3, 33)


def build(strategy, optimizer, shard):
    """A model with an embedding, which has sparse gradients, and a constraint."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        tokens = keras.Input((5,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(20, 8)(tokens))
        hidden = keras.layers.Dense(16, activation="tanh", kernel_constraint="max_norm")(hidden)
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        model = keras.Model(tokens, keras.layers.Dense(3)(hidden))
        optimizer = tfmulti.DistributedOptimizer(optimizer(), shard=shard)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Tied(keras.layers.Layer):
    """Logits by the table that the tokens were read from, whose gradient is then dense."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, hidden):
        return hidden @ keras.ops.transpose(self.table.embeddings[::20000])


def build_table(strategy, optimizer, shard, tied=False):
    """A model with a table that is larger than all else: 2.5 MB, of an odd number of rows."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        tokens = keras.Input((5,), dtype="int32")
        table = keras.layers.Embedding(40001, 16, embeddings_constraint="non_neg")
        hidden = keras.layers.GlobalAveragePooling1D()(table(2000 * tokens))
        head = Tied(table) if tied else keras.layers.Dense(3)
        model = keras.Model(tokens, head(keras.layers.Dense(16, activation="tanh")(hidden)))
        optimizer = tfmulti.DistributedOptimizer(optimizer(), shard=shard)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model, epochs=3, **more):
    data = tfmulti.distribute_train(rows(), model.distribute_strategy, 16, seed=3)
    if "checkpoint" in more:
        more["callbacks"] = [tfmulti.callbacks.Checkpoint(more.pop("checkpoint"), data)]
    return model.fit(data, epochs=epochs, verbose=0, **more).history["loss"]


def held(optimizer):
    """The elements of what an optimizer has in memory here."""
    values = [v.value for v in optimizer.variables if getattr(v, "is_here", True)]
    return sum(int(np.prod(v.shape)) for v in values)


@contextlib.contextmanager
def noting_owners(strategy):
    """Yields the workers for which alone gradients are added."""
    noted, original = [], getattr(strategy.extended, "reduce_to_owners", None)
    if original is None:
        yield noted
        return

    def reduce_to_owners(tensors, owners):
        noted.extend(owners)
        return original(tensors, owners)

    strategy.extended.reduce_to_owners = reduce_to_owners
    try:
        yield noted
    finally:
        strategy.extended.reduce_to_owners = original


def same(model, other):
    return all(np.array_equal(a, b) for a, b in zip(model.get_weights(), other.get_weights()))


def optimizer(strategy, folder, name):
    """With copies and with sharded state; verification is on."""
    copies, shards = (build(strategy, OPTIMIZERS[name], each) for each in (None, "state"))
    losses = [fit(copies)]
    with noting_owners(strategy) as owners:
        losses.append(fit(shards))
    return {
        "to_owners": sorted(set(owners)),
        "same": same(copies, shards),
        "apart": apart(copies, shards),
        "losses": losses,
        "held": [held(copies.optimizer), held(shards.optimizer)],
    }


def divided(strategy, folder, name):
    """A table whose rows are divided over the workers, beside copies; verification is on."""
    tied, name = name.startswith("tied"), name.split(" ", 1)[1]
    models = [build_table(strategy, OPTIMIZERS[name], each, tied) for each in (None, "state")]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = [fit(model) for model in models]
    slots = [s for s in models[1].optimizer.variables if hasattr(s, "split")]
    return {
        "same": same(*models),
        "apart": apart(*models),
        "losses": losses,
        "held": [held(model.optimizer) for model in models],
        "slots": [[list(each.shape), list(each.value.shape)] for each in slots],
        "told": [str(each.message) for each in told if "uneven" in str(each.message)],
    }


def divided_life(strategy, folder, name):
    """Checkpoints and files of a table whose rows are divided."""
    strategy.verify = "never"
    create = OPTIMIZERS["adamw"]
    whole = build_table(strategy, create, None)
    fit(whole)
    for shard in (None, "state"):
        fit(build_table(strategy, create, shard), epochs=2, checkpoint=folder / f"table_{shard}")
    resumed = {}
    for shard, other in ((None, "state"), ("state", None)):
        model = build_table(strategy, create, shard)
        fit(model, checkpoint=folder / f"table_{other}")
        resumed[f"to {shard}"] = same(model, whole)
    if topology.is_chief(strategy):
        whole.save(folder / "table_copies.keras")
        model.save(folder / "table_sharded.keras")
    return resumed


def life(strategy, folder, name):
    """Checkpoints, files and resuming."""
    strategy.verify = "never"
    create = OPTIMIZERS["adamw"]
    whole = build(strategy, create, "state")
    fit(whole, checkpoint=folder / "whole")
    for shard in (None, "state"):
        fit(build(strategy, create, shard), epochs=2, checkpoint=folder / f"from_{shard}")
    resumed = {}
    for shard in (None, "state"):
        model = build(strategy, create, shard)
        fit(model, checkpoint=folder / ("from_state" if shard is None else "from_None"))
        resumed[f"to {shard}"] = same(model, whole)
    again = build(strategy, create, "state")
    fit(again, epochs=2, checkpoint=folder / "again")
    again = build(strategy, create, "state")
    saving = [
        keras.callbacks.ModelCheckpoint(folder / "each.keras"),
        keras.callbacks.ModelCheckpoint(folder / "each.weights.h5", save_weights_only=True),
    ]
    data = tfmulti.distribute_train(rows(), strategy, 16, seed=3)
    checkpoint = tfmulti.callbacks.Checkpoint(folder / "again", data)
    again.fit(data, epochs=3, verbose=0, callbacks=[*saving, checkpoint])
    resumed["sharded both times"] = same(again, whole)
    for name in ("adamw", "adafactor"):
        # Slots of Adafactor have the same path.
        models = [build(strategy, OPTIMIZERS[name], shard) for shard in (None, "state")]
        for model in models:
            fit(model, epochs=3 if name == "adamw" else 1)
        if topology.is_chief(strategy):
            # On the chief alone, after `fit`.
            models[0].save(folder / f"{name}_copies.keras")
            models[1].save(folder / f"{name}_sharded.keras")
    loaded = build(strategy, create, "state")
    with strategy.scope():
        loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(folder / "each.weights.h5")
    if topology.is_chief(strategy):
        loaded.save(folder / "loaded.keras")
    x, y = rows()
    for _ in range(2):
        loaded.train_on_batch(x[:16], y[:16])
    tfmulti.gather_optimizer_state(loaded)
    resumed["after train_on_batch"] = all(np.array(v).size for v in loaded.optimizer.variables)
    return resumed


def in_scope(strategy, folder, name):
    """A callback saves what workers hold for one another, while `fit` runs in the scope."""
    strategy.verify = "never"
    for shard in (None, "state", "parameters"):
        model = build(strategy, OPTIMIZERS["adamw"], shard)
        saving = keras.callbacks.ModelCheckpoint(folder / f"in_scope_{shard}.keras")
        with strategy.scope():
            fit(model, epochs=1, callbacks=[saving])
    return {"fitted": True}


def skips(strategy, folder, name):
    """An update whose gradients are not finite is left out, with and without sharding."""
    strategy.verify = "never"
    x, y = rows()
    weights = np.ones(len(x), "float32")
    weights[20] = np.nan
    models, skipped = [], []
    with noting_owners(strategy) as owners:
        for shard in (None, "state"):
            model = build(strategy, OPTIMIZERS["adamw"], shard)
            data = tfmulti.distribute_train((x, y, weights), strategy, 16, seed=3)
            guard = tfmulti.callbacks.NonFinite("skip")
            model.fit(data, epochs=2, verbose=0, callbacks=[guard])
            models.append(model)
            skipped.append(guard.skipped)
    held_by_both = [held(model.optimizer) for model in models]
    found = {"to_owners": sorted(set(owners)), "held": held_by_both, "skipped": skipped}
    return found | {"same": same(*models)}


def two_optimizers(strategy, folder, name):
    """A custom step, in which each optimizer updates a part of the model in turn."""
    weights = []
    for shard in (None, "state"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = InTurn()
            model.compile(
                tfmulti.DistributedOptimizer(optimizers.Adam(0.01), shard=shard),
                "mse",
                run_eagerly=False,
            )
            model.second = tfmulti.DistributedOptimizer(optimizers.Lamb(0.01), shard=shard)
        x = rows()[0].astype("float32")
        model.fit(tfmulti.distribute_train((x, x[:, :1]), strategy, 16), epochs=2, verbose=0)
        weights.append(model)
    return {"same": same(*weights), "held": [held(m.second) for m in weights]}


def compiled_again(strategy, folder, name):
    """A part is frozen, and `compile` puts another loss scale around the same optimizer."""
    strategy.verify = "never"
    keras.config.set_dtype_policy("mixed_float16")
    models, held_by = [], []
    for shard in (None, "state", "parameters"):
        model = build(strategy, OPTIMIZERS["adamw"], shard)
        inner = model.optimizer.inner_optimizer
        fit(model, epochs=1)
        model.layers[3].trainable = False
        with strategy.scope():
            model.compile(inner, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        fit(model, epochs=1)
        models.append(model)
        held_by.append(held(inner))
    keras.config.set_dtype_policy("float32")
    return {"same": [same(models[0], each) for each in models[1:]], "held": held_by}


class TwoLayers(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.two(self.one(x))


class OwnPenalty(TwoLayers):
    """Keras's own step, with a loss that adds a penalty of its own gradient."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            loss = super().compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        return loss + 0.1 * sum(tf.reduce_sum(tf.square(each)) for each in gradients)


class Tempered(keras.Model):
    """A step that trains a temperature, a variable of TensorFlow, beside the weights."""

    def __init__(self):
        super().__init__()
        self.dense, self.log_t = keras.layers.Dense(3), tf.Variable(0.5, name="log_t")
        self.dense.build((None, 5))

    def call(self, x):
        return tf.exp(self.log_t) * self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = [*self.trainable_variables, self.log_t]
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Outer(optimizers.SGD):
    """An optimizer around another one, which has the slots."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.inner = optimizers.Adam(0.01)

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)

    def update_step(self, gradient, variable, learning_rate):
        self.inner.update_step(gradient, variable, learning_rate)


def own_models(strategy, folder, name):
    """Gradients that a loss reads, and a variable of TensorFlow that a step updates."""
    seen = {}
    for create in (OwnPenalty, Tempered):
        models = []
        for shard in (None, "state"):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = create()
                optimizer = tfmulti.DistributedOptimizer(optimizers.Adam(0.01), shard=shard)
                model.compile(optimizer, "mse")
                if create is Tempered:
                    optimizer.build([*model.trainable_variables, model.log_t])
            x = np.random.RandomState(0).rand(33, 5).astype("float32")
            data = tfmulti.distribute_train((x, x[:, :1]), strategy, 16)
            guard = tfmulti.callbacks.NonFinite("skip")
            model.fit(data, epochs=2, verbose=0, callbacks=[guard])
            models.append(model)
        seen[create.__name__] = apart(*models)
    return seen | {"log_t": abs(float(models[0].log_t.numpy() - models[1].log_t.numpy()))}


class InTurn(TwoLayers):
    def train_step(self, data):
        x, y = data
        for layer, optimizer in ((self.one, self.optimizer), (self.two, self.second)):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
            optimizer.apply(gradients, variables)
        return {"loss": loss}


class AllTogether(optimizers.SGD):
    """An optimizer whose update of one variable reads the slots of all."""

    def update_step(self, gradient, variable, learning_rate):
        norm = sum(keras.ops.sum(keras.ops.square(each)) for each in self.momentums)
        super().update_step(gradient / (1 + norm), variable, learning_rate)


class Counting(optimizers.SGD):
    """An optimizer whose updates count themselves in one variable."""

    def build(self, variables):
        super().build(variables)
        self.count = self.add_variable(shape=(), name="count")

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.count, 1)
        super().update_step(gradient / (1 + self.count), variable, learning_rate)


class AllWeights(optimizers.SGD):
    """An optimizer whose update of one variable reads all weights."""

    def update_step(self, gradient, variable, learning_rate):
        norm = sum(keras.ops.sum(keras.ops.square(each)) for each in self._trainable_variables)
        super().update_step(gradient / (1 + norm), variable, learning_rate)


class OwnSlots(optimizers.SGD):
    """An optimizer whose slots Keras does not know of as those of a variable."""

    def build(self, variables):
        super().build(variables)
        self.own = [keras.Variable(np.zeros(v.shape, "float32")) for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        self.own[self._get_variable_index(variable)].assign_add(gradient)
        super().update_step(gradient, variable, learning_rate)


class Noisy(optimizers.SGD):
    """Langevin dynamics, with noise from a state that each update changes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(keras.ops.shape(gradient), seed=self.seeds)
        super().update_step(gradient + noise, variable, learning_rate)


class NoisyByTensorFlow(optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        noise = tf.random.normal(tf.shape(gradient))
        super().update_step(gradient + noise, variable, learning_rate)


class Seeded(optimizers.SGD):
    """The same with numbers that all workers would draw."""

    def update_step(self, gradient, variable, learning_rate):
        seed = tf.stack([7, tf.cast(self.iterations, tf.int32)])
        noise = tf.random.stateless_normal(tf.shape(gradient), seed)
        super().update_step(tf.convert_to_tensor(gradient) + noise, variable, learning_rate)


class CountingOutside(optimizers.SGD):
    """The same as `Counting`, in a variable of TensorFlow."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = tf.Variable(0.0, name="own_count")

    def update_step(self, gradient, variable, learning_rate):
        self.count.assign_add(1.0)
        super().update_step(gradient / (1 + self.count), variable, learning_rate)


def refusals(strategy, folder, name):
    """What is told: optimizers that mix variables, one that is built, and a read in between."""

    def built():
        model = build(strategy, OPTIMIZERS["lion"], None)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        tfmulti.DistributedOptimizer(model.optimizer, shard="state")

    def between():
        model = build(strategy, OPTIMIZERS["lion"], "state")
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        for variable in model.optimizer.variables:
            np.array(variable)

    def own(kind):
        return lambda: fit(build(strategy, lambda: kind(0.1, momentum=0.9), "state"))

    def eager(kind):
        def program():
            model = build(strategy, lambda: kind(0.1), "state")
            model.run_eagerly = True
            fit(model, 1)

        return program

    programs = {
        "outer": own(Outer),
        "counting": own(Counting),
        "counting outside": own(CountingOutside),
        "counting eagerly": eager(CountingOutside),
        "noise": own(Noisy),
        "noise of TensorFlow": own(NoisyByTensorFlow),
        "eager noise": eager(NoisyByTensorFlow),
        "noise by seeds": own(Seeded),
        "own slots": own(OwnSlots),
        "together": own(AllTogether),
        "weights": own(AllWeights),
        "built": built,
        "between": between,
    }
    return {name: cases.message_of(program) for name, program in programs.items()}


CASES = {f"{kind} {name}": divided for kind in ("table", "tied") for name in OPTIMIZERS}
CASES |= {
    "life": life,
    "divided life": divided_life,
    "in scope": in_scope,
    "skips": skips,
    "two optimizers": two_optimizers,
    "compiled again": compiled_again,
    "refusals": refusals,
    "own models": own_models,
}


def run_case(strategy, folder, name):
    return CASES.get(name, optimizer)(strategy, folder, name)


if __name__ == "__main__":
    cases.main(run_case)
