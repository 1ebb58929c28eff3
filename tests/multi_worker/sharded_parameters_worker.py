"""One worker trains with sharded parameters: `python sharded_parameters_worker.py FOLDER CASES`.

Prints a line of JSON with what each case saw. A case trains with copies of the weights, and with
sharded ones, in the same process.
"""

import contextlib
import functools
import gc
import os
import tempfile
import warnings
import weakref

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cases
import keras
import numpy as np
import tensorflow as tf
from comparison import apart, usual_loss
from recurrent import DroppingCell
from sharded_state_worker import OWN_METHODS, with_own

import tfmulti
from tfmulti import marks, topology
from tfmulti.step import owners
from tfmulti.step.parameters import ShardedParameter

layers, optimizers, ops = keras.layers, keras.optimizers, keras.ops
WIDE = 128
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3),
    "muon": lambda: optimizers.Muon(0.01),
    "lamb": lambda: optimizers.Lamb(0.01, clipnorm=0.1),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "averages": lambda: optimizers.Nadam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "averages at the end": lambda: optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "accumulation": lambda: optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2, global_clipnorm=0.3
    ),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0),
    "own apply": lambda: Normed(0.01, momentum=0.9),
    "own update": lambda: with_own(optimizers.SGD(0.1), *OWN_METHODS["own update"]),
}


class Normed(optimizers.SGD):
    """Steps of a length that depends on all gradients and on all weights."""

    def apply(self, grads, trainable_variables=None):
        norm = tf.linalg.global_norm(list(grads))
        size = sum(ops.sum(ops.square(variable)) for variable in trainable_variables)
        grads = [grad * ops.sqrt(size) / (norm + 1e-6) for grad in grads]
        super().apply(grads, trainable_variables)


class Clipped(optimizers.SGD):
    """An optimizer that clips in its own way, where Keras does."""

    def _clip_gradients(self, grads):
        return [ops.clip(grad, -1, 1) for grad in grads]


def chain(*more):
    return keras.Sequential([keras.Input((64,)), *more, layers.Dense(3)])


def plain():
    hidden = [layers.Dense(WIDE, activation="tanh"), layers.Dense(WIDE, activation="relu")]
    return chain(*hidden)


def deep():
    return chain(*(layers.Dense(WIDE, activation="tanh") for _ in range(4)))


def functional():
    """Two skip connections, a layer that is used twice, and a constraint."""
    given = keras.Input((64,))
    one = layers.Dense(WIDE, activation="gelu", kernel_constraint="max_norm")(given)
    two = layers.Dense(WIDE)(one)
    shared = layers.Dense(64)
    both = layers.Add()([shared(layers.Add()([one, two])), shared(layers.Dense(WIDE)(two))])
    return keras.Model(given, layers.Dense(3)(both))


class Tied(keras.Model):
    """A transformer's block whose output uses the table of its input."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(600, 16)
        self.attention = layers.MultiHeadAttention(2, 64)
        self.norm, self.out = layers.LayerNormalization(), layers.Dense(3)

    def call(self, tokens):
        hidden = self.table(tokens)
        hidden = self.norm(hidden + self.attention(hidden, hidden))
        words = ops.matmul(hidden, ops.transpose(self.table.embeddings))
        return self.out(ops.mean(hidden, 1)) + 0.01 * ops.mean(words, axis=(1, 2))[:, None]


class Unbuilt(keras.Model):
    """Layers whose weights the first step creates, one of them used three times."""

    def __init__(self):
        super().__init__()
        self.first, self.again = layers.Dense(WIDE, "tanh"), layers.Dense(WIDE, "tanh")
        self.state, self.out = Counting(), layers.Dense(3)

    def call(self, x, training=False):
        x = self.first(x)
        for _ in range(3):
            x = self.again(x)
        return self.out(self.state(x, training=training))


class Counting(layers.Layer):
    """A large state that the call changes, and that is alike on all workers."""

    def build(self, shape):
        self.count = self.add_weight(shape=(WIDE, WIDE), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
        return x


def tokens(*more):
    table = layers.Embedding(600, 16)
    return keras.Sequential([keras.Input((10,), dtype="int32"), table, *more, layers.Dense(3)])


def convolution():
    first = layers.Conv2D(64, 3, padding="same", activation="relu")
    norm = layers.BatchNormalization(synchronized=True)
    pool = layers.GlobalAveragePooling2D()
    return chain(layers.Reshape((8, 8, 1)), first, layers.Conv2D(64, 3), norm, pool)


def penalized():
    """Weights that a step reads in two places."""
    return chain(layers.Dense(WIDE, activation="tanh", kernel_regularizer="l2"), layers.Dense(WIDE))


def spectral():
    """A layer that assigns the weight of the layer within it."""
    dense = layers.Dense(WIDE, activation="relu")
    return chain(layers.Dense(WIDE, activation="tanh"), layers.SpectralNormalization(dense))


class ToSparse(layers.Layer):
    """Makes its inputs sparse, as they come from data of few words."""

    def call(self, x):
        return tf.sparse.from_dense(tf.where(x > 0.5, x, tf.zeros_like(x)))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype, sparse=True)


def sparse():
    return chain(ToSparse(), layers.Dense(WIDE, activation="tanh"), layers.Dense(WIDE))


class Deciding(layers.Layer):
    """A loop and a branch that workers run more or less often, by their rows."""

    def build(self, shape):
        self.often, self.seldom = (layers.Dense(WIDE, activation="tanh") for _ in range(2))
        self.often.build(shape)
        self.seldom.build(shape)

    def call(self, x):
        counts = tf.cast(tf.abs(x[:, :1]) * 1000, tf.int32) % 5

        def again(i, x):
            return i + 1, tf.where(i < counts, self.often(x), x)

        _, x = tf.while_loop(lambda i, _: tf.reduce_any(i < counts), again, (0, x))
        few = counts > 3
        return tf.cond(tf.reduce_any(few), lambda: tf.where(few, self.seldom(x), x), lambda: x)


def deciding():
    return chain(layers.Dense(WIDE, activation="tanh"), Deciding())


def frozen():
    model = plain()
    model.layers[0].trainable = False
    return model


def adapted():
    model = plain()
    model.layers[0].enable_lora(4)
    return model


def checkpointed():
    hidden = [layers.Dense(WIDE, activation="gelu") for _ in range(4)]
    return tfmulti.checkpoint_activations(chain(*hidden))


def checkpointed_lstm():
    """A layer that gathers its weights, and whose activations are checkpointed."""
    return tfmulti.checkpoint_activations(tokens(layers.LSTM(64)))


class Clipping(keras.Model):
    """A step that reads a weight, and the gradients of all."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(WIDE, activation="tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss += 1e-3 * ops.sum(ops.square(self.hidden.kernel))
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


class InTurn(Clipping):
    """A step with an optimizer for each layer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.first.apply(grads[:2], self.hidden.trainable_variables)
        self.second.apply(grads[2:], self.out.trainable_variables)
        return {"loss": loss}


class Rescaled(layers.Layer):
    """Assigns the weight that the layer within it gathers next."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(WIDE)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        self.inner.kernel.assign(0.5 * self.inner.kernel)
        return self.inner(x)


class Private(keras.Model):
    """A step that bounds the gradient of each row, where workers have different numbers of rows."""

    def __init__(self):
        super().__init__()
        self.encoder = chain(layers.Dense(WIDE, activation="tanh"))
        self.out = layers.Dense(3)

    def call(self, x):
        return self.out(self.encoder(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        of_rows = tape.jacobian(losses, self.trainable_variables)
        grads = [tf.reduce_mean(tf.clip_by_norm(g, 0.3, range(1, g.ndim)), 0) for g in of_rows]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": tf.reduce_mean(losses)}


class InMap(Clipping):
    """A layer with sharded weights that a vectorized loop calls."""

    def call(self, x):
        return self.out(tf.vectorized_map(lambda row: self.hidden(row[None])[0], x))


MODELS = {
    "functional": functional,
    "tied": Tied,
    "unbuilt": Unbuilt,
    "table": lambda: tokens(layers.Flatten(), layers.Dense(64)),
    "lstm": lambda: tokens(layers.LSTM(64)),
    "bidirectional": lambda: tokens(layers.Bidirectional(layers.GRU(64))),
    "convolution": convolution,
    "penalized": penalized,
    "spectral": spectral,
    "sparse": sparse,
    "deciding": deciding,
    "frozen": frozen,
    "adapted": adapted,
    "checkpointed": checkpointed,
    "checkpointed_lstm": checkpointed_lstm,
    "clipping": Clipping,
    "gradients of rows": Private,
    "cell": lambda: tokens(layers.RNN(DroppingCell(64))),
}
COMPARED = (*OPTIMIZERS, *MODELS)
OF_TOKENS = ("tied", "table", "cell", "lstm", "checkpointed_lstm", "bidirectional")


def rows(of_tokens=False):
    rng = np.random.RandomState(0)
    x = rng.rand(33, 64).astype("float32")
    return (rng.randint(0, 600, (33, 10)) if of_tokens else x), rng.randint(0, 3, 33)


def build(
    strategy,
    create=plain,
    optimizer="sgd",
    shard="parameters",
    at_creation=True,
    wrapped=False,
    **more,
):
    keras.utils.set_random_seed(1)
    context = contextlib.nullcontext()
    if at_creation and shard == "parameters":
        context = tfmulti.sharded_parameters()
    with strategy.scope(), context:
        model = create()
        made = OPTIMIZERS[optimizer]()
        made = tfmulti.DistributedOptimizer(made) if wrapped else made
        made = tfmulti.DistributedOptimizer(made, shard=shard)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(made, loss, metrics=["accuracy"], **more)
    return model


def fit(model, of_tokens=False, epochs=3, callbacks=(), checkpoint=None, weights=(), **more):
    data = (*rows(of_tokens), *weights)
    data = tfmulti.distribute_train(data, model.distribute_strategy, 16, seed=3)
    callbacks = list(callbacks)
    if checkpoint is not None:
        callbacks.append(tfmulti.callbacks.Checkpoint(checkpoint, data))
    return model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, **more).history


def held(model):
    """The numbers of weights and of slots that this worker has in memory."""
    counts = []
    for variables in (model.weights, model.optimizer.variables):
        here = [v for v in variables if getattr(v, "is_here", True)]
        counts.append(sum(int(np.prod(v.shape)) for v in here))
    return counts


def compare(strategy, folder, name):
    """A model, or an optimizer, with copies and with sharded weights, in two ways."""
    create, optimizer = MODELS.get(name, plain), name if name in OPTIMIZERS else "sgd"
    of_tokens = name in OF_TOKENS
    x, y = rows(of_tokens)
    # Verification takes as long as all else: one of the three models has it.
    verify, strategy.verify = strategy.verify, "never"
    copies = build(strategy, create, optimizer, None)
    losses, counts = [fit(copies, of_tokens)["loss"]], [held(copies)]
    predicted = copies.predict(x, verbose=0)
    seen = {"apart": [], "predictions": []}
    over_mpi, first = strategy.communication.startswith("mpi"), COMPARED.index(name) % 2
    for at_creation in (False, True):
        # Every model trains once with weights that are gathered ahead, however it is created.
        strategy.extended.gathers_ahead = over_mpi and at_creation != first
        strategy.verify = verify if at_creation else "never"
        sharded = build(strategy, create, optimizer, at_creation=at_creation)
        with strategy.scope() if at_creation else contextlib.nullcontext():
            losses.append(fit(sharded, of_tokens)["loss"])
        counts.append(held(sharded))
        seen["apart"].append(apart(copies, sharded))
        apart_by = np.abs(sharded.predict(x, verbose=0) - predicted).max()
        seen["predictions"].append(float(apart_by / max(1.0, np.abs(predicted).max())))
        sharded.evaluate(x, y, verbose=0)
        seen["sharded"] = sum(isinstance(v, ShardedParameter) for v in sharded.weights)
    return seen | {"losses": losses, "held": counts}


def settings(strategy, folder, name):
    """Eager steps, several steps at once, and half precision."""
    seen = {}
    # Each worker reads several averages that the other one has.
    eager = {"create": deep, "run_eagerly": True, "optimizer": "averages at the end"}
    for each in (eager, {"steps_per_execution": 2}):
        models = [build(strategy, shard=shard, **each) for shard in (None, "parameters")]
        for model in models:
            fit(model)
        pairs = zip(*(model.optimizer.variables for model in models), strict=True)
        slots_apart = [float(np.abs(np.array(a) - np.array(b)).max()) for a, b in pairs]
        seen[str(each)] = max(apart(*models), *slots_apart)
    # TensorFlow joins operations where weights are there before the call: it rounds once less.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        models = [build(strategy, shard=shard) for shard in (None, "parameters")]
        for model in models:
            fit(model)
        seen[policy] = apart(*models)
    keras.config.set_dtype_policy("float32")
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    return seen


class OfUnknownLength(layers.Layer):
    """Keras's `TimeDistributed` then makes a vectorized loop."""

    def call(self, x):
        return x[:, : 8 - tf.cast(tf.reduce_max(x) > 1e9, tf.int32)]

    def compute_output_spec(self, x):
        return keras.KerasTensor((x.shape[0], None, *x.shape[2:]), x.dtype)


def in_time(strategy, folder, name):
    """A layer that is called for each of eight steps of time gathers its weight once for all."""
    strategy.verify, seen, (x, y) = "never", [], rows()
    gathers, receive_from = [], owners.receive_from

    def receive(*args):
        gathers.append(None)
        return receive_from(*args)

    for unknown in (False, True):
        models = []
        for shard in (None, "parameters"):
            gathers.clear()
            model = build(strategy, functools.partial(of_times, unknown), shard=shard)
            owners.receive_from = receive
            for _ in range(3):
                model.train_on_batch(x[:8], y[:8])
            owners.receive_from = receive_from
            models.append(model)
        tfmulti.gather_optimizer_state(models[1])
        seen.append([apart(*models), len(gathers)])
    return seen


def of_times(unknown):
    steps = layers.TimeDistributed(layers.Dense(1024, activation="tanh"))
    cut = [OfUnknownLength()] if unknown else []
    return chain(layers.Reshape((8, 8)), *cut, steps, layers.GlobalAveragePooling1D())


def two_optimizers(strategy, folder, name):
    """A custom step, in which each optimizer updates a part of the model."""
    models = []
    for shard in (None, "parameters"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Adversaries()
            model.compile(tfmulti.DistributedOptimizer(optimizers.Adam(0.01), shard=shard))
            model.second = tfmulti.DistributedOptimizer(optimizers.Lamb(0.01), shard=shard)
        fit(model)
        models.append(model)
    return {"apart": apart(*models)}


def evaluated_first(strategy, folder, name):
    """Optimizers in attributes shard the weights of the first `fit`, after a first `evaluate`."""
    losses, data = [], rows()
    for shard in (None, "parameters"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = InTurn()
            model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            for part in ("first", "second"):
                made = tfmulti.DistributedOptimizer(optimizers.Adam(0.01), shard=shard)
                setattr(model, part, made)
        seen = [model.evaluate(*data, verbose=0)]
        seen += fit(model, epochs=2, validation_data=data)["val_loss"]
        seen += [model.evaluate(*data, verbose=0), float(model.test_on_batch(*data))]
        losses.append(seen)
    return losses


def unfrozen(strategy, folder, name):
    """Large statistics of a layer that was frozen first, and what is left of earlier optimizers."""
    strategy.verify, models = "never", []
    for shard in (None, "parameters"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            norm = layers.BatchNormalization(synchronized=True)
            model = chain(layers.Dense(4096, "tanh"), norm)
        made = []
        for trainable in (False, True, True):
            norm.trainable = trainable
            with strategy.scope():
                optimizer = tfmulti.DistributedOptimizer(optimizers.SGD(0.1), shard=shard)
                model.compile(optimizer, usual_loss())
            made.append(weakref.ref(optimizer))
            fit(model, epochs=1)
        models.append(model)
    del optimizer
    gc.collect()
    return {"apart": apart(*models), "alive": [each() is not None for each in made]}


class Taught(keras.Model):
    """A step that moves a frozen teacher, by itself, towards the model."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = plain(), plain()
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        logs = super().train_step(data)
        for slow, fast in zip(self.teacher.weights, self.student.weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        return logs


def in_a_branch(slow, fast, assign):
    tf.cond(tf.reduce_sum(fast.value) != 0, lambda: (assign(slow, fast), True)[1], lambda: False)


def and_read(slow, fast):
    slow.assign(2.0 * fast.value)
    fast.assign(0.4 * slow.value)


ASSIGNED = {
    "a weight": lambda slow, fast: slow.assign(fast),
    "a weight in a branch": lambda *both: in_a_branch(*both, lambda slow, fast: slow.assign(fast)),
    "and read in a branch": lambda *both: in_a_branch(*both, and_read),
    "in a loop": lambda slow, fast: tf.map_fn(
        lambda number: (slow.assign_add(0.1 * fast), number)[1], tf.range(3)
    ),
    "by its value": lambda slow, fast: slow.value.assign(fast.value),
}


class Assigning(Taught):
    """A step that assigns one kernel of the teacher."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def train_step(self, data):
        logs = keras.Model.train_step(self, data)
        ASSIGNED[self.way](self.teacher.layers[0].kernel, self.student.layers[0].kernel)
        return logs


def assigned(strategy, folder, name):
    """What steps assign in several ways: the difference to copies, or what is told."""
    strategy.verify, seen = "never", {}
    for way in ASSIGNED:
        create = functools.partial(Assigning, way)
        copies, sharded = (build(strategy, create, shard=each) for each in (None, "parameters"))
        fit(copies, epochs=2)
        told = cases.message_of(lambda model=sharded: fit(model, epochs=2))
        seen[way] = apart(copies, sharded) if told == "nothing" else told
    return seen


def kept(strategy, folder, name):
    """Values that were gathered, then changed by steps or by a file, and are read again."""
    strategy.verify, models, told = "never", [], []
    x, y = rows()
    saving = keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True)
    for shard in (None, "parameters"):
        model = build(strategy, Taught, shard=shard)

        def gather_and_read(epoch, _, model=model):
            told.append(cases.message_of(model.teacher.get_weights))
            tfmulti.gather_optimizer_state(model)

        look = keras.callbacks.LambdaCallback(on_epoch_end=gather_and_read)
        fit(model, epochs=2, callbacks=[look] if shard else [saving])
        model.train_on_batch(x[:16], y[:16])
        told.append(cases.message_of(model.teacher.get_weights))
        tfmulti.gather_optimizer_state(model)
        models.append(model)
    seen = {"stepped": apart(*models), "told": told[1:]}
    for model in models:
        model.load_weights(folder / "1.weights.h5")
    return seen | {"loaded": apart(*models)}


class Adversaries(keras.Model):
    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Dense(WIDE, activation="tanh"), layers.Dense(64)])
        self.judge = keras.Sequential([layers.Dense(WIDE, activation="relu"), layers.Dense(1)])

    def call(self, x):
        return self.judge(self.maker(x))

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            wrong = ops.softplus(self(x)) + ops.softplus(-self.judge(x))
            loss = ops.mean(wrong)
        variables = self.judge.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.softplus(-self(x)))
        variables = self.maker.trainable_variables
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)
        self.second.apply(grads, variables)
        return {"loss": loss}


def skips(strategy, folder, name):
    """An update whose gradients are not finite is left out, whichever call has sharded."""
    weights = np.ones(33, "float32")
    weights[20] = np.nan
    strategy.verify, models, skipped = "never", [], []
    for shard in (None, "parameters"):
        models.append(build(strategy, shard=shard, wrapped=True))
        guard = tfmulti.callbacks.NonFinite("skip")
        fit(models[-1], callbacks=[guard], weights=[weights])
        skipped.append(guard.skipped)
    return {"apart": apart(*models), "skipped": skipped}


def finalized(strategy, folder, name):
    """Averages that take the places of weights which were gathered before."""
    x, y = rows()
    strategy.verify, models = "never", []
    for shard in (None, "parameters"):
        model = build(strategy, optimizer="averages at the end", shard=shard)
        for _ in range(3):
            model.train_on_batch(x[:16], y[:16])
        tfmulti.gather_optimizer_state(model)
        before = model.get_weights()
        model.optimizer.finalize_variable_values(model.trainable_variables)
        models.append(model)
    moved = [np.abs(a - b).max() for a, b in zip(before, model.get_weights())]
    return {"apart": apart(*models), "moved": float(min(moved))}


def evaluated_by_another(strategy, folder, name):
    """A second model over the layers, with the optimizer that Keras adds, evaluates, no more."""
    strategy.verify, losses, told = "never", [], []
    x, y = rows()
    for shard in (None, "parameters"):
        model = build(strategy, shard=shard)
        fit(model, epochs=1)
        with strategy.scope():
            other = keras.Model(model.inputs, model.layers[-1].output)
            other.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        seen = [other.evaluate(x, y, verbose=0), float(other.test_on_batch(x, y))]
        fit(model, epochs=1)
        losses.append([*seen, other.evaluate(x, y, verbose=0)])
    for train in (other.fit, other.train_on_batch):
        told.append(cases.message_of(lambda train=train: train(x, y)))
    return {"losses": losses, "told": told}


def no_room(strategy, folder, name):
    """One worker cannot write what `fit` gathers in its end, nor weights that it restores."""
    strategy.verify, models, told = "never", [], []
    is_other = not topology.is_chief(strategy)
    stops = functools.partial(keras.callbacks.EarlyStopping, "loss", 9, restore_best_weights=True)
    for shard in (None, "parameters"):
        model = build(strategy, shard=shard, optimizer="averages at the end")
        data = tfmulti.distribute_train(rows(), strategy, 16, seed=3)
        saves = tfmulti.callbacks.Checkpoint(folder / f"no room {shard}", data)
        begins = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs, model=model, shard=shard: is_other and shard and fill(model)
        )
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            model.fit(data, epochs=2, verbose=0, callbacks=[begins, saves, stops()])
        # Still without room.
        model.fit(data, epochs=1, verbose=0)
        models.append(model)
        told += [str(each.message) for each in noted if "No space left" in str(each.message)]
    seen = {"told": told[:1], "read": cases.message_of(model.get_weights)}
    # There is room again.
    for values in of_values(model):
        values._file = tempfile.TemporaryFile()
    tfmulti.gather_optimizer_state(model)
    return seen | {"apart": apart(*models)}


def of_values(model):
    return marks.SHARDS.get(model.optimizer).values, marks.PARAMETERS.get(
        model.distribute_strategy
    ).values


def fill(model):
    for values in of_values(model):
        values._file = open("/dev/full", "r+b")


class Kept(keras.callbacks.Callback):
    """The number of slots whose values this worker keeps as an epoch begins."""

    def on_epoch_begin(self, epoch, logs=None):
        shards = marks.SHARDS.get(self.model.optimizer)
        known = [] if shards is None else [shards.values.is_kept(slot) for slot in shards.slots]
        self.number = sum(known)


def life(strategy, folder, name):
    """Checkpoints, files, callbacks and resuming with another kind of sharding."""
    strategy.verify = "never"
    whole, seen = build(strategy, shard=None), {}
    fit(whole)
    others = (None, "state")
    pairs = [(one, "parameters") for one in others] + [("parameters", one) for one in others]
    for source, target in [*pairs, ("parameters", "parameters")]:
        place = folder / f"{source}_{target}"
        fit(build(strategy, shard=source), epochs=2, checkpoint=place)
        model, look = build(strategy, shard=target), Kept()
        fit(model, checkpoint=place, callbacks=[look])
        seen[f"{source} to {target}"] = apart(model, whole)
        seen[f"{source} to {target}, values kept"] = look.number
    model, x = build(strategy), rows()[0]
    # Its weights are on all workers until it trains.
    model.predict(x, verbose=0), model.predict_on_batch(x)
    saving = keras.callbacks.ModelCheckpoint(folder / "each.weights.h5", save_weights_only=True)
    fit(model, callbacks=[saving])
    seen["called outside of a step"] = float(
        np.abs(model(rows()[0]).numpy() - whole.predict(rows()[0], verbose=0)).max()
    )
    for name in ("predict", "predict_on_batch"):
        predicted = [getattr(each, name)(x) for each in (model, whole)]
        seen[f"{name} before and after"] = float(np.abs(predicted[0] - predicted[1]).max())
    if topology.is_chief(strategy):
        # On the chief alone, after `fit`.
        model.save(folder / "sharded.keras")
        whole.save(folder / "copies.keras")
    stopped = [build(strategy, shard=shard) for shard in (None, "parameters")]
    for each in stopped:
        fit(each, callbacks=[keras.callbacks.EarlyStopping("loss", 0.5, restore_best_weights=True)])
    seen["stopped early"] = apart(*stopped)
    loaded = build(strategy)
    loaded.load_weights(folder / "each.weights.h5")
    x, y = rows()
    seen["evaluated"] = abs(
        loaded.evaluate(x, y, verbose=0)[0] - whole.evaluate(x, y, verbose=0)[0]
    )
    for each in (loaded, whole):
        each.train_on_batch(x[:16], y[:16])
    tfmulti.gather_optimizer_state(loaded)
    seen["trained on"] = max(np.abs(w).max() for w in loaded.get_weights()) < 100
    return {name: float(value) for name, value in seen.items()}


def loaded(strategy, folder, name):
    """A compiled model from a file goes on as the model did; so does one that is cloned."""
    strategy.verify, file = "never", folder / "compiled.keras"
    copies = build(strategy, optimizer="adamw", shard=None)
    fit(copies, epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(file)])
    sharded = build(strategy, optimizer="adamw")
    fit(sharded, epochs=1)
    with strategy.scope(), tfmulti.sharded_parameters():
        from_file = keras.models.load_model(file)
        clone = keras.models.clone_model(sharded)
    clone.set_weights(sharded.get_weights())
    fresh = build(strategy, optimizer="adamw", shard=None)
    fresh.set_weights(sharded.get_weights())
    models = (copies, from_file, fresh, clone)
    for model in models:
        fit(model, epochs=1)
    return {
        "apart": [apart(copies, from_file), apart(fresh, clone)],
        "steps": [int(model.optimizer.iterations.numpy()) for model in models],
        "held": [held(model) for model in models],
    }


def swapped(strategy, folder, name):
    """SwapEMAWeights evaluates, and with `swap_on_epoch` saves, with moving averages."""
    strategy.verify, histories, models = "never", [], []
    for shard in (None, "state", "parameters"):
        model = build(strategy, optimizer="averages at the end", shard=shard)
        data = tfmulti.distribute_train(rows(), strategy, 16, seed=3)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=name == "swapped")
        file = folder / f"{shard}_{name}.weights.h5"
        saving = keras.callbacks.ModelCheckpoint(file, save_weights_only=True)
        more = {"callbacks": [swap, saving], "verbose": 0}
        history = model.fit(data, validation_data=rows(), epochs=2, **more).history
        model.train_on_batch(rows()[0][:16], rows()[1][:16])
        tfmulti.gather_optimizer_state(model)
        # Here they are not swapped back.
        model.predict(rows()[0], callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)
        models.append(model)
        histories.append(history)
    return {"histories": histories, "apart": [apart(models[0], other) for other in models[1:]]}


def train_in_a_loop(strategy):
    fit(build(strategy, InMap))


def compress(strategy):
    tfmulti.DistributedOptimizer("adam", shard="parameters", compression="bfloat16")


def clip_by_object(strategy):
    with strategy.scope():
        sgd = optimizers.SGD()
        sgd._clip_gradients = lambda grads: grads
        tfmulti.DistributedOptimizer(sgd, shard="parameters")


def assign_within(strategy):
    fit(build(strategy, lambda: tfmulti.checkpoint_activations(chain(Rescaled()))))


def refusals(strategy, folder, name):
    """What is told."""
    strategy.verify = "never"

    def early():
        build(strategy).get_weights()

    def exported():
        model = build(strategy)
        fit(model, epochs=1)
        model.export(folder / f"export_{topology.worker_index(strategy)}", verbose=False)

    def saved_in_scope():
        model = build(strategy)
        fit(model, epochs=1)
        with strategy.scope():
            if topology.is_chief(strategy):
                model.save(folder / "in_scope.keras")
            plain()

    def no_scope():
        with tfmulti.sharded_parameters():
            pass

    def whole():
        model = build(strategy)
        with strategy.scope():
            model.compile("adam", "mse")
        fit(model)

    def outside():
        adam = optimizers.Adam()
        with strategy.scope(), tfmulti.sharded_parameters():
            model = plain()
            model.compile(tfmulti.DistributedOptimizer(adam, shard="parameters"), "mse")
        fit(model)

    def clipped():
        with strategy.scope():
            tfmulti.DistributedOptimizer(Clipped(), shard="parameters")

    programs = (
        early,
        no_scope,
        whole,
        exported,
        saved_in_scope,
        outside,
        clipped,
    )
    programs = {each.__name__: each for each in programs}
    for each in (train_in_a_loop, compress, clip_by_object, assign_within):
        programs[each.__name__] = functools.partial(each, strategy)
    return {name: cases.message_of(program) for name, program in programs.items()}


CASES = {
    "settings": settings,
    "two optimizers": two_optimizers,
    "evaluated first": evaluated_first,
    "evaluated by another": evaluated_by_another,
    "finalized": finalized,
    "in time": in_time,
    "no room": no_room,
    "skips": skips,
    "unfrozen": unfrozen,
    "assigned": assigned,
    "kept": kept,
    "life": life,
    "loaded": loaded,
    "swapped": swapped,
    "swapped to evaluate": swapped,
    "refusals": refusals,
}


def run_case(strategy, folder, name):
    # Else the number of cores decides.
    strategy.extended.gathers_ahead = False
    return CASES.get(name, compare)(strategy, folder, name)


if __name__ == "__main__":
    cases.main(run_case)
