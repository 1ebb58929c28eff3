"""One worker trains a pipeline: `python pipeline_worker.py FOLDER CASES`.

Prints a line of JSON with what each case saw. A case trains a model with copies of it, and one in
stages, in the same process, in float64.
"""

import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cases
import keras
import numpy as np
import tensorflow as tf
from comparison import WAYS, Comparison, apart, usual_loss
from custom_steps import CustomStep, Penalized

import tfmulti
from tfmulti import topology, verification
from tfmulti.step.parameters import ShardedParameter

layers, optimizers = keras.layers, keras.optimizers
ROWS, WIDTH, TOKENS = 33, 64, 12
random = np.random.RandomState(0)
NUMBERS, CLASSES = random.rand(ROWS, WIDTH), random.randint(0, 3, ROWS)
# Rows of several lengths, padded with zeros.
WORDS = random.randint(1, 50, (ROWS, TOKENS)) * (np.arange(TOKENS) < random.randint(3, 13, (33, 1)))


def chain(*hidden):
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(3)])


def dense():
    return chain(layers.Dense(96, "tanh"), layers.Dense(80, "relu"), layers.Dense(64))


def skips():
    """A value that passes a whole stage, an input that the last one takes, a shared layer."""
    given, shared = keras.Input((WIDTH,)), layers.Dense(32, "tanh", name="shared")
    one = shared(given)
    two = layers.Add()([layers.Dense(32, "relu")(one), one])
    two = layers.Concatenate()([layers.Dense(WIDTH, name="late")(two), one, given])
    return keras.Model(given, layers.Dense(3)(shared(layers.Dense(WIDTH)(two))))


def attention():
    given = keras.Input((TOKENS,), dtype="int32")
    one = layers.Embedding(50, 16, mask_zero=True)(given)
    two = layers.LayerNormalization()(
        layers.Add()([one, layers.MultiHeadAttention(2, 8)(one, one)])
    )
    two = layers.Add()([two, layers.MultiHeadAttention(2, 8)(two, two)])
    return keras.Model(given, layers.Dense(3)(layers.GlobalAveragePooling1D()(two)))


def recurrent():
    hidden = [layers.LSTM(16, return_sequences=True), layers.GRU(8)]
    table = layers.Embedding(50, 16, mask_zero=True)
    return keras.Sequential([keras.Input((TOKENS,)), table, *hidden, layers.Dense(3)])


def convolutions():
    hidden = [layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(8, 3), layers.Flatten()]
    return chain(layers.Reshape((8, 8, 1)), *hidden)


def penalties():
    square = keras.regularizers.L2(0.01)
    return chain(
        layers.Dense(32, "tanh", kernel_regularizer=square),
        layers.Dense(32, activity_regularizer=square),
        layers.Dense(16, bias_regularizer=square),
    )


def normalized(synchronized=False):
    hidden = [layers.Dense(32), layers.BatchNormalization(synchronized=synchronized)]
    more = [layers.Dense(16), layers.BatchNormalization(synchronized=synchronized)]
    return chain(*hidden, layers.ReLU(), *more)


def adapted():
    """Begins with a layer whose statistics are set before the training."""
    first = layers.Normalization()
    first.adapt(NUMBERS)
    return chain(first, layers.Dense(16), layers.Dense(16))


def frozen(synchronized=False):
    model = normalized(synchronized)
    model.trainable = False
    return model


def unfreeze(model):
    model.trainable = True


def several():
    """Three inputs, two of them of floating point, and two outputs."""
    numbers, words = keras.Input((WIDTH,), name="a"), keras.Input((TOKENS,), name="b")
    few = keras.Input((3,), name="c")
    one = layers.Dense(16, "relu")(layers.Concatenate()([numbers, few]))
    two = layers.GlobalAveragePooling1D()(layers.Embedding(50, 16)(words))
    two = layers.Dense(16)(layers.Add()([one, two]))
    outputs = {"class": layers.Dense(3, name="class")(two), "sum": layers.Dense(1, name="sum")(one)}
    return keras.Model({"a": numbers, "b": words, "c": few}, outputs)


def whole_numbers():
    """A first stage that passes on whole numbers alone, so no gradient comes back to it."""
    given = keras.Input((TOKENS,), dtype="int32")
    halves = layers.Reshape((2, TOKENS // 2))(given)
    one = layers.Flatten()(layers.Embedding(50, 16, name="table")(halves))
    return keras.Model(given, layers.Dense(3)(one))


def tied():
    """A table that is looked up in the first stage, and multiplied with in the last."""
    given, table = keras.Input((TOKENS,), dtype="int32"), layers.ReversibleEmbedding(50, 16)
    one = layers.Dense(16, "tanh")(table(given))
    return keras.Model(given, layers.GlobalAveragePooling1D()(table(one, reverse=True)))


def twins():
    """A tower that both inputs pass through, which is a model itself."""
    tower = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(24, "tanh"), layers.Dense(16)])
    given = keras.Input((WIDTH,))
    pair = tower(given), tower(layers.Rescaling(2.0)(given))
    return keras.Model(given, layers.Dense(3)(layers.Subtract()(pair)))


class OnNeighbors(keras.Model):
    """Trains on inputs that were moved along the gradient of the loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            total = tf.reduce_sum(losses)
        x = x + 0.1 * tf.sign(tape.gradient(total, x))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class OfSteepWeights(keras.Model):
    """A penalty on the gradients of weights, which needs their second derivative."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = self.compute_loss(x, y, self(x, training=True))
            steep = inner.gradient(loss, self.trainable_variables)
            total = loss + 0.1 * sum(tf.reduce_sum(tf.square(each)) for each in steep)
        gradients = tape.gradient(total, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": total}


class Sensitive(keras.Model):
    """Takes two gradients of one pass, and logs that of the inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            outputs = self(x, training=True)
            loss, total = self.compute_loss(x, y, outputs), tf.reduce_sum(outputs)
        steep = tf.reduce_mean(tf.square(tape.gradient(total, x)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "steep": steep}


def stepping(kind):
    model = dense()
    return kind(model.inputs, model.outputs)


def masked():
    """A mean over unmasked words, which a row of nothing but padding does not have."""
    given = keras.Input((TOKENS,), dtype="int32")
    words = layers.Embedding(50, 16, mask_zero=True)(given)
    hidden = layers.Dense(16, "tanh")(layers.GlobalAveragePooling1D()(words))
    return keras.Model(given, layers.Dense(3)(layers.Dense(16, "tanh")(hidden)))


def squaring():
    """Squares the gradient of each word by itself."""
    return optimizers.Adam(0.01)


class Sizes(layers.Layer):
    """Metrics of its own: a mean, and a sum, which no row may enter twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = keras.metrics.Mean(name=f"{self.name}_size")
        self.total = keras.metrics.Sum(name=f"{self.name}_total")

    def call(self, inputs):
        sizes = keras.ops.mean(keras.ops.abs(inputs), axis=-1)
        self.size.update_state(sizes)
        self.total.update_state(sizes)
        return inputs


def measured():
    hidden = layers.Dense(96, "tanh"), Sizes(name="first"), layers.Dense(80), Sizes(name="last")
    return chain(*hidden, layers.Dense(64))


def clipped():
    return optimizers.AdamW(1e-3, global_clipnorm=0.1)


def decaying():
    return optimizers.AdamW(1e-3, weight_decay=0.1)


def accumulated():
    return optimizers.Adam(1e-3, gradient_accumulation_steps=2)


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)


def swapping():
    return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]


def scaled():
    return optimizers.LossScaleOptimizer(optimizers.SGD(0.1))


# As `Comparison` takes them, and `pipeline`, settings.
TRAINED = {
    "dense": {"model": dense},
    "skips": {"model": skips},
    "attention": {"model": attention, "x": WORDS},
    "recurrent": {"model": recurrent, "x": WORDS},
    "convolutions": {"model": convolutions},
    "penalties": {"model": penalties},
    "several": {
        "model": several,
        "x": {"a": NUMBERS, "b": WORDS, "c": NUMBERS[:, 1:4]},
        "y": {"class": CLASSES, "sum": NUMBERS[:, :1]},
        "loss": lambda: {"class": usual_loss(), "sum": "mse"},
        "metrics": None,
    },
    "a head without a loss": {
        "model": several,
        "x": {"a": NUMBERS, "b": WORDS, "c": NUMBERS[:, 1:4]},
        "y": {"class": CLASSES, "sum": NUMBERS[:, :1]},
        "loss": lambda: {"class": usual_loss()},
        "metrics": None,
        "optimizer": decaying,
    },
    "one micro-batch": {"model": dense, "pipeline": {"micro_batches": 1}},
    "more micro-batches than rows": {"model": dense, "pipeline": {"micro_batches": 40}},
    "few rows": {"model": dense, "global_batch_size": 5},
    "recomputed": {"model": attention, "x": WORDS, "pipeline": {"checkpoint_activations": True}},
    "timed": {"model": recurrent, "x": WORDS, "pipeline": {"measure_rows": 4}},
    "named": {"model": skips, "pipeline": {"stages": ["late"]}},
    "whole numbers": {"model": whole_numbers, "x": WORDS, "pipeline": {"stages": ["table"]}},
    # Their last batches have one row.
    "measured": {"model": measured, "pipeline": {"micro_batches": 4}},
    "masked": {"model": masked, "x": WORDS, "optimizer": squaring},
    "clipped": {"model": dense, "optimizer": clipped},
    "accumulated": {"model": dense, "optimizer": accumulated},
    "scaled": {"model": dense, "optimizer": scaled},
    "swapped averages": {
        "model": dense,
        "optimizer": averaging,
        "callbacks": swapping,
    },
    "eager": {"model": dense, "compile": {"run_eagerly": True}},
    "several steps": {"model": dense, "compile": {"steps_per_execution": 2}},
    "own step": {"model": lambda: stepping(CustomStep)},
    "gradients of inputs": {"model": lambda: stepping(OnNeighbors)},
    "two gradients": {"model": lambda: stepping(Sensitive)},
    "twins": {"model": twins},
    "tied": {"model": tied, "x": WORDS},
    "normalized": {
        "model": normalized,
        "copies": lambda: normalized(synchronized=True),
        "pipeline": {"micro_batches": 1},
    },
    "adapted": {"model": adapted},
    "unfrozen": {
        "model": frozen,
        "copies": lambda: frozen(synchronized=True),
        "pipeline": {"micro_batches": 1},
        "later": unfreeze,
    },
}


def divide(strategy, model, case):
    number = int(os.environ.get("STAGES", topology.num_workers(strategy)))
    settings = {"stages": number, "micro_batches": 3, **case.get("pipeline", {})}
    return tfmulti.pipeline(model, **settings)


def held(model):
    """The sharded weights, those of them that are here, and all weights."""
    sharded = [v for v in model.variables if isinstance(v, ShardedParameter)]
    return [len(sharded), sum(v.is_here for v in sharded), len(model.trainable_variables)]


COMPARISON = Comparison(divide, held, NUMBERS, CLASSES)


def create(strategy, case, way="stages"):
    return COMPARISON.create(strategy, case, way)


def batches(strategy, case):
    return COMPARISON.batches(strategy, case)


def trained(strategy, folder, name):
    """How far a model in stages is from copies of it."""
    keras.config.set_floatx("float64")
    return COMPARISON.train(strategy, TRAINED[name], WAYS if name == "dense" else WAYS[:1])


def life(strategy, folder, name):
    """Evaluates, predicts, saves, and resumes in stages and from copies."""
    keras.config.set_floatx("float64")
    return COMPARISON.live(strategy, folder, TRAINED["dense"])


def chosen_differences(strategy, folder, name):
    """Dropout and local batch normalization: what is told to differ, and still verified."""
    keras.config.set_floatx("float64")
    noisy = {"model": lambda: chain(layers.Dense(32), layers.Dropout(0.5), layers.Dense(16))}
    model = create(strategy, noisy)
    before = [v.numpy().tolist() for v in model.variables if v.name == "seed_generator_state"]
    model.fit(batches(strategy, noisy), epochs=1, verbose=0)
    after = [v.numpy().tolist() for v in model.variables if v.name == "seed_generator_state"]
    case = {"model": normalized}
    plain = create(strategy, case)
    recomputed = create(strategy, case | {"pipeline": {"checkpoint_activations": True}})
    for each in (plain, recomputed):
        each.fit(batches(strategy, case), epochs=2, verbose=0)
    whole = create(strategy, case | {"pipeline": {"micro_batches": 1}})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        whole.fit(batches(strategy, case), epochs=1, verbose=0)
    told = [str(each.message) for each in told if "normaliz" in str(each.message)]
    moving = [v for v in plain.non_trainable_variables if "moving" in v.name]
    return {
        "seeds": [before, after],
        "recomputed": apart(plain, recomputed),
        "told": told if topology.num_workers(strategy) == 2 else [],
        "moving": [float(np.abs(v.numpy()).sum()) for v in moving],
    }


class Centered(layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(tfmulti.gather_batch(inputs), axis=0)


class OfMicroBatch(layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0)


class Averaging(layers.Layer):
    """Keeps a moving mean of what it is given."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], trainable=False, initializer="zeros")

    def call(self, inputs):
        mean = tf.reduce_mean(inputs, axis=0)
        self.mean.assign(0.9 * self.mean + 0.1 * tf.stop_gradient(mean))
        return inputs


def beside_normalization(strategy, folder, name):
    """What the check before training tells of models with batch normalization in stages."""
    keras.config.set_floatx("float64")

    def told_of(*others, micro_batches=3):
        hidden = (layers.BatchNormalization(), *others, layers.Dense(8))
        case = {"model": lambda: chain(layers.Dense(8), *hidden)}
        model = create(strategy, case | {"pipeline": {"micro_batches": micro_batches}})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            error = cases.message_of(lambda: model.fit(batches(strategy, {}), verbose=0))
        return [error, *(str(each.message) for each in told if each.category is UserWarning)]

    return {"own": told_of(OfMicroBatch()), "none": told_of(), "one": told_of(micro_batches=1)}


def state_in_half_precision(strategy, folder, name):
    """The moving mean of a layer that computes in bfloat16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    case = {"model": lambda: chain(Averaging(), layers.Dense(8), layers.Dense(8))}
    strategy.verify = "never"
    model = create(strategy, case)
    error = cases.message_of(lambda: model.fit(batches(strategy, case), verbose=0))
    keras.config.set_dtype_policy("float32")
    mean = model.layers[0].mean
    return [error, mean.dtype, float(keras.ops.sum(mean))]


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


class Deciding(keras.Sequential):
    """Computes a batch only if any of its rows needs it."""

    def predict_step(self, data):
        none = lambda: tf.zeros([tf.shape(data)[0], 3], data.dtype)
        return tf.cond(tf.reduce_any(data > 0.999), lambda: self(data), none)


def predict_in_a_branch():
    model = tfmulti.pipeline(Deciding([keras.Input((WIDTH,)), *dense().layers]))
    model.predict(NUMBERS, verbose=0)


def refusals(strategy, folder, name):
    keras.config.set_floatx("float64")

    def needs(function):
        with strategy.scope():
            return cases.message_of(function)

    def wrong_optimizer():
        model = tfmulti.pipeline(dense())
        model.compile(tfmulti.DistributedOptimizer(optimizers.SGD(0.1)), "mse")
        model.fit(NUMBERS, CLASSES, verbose=0)

    def compiled():
        model = dense()
        model.compile("sgd", "mse")
        tfmulti.pipeline(model)

    def of_strings():
        words = keras.Input((2,), dtype="string", name="words")
        numbers = layers.StringLookup(vocabulary=["a"])(words)
        return keras.Model(words, layers.Dense(3)(layers.Embedding(4, 3)(numbers)))

    def gathered():
        model = create(strategy, {"model": lambda: chain(Centered(), layers.Dense(8))})
        model.fit(batches(strategy, {}), verbose=0)

    def noisy_twice():
        given, noise = keras.Input((WIDTH,)), layers.Dropout(0.5)
        hidden = layers.Dense(WIDTH)(layers.Dense(WIDTH)(noise(given)))
        return keras.Model(given, layers.Dense(3)(noise(hidden)))

    def penalized(kind):
        model = create(strategy, {"model": lambda: stepping(kind)})
        model.fit(batches(strategy, {}), verbose=0)

    def warnings_of(kind):
        model = create(strategy, {"model": lambda: stepping(kind)})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.fit(batches(strategy, {}), verbose=0)
        return [str(each.message) for each in told if each.category is UserWarning]

    return {
        "warnings": warnings_of(CustomStep),
        "stages": needs(lambda: tfmulti.pipeline(dense(), stages=5)),
        "one stage": needs(lambda: tfmulti.pipeline(dense(), stages=1)),
        "strings": needs(lambda: tfmulti.pipeline(of_strings())),
        "gathered": needs(gathered),
        "names": needs(lambda: tfmulti.pipeline(dense(), stages=["nothing"])),
        "micro_batches": needs(lambda: tfmulti.pipeline(dense(), micro_batches=0)),
        "synchronized": needs(lambda: tfmulti.pipeline(normalized(synchronized=True))),
        "shared state": needs(lambda: tfmulti.pipeline(noisy_twice())),
        "subclassed": needs(lambda: tfmulti.pipeline(Subclassed())),
        "compiled": needs(compiled),
        "optimizer": needs(wrong_optimizer),
        "penalized": needs(lambda: penalized(Penalized)),
        "penalized weights": needs(lambda: penalized(OfSteepWeights)),
        "branch": needs(predict_in_a_branch),
    }


def synchronized_copies(strategy, folder, name):
    case = {"model": lambda: normalized(True), "pipeline": {"micro_batches": 1}}

    def later():
        model = create(strategy, case | {"model": normalized})
        tfmulti.synchronize_batch_normalization(model)
        model.fit(batches(strategy, case), verbose=0)

    return [cases.message_of(call) for call in (lambda: create(strategy, case), later)]


def verified_by_auto(strategy, folder, name):
    strategy.verify = "auto"
    model = create(strategy, TRAINED["dense"])
    return verification.may_be_verified(model, verification.TRAIN)


CASES = {
    "life": life,
    "verified by auto": verified_by_auto,
    "synchronized copies": synchronized_copies,
    "chosen differences": chosen_differences,
    "beside normalization": beside_normalization,
    "state in half precision": state_in_half_precision,
    "refusals": refusals,
}


def run_case(strategy, folder, name):
    return CASES.get(name, trained)(strategy, folder, name)


if __name__ == "__main__":
    cases.main(run_case)
