"""One worker trains with local steps: `python local_steps_worker.py FOLDER CASES`.

Prints a line of JSON with what each case saw. `reference` trains the same on one device without a
strategy: a model for each worker, which are averaged by NumPy.
"""

import contextlib
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import warnings

import cases
import keras
import numpy as np
import tensorflow as tf

import tfmulti
from tfmulti import topology
from tfmulti.sharding import ShardPlan

ROWS, BATCH, SEED, EPOCHS = 33, 16, 3, 3
optimizers = keras.optimizers
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "schedule": lambda: optimizers.Lion(optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)),
    "accumulation": lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "rmsprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
}


def rows():
    rng = np.random.RandomState(0)
    return rng.randint(0, 20, (ROWS, 5)), rng.randint(0, 3, ROWS)


def create(optimizer, synchronized=True):
    """A model with an embedding, which has sparse gradients, and moving statistics."""
    keras.utils.set_random_seed(1)
    float64 = {"dtype": "float64"}
    tokens = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Flatten(**float64)(keras.layers.Embedding(20, 8, **float64)(tokens))
    hidden = keras.layers.Dense(16, activation="tanh", **float64)(hidden)
    hidden = keras.layers.BatchNormalization(synchronized=synchronized, **float64)(hidden)
    model = keras.Model(tokens, keras.layers.Dense(3, **float64)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def build(strategy, name, every, **more):
    with strategy.scope():
        optimizer = tfmulti.DistributedOptimizer(OPTIMIZERS[name](), synchronize_every=every)
        return create(optimizer, **more)


def data_of(strategy):
    return tfmulti.distribute_train(rows(), strategy, BATCH, seed=SEED)


def state_of(model):
    """Weights, moving statistics and the optimizer's variables."""
    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v), "float64") for v in variables]


def floats(model):
    own = getattr(model, "pair", [model.optimizer])
    found = [*model.weights, *(v for optimizer in own for v in optimizer.variables)]
    alike = ("iteration", "learning_rate", "step_counter")
    return [v for v in found if v.path.split("/")[-1] not in alike]


def average(models):
    for same in zip(*(floats(model) for model in models)):
        mean = sum(np.array(v) for v in same) / len(same)
        for variable in same:
            variable.assign(mean)


def reference(name, every, num_workers=2, epochs=EPOCHS, stops=()):
    """What local SGD gives: a model for each worker, on its rows, and means by NumPy."""
    models = [create(OPTIMIZERS[name](), synchronized=False) for _ in range(num_workers)]
    for model in models:
        model.optimizer.build(model.trainable_variables)
    plan = ShardPlan(ROWS, BATCH, num_workers, seed=SEED)
    x, y = rows()
    pending, losses = 0, [0.0] * epochs
    for epoch in range(epochs):
        for step in range(plan.steps_per_epoch):
            for number, model in enumerate(models):
                own, _ = plan.replica_batch(epoch, step, number)
                if len(own):
                    model.reset_metrics()
                    losses[epoch] += model.train_on_batch(x[own], y[own])[0] * len(own) / ROWS
                else:
                    no_step(model.optimizer)
            pending += 1
            if pending == every or step + 1 == plan.steps_per_epoch or step + 1 in stops:
                average(models)
                pending = 0
    for model in models:
        model.optimizer.finalize_variable_values(model.trainable_variables)
    return state_of(models[0]), losses


def no_step(optimizer):
    """What a worker without rows does: it counts the step, and adds nothing to a sum."""
    if optimizer.gradient_accumulation_steps:
        updated = optimizer._trainable_variables
        optimizer.apply([np.zeros(v.shape, "float64") for v in updated], updated)
    else:
        optimizer.iterations.assign_add(1)


def save(folder, strategy, name, model):
    np.savez(folder / f"{name}_{topology.worker_index(strategy)}.npz", *state_of(model))


def train(strategy, folder, name):
    """Trains an optimizer by its name, `adam 4`: with 4 local steps."""
    optimizer, _, every = name.partition(" ")
    model = build(strategy, optimizer, int(every))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(data_of(strategy), epochs=EPOCHS, verbose=0).history
    save(folder, strategy, name, model)
    told = [str(each.message) for each in caught if "synchronize_every" in str(each.message)]
    return {"history": history, "told": told}


class Stop(Exception):
    """Training is interrupted."""


class Look(keras.callbacks.Callback):
    """Sees the weights after each step, and stops training after one of them."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.seen, self._stop_after = [], stop_after

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights()[0])
        if len(self.seen) == self._stop_after:
            raise Stop


def same(model, other):
    return all(np.array_equal(a, b) for a, b in zip(state_of(model), state_of(other)))


def life(strategy, folder, name):
    """Checkpoints between two averages, files, and resuming within an epoch."""
    strategy.verify = "never"

    def fit(where, stop_after=None):
        model = build(strategy, "adam", 3)
        data = data_of(strategy)
        checkpoint = tfmulti.callbacks.Checkpoint(folder / where, data, every_steps=2)
        with contextlib.suppress(Stop):
            more = [Look(stop_after), checkpoint]
            model.fit(data, epochs=EPOCHS, verbose=0, callbacks=more)
        return model

    whole = fit("whole")
    # The fourth step is saved, the fifth is lost.
    fit("cut", stop_after=5)
    resumed = fit("cut")
    seen = {"resumes": same(whole, resumed)}
    np.savez(folder / f"whole_{topology.worker_index(strategy)}.npz", *state_of(whole))

    each = build(strategy, "adam", 100)
    path = str(folder / "step_{batch}.weights.h5")
    saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    look = Look()
    each.fit(data_of(strategy), epochs=1, verbose=0, callbacks=[look, saving])
    np.savez(folder / f"look_{topology.worker_index(strategy)}.npz", *look.seen)

    alone = build(strategy, "adam", 4)
    x, y = rows()
    start = 8 * topology.worker_index(strategy)
    alone.train_on_batch(x[start : start + 8], y[start : start + 8])
    seen["saved"] = cases.message_of(lambda: alone.save_weights(folder / "alone.weights.h5"))
    tfmulti.average_weights(alone)
    alone.save_weights(folder / f"alone_{topology.worker_index(strategy)}.weights.h5")
    alone.train_on_batch(x[start : start + 8], y[start : start + 8])
    seen["evaluated"] = alone.evaluate(tfmulti.distribute_eval(rows(), strategy, BATCH), verbose=0)
    seen["digest"] = float(sum(np.abs(each).sum() for each in state_of(alone)))
    alone.train_on_batch(x[start : start + 8], y[start : start + 8])
    alone.test_on_batch(x[start : start + 8], y[start : start + 8])
    seen["tested"] = float(sum(np.abs(each).sum() for each in state_of(alone)))
    return seen


def dice_model(optimizer):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(3, activation="sigmoid", dtype="float64")
    model = keras.Sequential([keras.Input((5,)), dense])
    # A number for the batch, which is not a mean over rows.
    model.compile(optimizer, keras.losses.Dice(dtype="float64"))
    return model


def dice_rows():
    x, y = rows()
    return x / 20, np.eye(3)[y]


def dice(strategy, folder, name):
    """A loss of the whole batch, which is here that of the worker's rows."""
    with strategy.scope():
        optimizer = optimizers.SGD(0.5, momentum=0.9)
        model = dice_model(tfmulti.DistributedOptimizer(optimizer, synchronize_every=2))
    data = tfmulti.distribute_train(dice_rows(), strategy, BATCH, seed=SEED)
    model.fit(data, epochs=EPOCHS, verbose=0)
    return [np.array(v).tolist() for v in floats(model)]


def dice_reference():
    models = [dice_model(optimizers.SGD(0.5, momentum=0.9)) for _ in range(2)]
    plan = ShardPlan(ROWS, BATCH, 2, seed=SEED)
    x, y = dice_rows()
    for epoch in range(EPOCHS):
        for step in range(plan.steps_per_epoch):
            for number, model in enumerate(models):
                own, _ = plan.replica_batch(epoch, step, number)
                if len(own):
                    model.train_on_batch(x[own], y[own])
            if step % 2 or step + 1 == plan.steps_per_epoch:
                average(models)
    return [np.array(v) for v in floats(models[0])]


class CustomStep(keras.Model):
    """A custom step, which clips by itself, and updates two parts with an optimizer."""

    def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(8, activation="tanh", dtype="float64")
        self.two = keras.layers.Dense(1, dtype="float64")
        self.mean = tf.reduce_mean

    def call(self, x):
        return self.two(self.one(x))

    def train_step(self, data):
        x, y = data
        pair = getattr(self, "pair", [self.optimizer] * 2)
        for layer, optimizer in zip((self.one, self.two), pair):
            with tf.GradientTape() as tape:
                loss = self.mean(tf.square(y - self(x, training=True))[:, 0])
            variables = layer.trainable_variables
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.2)
            optimizer.apply(gradients, variables)
        return {"loss": loss}


class Student(CustomStep):
    """Has a teacher, its own moving average, which was compiled before; it also decays weights."""

    def __init__(self):
        super().__init__()
        layers = keras.layers.Dense(8, dtype="float64"), keras.layers.Dense(1, dtype="float64")
        self.teacher = keras.Sequential([keras.Input((5,)), *layers])
        self.teacher.compile("adam", "mse")
        self.teacher.optimizer.build(self.teacher.trainable_variables)
        self.teacher.trainable = False

    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign_sub(0.1 * weight)
        for old, new in zip(self.teacher.weights, self.trainable_variables):
            old.assign(0.9 * old + 0.1 * new)
        return logs


def numbers():
    x = rows()[0].astype("float64") / 20
    return x, x[:, :1] ** 2


def own_model(optimizer, kind=CustomStep):
    keras.utils.set_random_seed(1)
    model = kind()
    model(np.zeros((1, 5)))
    model.compile(optimizer)
    optimizer.build(model.trainable_variables)
    return model


def two_optimizers(optimizer, wrap=lambda optimizer: optimizer):
    """A model with an optimizer for each layer, beside an idle one that `compile()` makes."""
    model = own_model(optimizer)
    model.compile()
    model.pair = [optimizers.SGD(0.3, momentum=0.9), optimizers.Adam(0.01)]
    model.pair = [wrap(each) for each in model.pair]
    for layer, each in zip((model.one, model.two), model.pair):
        each.build(layer.trainable_variables)
    return model


student = functools.partial(own_model, kind=Student)


def own_reference(how, num_workers=2, every=4):
    """What the custom step gives, by TensorFlow without a strategy.

    Args:
        how: How losses are averaged, as in `own_steps`.
        num_workers: The workers.
        every: Steps between two averages.
    """
    create_model = {"two": two_optimizers, "teacher": student, "eager teacher": student}
    create_model = create_model.get(how, own_model)
    models = [create_model(optimizers.SGD(0.3, momentum=0.9)) for _ in range(num_workers)]
    plan = ShardPlan(ROWS, BATCH, num_workers, seed=SEED)
    (x, y), pending = numbers(), 0
    for epoch in range(EPOCHS):
        for step in range(plan.steps_per_epoch):
            for number, model in enumerate(models):
                own, _ = plan.replica_batch(epoch, step, number)
                if how == "by number":
                    full = plan.count(epoch, step) / BATCH
                    model.mean = lambda each, full=full: tf.reduce_mean(each) * full
                elif how == "gathered":
                    root = np.sqrt(len(own))
                    model.mean = lambda each, root=root: tf.reduce_sum(each) / root
                if len(own):
                    model.train_step((tf.constant(x[own]), tf.constant(y[own])))
                else:
                    for optimizer in getattr(model, "pair", [model.optimizer]):
                        no_step(optimizer)
            pending += 1
            if pending == every or step + 1 == plan.steps_per_epoch:
                average(models)
                pending = 0
    return [np.array(v) for v in floats(models[0])]


def by_number(losses):
    """TensorFlow's own idiom for losses under a strategy."""
    return tf.nn.compute_average_loss(losses, global_batch_size=BATCH)


def gathered(losses):
    """A loss that depends on how many rows there are."""
    losses = tfmulti.gather_batch(losses)
    return tf.reduce_sum(losses) / tf.sqrt(tf.cast(tf.shape(losses)[0], losses.dtype))


MEANS = {"by number": by_number, "gathered": gathered}


def own_steps(strategy, folder, name):
    """A custom step: in a graph, several in one call, eagerly, with other means."""
    seen = {}
    hows = {
        "graph": {},
        "several": {"steps_per_execution": 2},
        "eager": {"run_eagerly": True},
        "by number": {},
        "gathered": {},
        "two": {},
        "teacher": {},
        "eager teacher": {"run_eagerly": True},
    }
    for name, how in hows.items():
        # Verification takes longer than training.
        strategy.verify = "always" if name in ("graph", "gathered") else "never"
        with strategy.scope():
            optimizer = optimizers.SGD(0.3, momentum=0.9)
            create_model = student if "teacher" in name else own_model
            model = create_model(tfmulti.DistributedOptimizer(optimizer, synchronize_every=4))
            model.compile(optimizer, **how)
            if name == "two":
                local = functools.partial(tfmulti.DistributedOptimizer, synchronize_every=4)
                model = two_optimizers(optimizers.SGD(0.3), local)
            model.mean = MEANS.get(name, tf.reduce_mean)
        data = tfmulti.distribute_train(numbers(), strategy, BATCH, seed=SEED)
        model.fit(data, epochs=EPOCHS, verbose=0)
        seen[name] = [np.array(v).tolist() for v in floats(model)]
    return seen


def frozen(strategy, folder, name):
    """The statistics of a layer that is frozen after it was traced, without `compile`."""
    strategy.verify = "never"
    model = build(strategy, "momentum", 2, synchronized=False)
    [layer] = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    seen = []
    for _ in range(2):
        # Three steps: the last one comes after the average.
        model.fit(data_of(strategy), verbose=0)
        seen.append(float(layer.moving_mean.numpy().sum()))
        layer.trainable = False
    return seen


def alike(strategy, folder, name):
    """With 1, the bits of training without the argument; and random numbers of each worker."""
    strategy.verify = "never"
    models = [build(strategy, "adam", 1)]
    with strategy.scope():
        models.append(create(tfmulti.DistributedOptimizer(OPTIMIZERS["adam"]())))
    for model in models:
        model.fit(data_of(strategy), epochs=2, verbose=0)
    padded, uneven = (build(strategy, "adam", 2) for _ in range(2))
    for model, remainder in ((padded, "pad"), (uneven, "uneven")):
        x, y = rows()
        data = (x, y, np.ones(ROWS, "float32"))
        data = tfmulti.distribute_train(data, strategy, BATCH, seed=SEED, remainder=remainder)
        model.fit(data, epochs=2, verbose=0)
    seen = {"padded": same(padded, uneven)}
    seen |= {"same": same(*models), "counts": not hasattr(models[0], "tfmulti_average")}
    with strategy.scope():
        drop = keras.layers.Dropout(0.5, seed=1)
        model = keras.Sequential([keras.Input((64,)), drop, keras.layers.Dense(1)])
        optimizer = tfmulti.DistributedOptimizer(optimizers.SGD(1.0), synchronize_every=4)
        model.compile(optimizer, "mse")
        model.set_weights([np.zeros((64, 1)), np.zeros(1)])
    look = Look()
    data = (np.ones((2, 64), "float32"), np.ones((2, 1), "float32"))
    data = tfmulti.distribute_train(data, strategy, 2)
    model.fit(data, verbose=0, callbacks=[look])
    return seen | {"mask": (look.seen[0] != 0).ravel().tolist()}


def skips(strategy, folder, name):
    """An update whose gradients are not finite on one worker is left out on all."""
    strategy.verify = "never"
    x, y = rows()
    weights = np.ones(ROWS, "float32")
    weights[20] = np.nan
    model = build(strategy, "adam", 4)
    data = tfmulti.distribute_train((x, y, weights), strategy, BATCH, seed=SEED)
    guard = tfmulti.callbacks.NonFinite("skip")
    model.fit(data, epochs=2, verbose=0, callbacks=[guard])
    finite = all(np.isfinite(value).all() for value in state_of(model))
    return {"skipped": guard.skipped, "finite": finite, "steps": int(model.optimizer.iterations)}


def overflows(strategy, folder, name):
    """Scaled gradients that overflow on one worker halve the scale of all, which leave it out."""
    strategy.verify = "never"
    x, y = rows()
    weights = np.ones(ROWS, "float32")
    # Its gradients are finite where they are not scaled.
    weights[20] = 1e33
    seen = {}
    for how in ("outer", "inner", "accumulated"):
        number = 2 if how == "accumulated" else None
        with strategy.scope():
            optimizer = optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=number)
            if how != "outer":
                optimizer = tfmulti.DistributedOptimizer(optimizer, synchronize_every=4)
            optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**30)
            if how == "outer":
                optimizer = tfmulti.DistributedOptimizer(optimizer, synchronize_every=4)
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss)
        data = (x / np.float32(20), y, weights)
        data = tfmulti.distribute_train(data, strategy, BATCH, seed=SEED)
        guard = tfmulti.callbacks.NonFinite("skip")
        model.fit(data, epochs=2, verbose=0, callbacks=[guard])
        state = state_of(model)
        seen[how] = {
            "skipped": guard.skipped,
            "finite": all(np.isfinite(value).all() for value in state),
            "updates": int(optimizer.iterations),
            "scale": float(optimizer.dynamic_scale.numpy()),
            "state": [value.tolist() for value in state],
        }
    return seen


def refusals(strategy, folder, name):
    """What local steps cannot be combined with is told before an update."""

    def wrap(optimizer="adam", **more):
        def call():
            with strategy.scope():
                tfmulti.DistributedOptimizer(optimizer, synchronize_every=4, **more)

        return call

    def unlike():
        with strategy.scope():
            optimizer = optimizers.SGD(0.1)
            model = own_model(tfmulti.DistributedOptimizer(optimizer, synchronize_every=4))
            model.second = optimizers.SGD(0.1)
        fit(model)

    def own_loop():
        with strategy.scope():
            layer = keras.layers.Dense(1)
            layer.build((None, 5))
            optimizer = tfmulti.DistributedOptimizer(optimizers.SGD(0.1), synchronize_every=4)
            optimizer.build(layer.trainable_variables)

        def step():
            with tfmulti.DistributedGradientTape() as tape:
                loss = tf.reduce_mean(layer(tf.ones((2, 5))))
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        tf.function(lambda: strategy.run(step))()

    def fit(model):
        data = tfmulti.distribute_train(numbers(), strategy, BATCH, seed=SEED)
        model.fit(data, verbose=0)

    def later(**settings):
        with strategy.scope():
            optimizer = tfmulti.DistributedOptimizer("adam", synchronize_every=4)
        return lambda: tfmulti.DistributedOptimizer(optimizer, **settings)

    programs = {
        "later": later(shard="state"),
        "changed": later(synchronize_every=1),
        "shard": wrap(shard="state"),
        "compression": wrap(compression="bfloat16"),
        "unlike": unlike,
        "own loop": own_loop,
    }
    return {name: cases.message_of(program) for name, program in programs.items()}


class Largest(keras.metrics.Metric):
    """The largest label so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.cast(y_true, tf.float32))))

    def result(self):
        return self.value


def span(y_true, y_pred):
    return tf.reduce_max(y_true) - tf.reduce_min(y_true)


def halves(y_true, y_pred):
    """How far each label is from the mean of the labels."""
    return tf.abs(y_true - tf.reduce_mean(y_true))[:, 0]


def metrics(strategy, folder, name):
    """Each batch's logs of metrics that depend on labels alone, without and with local steps."""
    strategy.verify = "never"
    x, y = np.ones((ROWS, 2), "float32"), np.arange(1.0, ROWS + 1, dtype="float32")[:, None] ** 2
    seen = []
    for every in (1, 4):
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            optimizer = tfmulti.DistributedOptimizer(optimizers.SGD(1e-9), synchronize_every=every)
            own = [Largest(), span, halves, tfmulti.WholeBatchMetric(span, name="whole")]
            model.compile(optimizer, "mse", metrics=[*own, "mae"])
        found = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, found=found: found.append(dict(logs))
        )
        data = tfmulti.distribute_train((x, y), strategy, BATCH, seed=SEED)
        model.fit(data, verbose=0, callbacks=[look])
        seen.append([[each[n] for n in ("largest", "span", "halves", "whole")] for each in found])
    return seen


def shared(strategy, folder, name):
    """The weights of a model whose layers another one trains, after whatever reads or freezes them.

    Each number would differ between the workers if these had not averaged before.
    """
    strategy.verify = "never"
    x = np.random.RandomState(topology.worker_index(strategy)).rand(6, 4, 5).astype("float32")

    def compile_with(every):
        with strategy.scope():
            optimizer = tfmulti.DistributedOptimizer(optimizers.SGD(0.1), synchronize_every=every)
            whole.compile(optimizer, "mse")

    def digest():
        return [float(np.abs(np.asarray(v)).sum()) for v in encoder.weights]

    keras.utils.set_random_seed(1)
    with strategy.scope():
        encoder = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
        whole = keras.Sequential([encoder, keras.layers.Dense(5)])
    compile_with(8)
    for each in x[:3]:
        whole.train_on_batch(each, each)
    apart = digest()
    encoder.predict(np.ones((4, 5), "float32"), verbose=0)
    seen = [digest()]
    for each in x[3:]:
        whole.train_on_batch(each, each)
    encoder.trainable = False
    compile_with(8)
    whole.evaluate(*[np.ones((4, 5), "float32")] * 2, verbose=0)
    seen.append(digest())
    encoder.trainable = True
    compile_with(8)
    whole.train_on_batch(x[0], x[0])
    # Its steps add gradients.
    compile_with(1)
    whole.train_on_batch(x[0], x[0])
    seen.append(digest())
    return {"apart": apart, "alike": seen}


CASES = {
    "metrics": metrics,
    "shared": shared,
    "frozen": frozen,
    "life": life,
    "own steps": own_steps,
    "dice": dice,
    "alike": alike,
    "skips": skips,
    "overflows": overflows,
    "refusals": refusals,
}


def run_case(strategy, folder, name):
    return CASES.get(name, train)(strategy, folder, name)


if __name__ == "__main__":
    cases.main(run_case)
