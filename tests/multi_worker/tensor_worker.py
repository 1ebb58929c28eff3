"""One worker trains with layers that are split: `python tensor_worker.py FOLDER CASES`.

Prints a line of JSON with what each case saw. A case trains a model with copies of it, and one
whose layers are split, in the same process, in float64.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cases
import keras
import numpy as np
import tensorflow as tf
from comparison import WAYS, Comparison, apart
from custom_steps import CustomStep, Penalized

import tfmulti
from tfmulti import topology
from tfmulti.parallel.group_rows import Group
from tfmulti.step.split_weights import SplitParameter

layers, optimizers, ops = keras.layers, keras.optimizers, keras.ops
ROWS, WIDTH, TOKENS, WORDS_KNOWN = 33, 24, 7, 51
random = np.random.RandomState(0)
NUMBERS, CLASSES = random.rand(ROWS, WIDTH), random.randint(0, 3, ROWS)
# Rows of several lengths, padded with zeros.
WORDS = random.randint(1, WORDS_KNOWN, (ROWS, TOKENS))
WORDS = WORDS * (np.arange(TOKENS) < random.randint(3, 8, (ROWS, 1)))
PAIR = {"wide/kernel": "column", "back/kernel": "row"}
HEADS = {"(query|key|value)/kernel": "column", "attention_output/kernel": "row"}


def chain(*hidden):
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(3, name="out")])


def mlp(wide=None, **more):
    """A wide layer, whose 37 columns two workers cannot share evenly, and one that follows it."""
    wide = wide or layers.Dense(37, "gelu", name="wide", **more)
    return chain(wide, layers.Dense(16, "tanh", name="back"))


def of_whole_numbers():
    """Whole numbers that a layer split by columns takes, and one split by rows."""
    given = keras.Input((TOKENS,), dtype="int32")
    hidden = layers.Dense(6, "tanh", name="back")(given)
    hidden = layers.Add()([hidden, layers.Dense(6, name="wide")(given)])
    return keras.Model(given, layers.Dense(3)(hidden))


def table(**more):
    words = layers.Embedding(WORDS_KNOWN, 16, name="table", **more)
    hidden = [layers.GlobalAveragePooling1D(), layers.Dense(3)]
    return keras.Sequential([keras.Input((TOKENS,), dtype="int32"), words, *hidden])


def attention(**more):
    """A block of a transformer with masks."""
    given = keras.Input((TOKENS,), dtype="int32")
    one = layers.Embedding(WORDS_KNOWN, 16, mask_zero=True, name="table")(given)
    attended = layers.MultiHeadAttention(3, 8, name="attention", **more)(
        one, one, use_causal_mask=True
    )
    two = layers.LayerNormalization()(layers.Add()([one, attended]))
    three = layers.Dense(16, name="back")(layers.Dense(37, "gelu", name="wide")(two))
    two = layers.Add()([two, three])
    return keras.Model(given, layers.Dense(3)(layers.GlobalAveragePooling1D()(two)))


def crossed(returns_scores=False):
    """Attention between two sequences, with a mask of each row's own and one of the keys."""
    given = keras.Input((TOKENS,), dtype="int32")
    one = layers.Embedding(WORDS_KNOWN, 16, name="table")(given)
    # Another sequence, which is one token shorter, and has a mask.
    other = layers.Embedding(WORDS_KNOWN, 16, mask_zero=True)(given[:, 1:])
    sees = ops.expand_dims(given > 2, 2) & ops.expand_dims(given[:, 1:] > 1, 1)
    attended = layers.MultiHeadAttention(4, 8, use_bias=False, name="attention")(
        one, other, attention_mask=sees, return_attention_scores=returns_scores
    )
    if returns_scores:
        two = ops.mean(attended[0], 1) + ops.mean(attended[1], (1, 2, 3))[:, None]
    else:
        two = ops.mean(attended, 1)
    return keras.Model(given, layers.Dense(3)(two))


class Placed(layers.Layer):
    """A table of words, and one of their positions, which all rows read."""

    def build(self, shape):
        self.table = layers.Embedding(WORDS_KNOWN, 16, name="table")
        self.places = layers.Embedding(TOKENS, 16, name="places")
        for each in (self.table, self.places):
            each.build()

    def call(self, words):
        return ops.tanh(self.table(words) + self.places(ops.arange(TOKENS)))


def placed():
    hidden = [Placed(), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    return keras.Sequential([keras.Input((TOKENS,), dtype="int32"), *hidden])


def grouped(heads=4, keys=2):
    given = keras.Input((TOKENS,), dtype="int32")
    one = layers.Embedding(WORDS_KNOWN, 16, name="table")(given)
    two = layers.GroupQueryAttention(8, heads, keys, name="attention")(one, one)
    return keras.Model(given, layers.Dense(3)(layers.GlobalAveragePooling1D()(two)))


def frozen():
    model = mlp()
    model.get_layer("wide").trainable = False
    return model


def normalized():
    return chain(
        layers.Dense(37, name="wide"),
        layers.BatchNormalization(synchronized=True),
        layers.ReLU(),
        layers.Dense(16, name="back"),
    )


class Deciding(layers.Layer):
    """A loop and a branch that workers run more or less often, by their rows."""

    def build(self, shape):
        self.often = layers.Dense(16, "tanh", name="wide")
        self.seldom = layers.Dense(16, "tanh", name="back")
        self.looks = layers.MultiHeadAttention(2, 8, name="attention")
        self.often.build(shape)
        self.seldom.build(shape)
        self.looks.build(shape, shape)

    def call(self, x):
        counts = tf.cast(tf.abs(x[:, :1, :1]) * 1e5, tf.int32) % 5

        def again(i, x):
            return i + 1, tf.where(i < counts, self.often(x), x)

        _, x = tf.while_loop(lambda i, _: tf.reduce_any(i < counts), again, (0, x))
        few = counts > 3
        looked = lambda: tf.where(few, self.seldom(self.looks(x, x)), x)
        return tf.cond(tf.reduce_any(few), looked, lambda: x)


def deciding():
    table = layers.Embedding(WORDS_KNOWN, 16)
    hidden = [table, Deciding(), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    return keras.Sequential([keras.Input((TOKENS,), dtype="int32"), *hidden])


class Tied(keras.Model):
    """A table that is looked up and multiplied with, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS_KNOWN, 16, name="table")
        self.wide = layers.Dense(16, "tanh", name="wide")
        self.out = layers.Dense(3)
        self(np.zeros((1, TOKENS), "int32"))

    def call(self, tokens):
        hidden = self.wide(self.wide(self.table(tokens)))
        words = ops.matmul(hidden, ops.transpose(self.table.embeddings))
        return self.out(ops.mean(hidden, 1)) + 0.01 * ops.mean(words, axis=(1, 2))[:, None]


class Unreduced(keras.Model):
    """Adds the gradients of two parts of the rows, and reduces them once."""

    def train_step(self, data):
        x, y = data
        sums = [tf.zeros(v.shape, v.dtype) for v in self.trainable_variables]
        for scale in (0.25, 0.75):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            with tfmulti.no_sync():
                found = tape.gradient(loss, self.trainable_variables)
            sums = [old + scale * new for old, new in zip(sums, found)]
        self.optimizer.apply(tfmulti.reduce_gradients(sums), self.trainable_variables)
        return {"loss": loss}


class Assigning(keras.Model):
    """A step that assigns weights: a computed value, and another weight."""

    def train_step(self, data):
        logs = super().train_step(data)
        wide, back = (self.get_layer(name).kernel for name in ("wide", "back"))
        wide.assign(0.9 * wide.value)
        back.assign_sub(0.1 * back)
        back.assign(back)
        return logs


class AssigningInLoop(keras.Model):
    def train_step(self, data):
        wide = self.get_layer("wide").kernel
        tf.map_fn(lambda number: (wide.assign(0.9 * wide.value), number)[1], tf.range(3))
        return super().train_step(data)


def stepping(kind):
    model = mlp()
    return kind(model.inputs, model.outputs)


def adam(**more):
    return lambda: optimizers.Adam(1e-2, **more)


def decaying():
    return optimizers.AdamW(1e-2, weight_decay=0.1, global_clipnorm=0.1)


def clipped():
    return optimizers.SGD(0.1, clipnorm=0.01)


def averaging():
    return optimizers.Nadam(0.01, use_ema=True, ema_overwrite_frequency=3)


def swapping():
    return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]


def scaled():
    return optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0)


def unfreeze(model):
    for layer in model.layers:
        layer.trainable = True


def normalize_features(model):
    model.get_layer("wide").activation = keras.activations.softmax


# As `Comparison` takes them, and `layout`.
TRAINED = {
    "column": {"model": mlp, "layout": {"wide/kernel": "column"}},
    "row": {"model": mlp, "layout": {"back": "row"}},
    "both": {"model": mlp, "layout": PAIR, "optimizer": decaying},
    "whole numbers": {"model": of_whole_numbers, "layout": PAIR, "x": WORDS},
    "vocabulary": {
        "model": table,
        "layout": {"table": "vocabulary"},
        "x": WORDS,
        "optimizer": decaying,
    },
    "attention": {"model": attention, "layout": HEADS | PAIR, "x": WORDS, "optimizer": adam()},
    "table by width": {
        "model": table,
        "layout": {"table": "column"},
        "x": WORDS,
        "optimizer": adam(),
    },
    "negative words": {
        "model": table,
        "layout": {"table": "vocabulary"},
        "x": -WORDS,
        "optimizer": adam(),
    },
    "everything": {
        "model": attention,
        "layout": HEADS | PAIR | {"table": "vocabulary"},
        "x": WORDS,
        "optimizer": adam(gradient_accumulation_steps=2),
    },
    "few rows": {"model": mlp, "layout": PAIR, "global_batch_size": 2},
    "a large bias": {
        "model": lambda: mlp(layers.Dense(2100, "relu", name="wide")),
        "layout": PAIR,
        "global_batch_size": 2,
    },
    "few words": {
        "model": attention,
        "layout": HEADS | PAIR | {"table": "vocabulary"},
        "x": WORDS,
        "global_batch_size": 3,
    },
    "grouped queries": {
        "model": grouped,
        "layout": {"(query|key|value)/": "column", "attention_output": "row"},
        "x": WORDS,
    },
    "grouped queries with uneven keys": {
        "model": lambda: grouped(heads=6, keys=3),
        "layout": {"(query|key|value)/": "column", "attention_output": "row"},
        "x": WORDS,
    },
    "two sequences": {
        "model": crossed,
        "layout": HEADS,
        "x": WORDS,
        "global_batch_size": 3,
    },
    # Eagerly a batch of one row cannot be told from one mask for all rows.
    "one row each": {
        "model": crossed,
        "layout": HEADS,
        "x": WORDS[:13],
        "y": CLASSES[:13],
        "global_batch_size": 2,
        "compile": {"run_eagerly": True},
    },
    "scores of attention": {
        "model": lambda: crossed(returns_scores=True),
        "layout": HEADS,
        "x": WORDS,
    },
    "words and positions": {
        "model": placed,
        "layout": {"table": "vocabulary", "places": "vocabulary"},
        "x": WORDS,
        "optimizer": decaying,
    },
    "tied": {
        "model": Tied,
        "layout": {"table/embeddings": "vocabulary", "wide/kernel": "column"},
        "x": WORDS,
    },
    "in branches": {"model": deciding, "layout": HEADS | PAIR, "x": WORDS},
    "frozen": {"model": frozen, "layout": PAIR, "optimizer": adam()},
    "unfrozen": {"model": frozen, "layout": PAIR, "later": unfreeze},
    "another activation": {"model": mlp, "layout": PAIR, "later": normalize_features},
    "normalized": {"model": normalized, "layout": PAIR},
    "penalties": {
        "model": lambda: mlp(kernel_regularizer="l2", activity_regularizer="l2"),
        "layout": PAIR,
    },
    "accumulated": {
        "model": mlp,
        "layout": PAIR,
        "optimizer": adam(gradient_accumulation_steps=2, global_clipnorm=0.1),
    },
    "clipped": {"model": mlp, "layout": PAIR, "optimizer": clipped},
    "averages": {"model": mlp, "layout": PAIR, "optimizer": averaging},
    "swapped averages": {
        "model": mlp,
        "layout": PAIR,
        "optimizer": averaging,
        "callbacks": swapping,
    },
    "scaled": {"model": mlp, "layout": PAIR, "optimizer": scaled},
    "eager": {"model": mlp, "layout": PAIR, "compile": {"run_eagerly": True}},
    "several steps": {"model": mlp, "layout": PAIR, "compile": {"steps_per_execution": 2}},
    "own step": {"model": lambda: stepping(CustomStep), "layout": PAIR},
    "unreduced": {"model": lambda: stepping(Unreduced), "layout": PAIR},
    "assigned": {"model": lambda: stepping(Assigning), "layout": PAIR},
    "second derivatives": {"model": lambda: stepping(Penalized), "layout": PAIR},
    "recomputed": {
        "model": lambda: tfmulti.checkpoint_activations(mlp(), ["wide", "back"]),
        "layout": PAIR,
        "optimizer": adam(),
    },
}


def divide(strategy, model, case):
    number = int(os.environ.get("GROUP", topology.num_workers(strategy)))
    return tfmulti.tensor_parallel(model, case["layout"], number)


def held(model):
    """The numbers that this worker has of the weights and slots that are split, and all of them."""
    slots = [v for v in model.optimizer.variables if getattr(v, "split", None)]
    parts = [v for v in model.variables if isinstance(v, SplitParameter)] + slots
    here = [int(np.prod(v.split.shape_of())) for v in parts]
    return [sum(here), sum(int(np.prod(v.shape)) for v in parts), len(slots)]


COMPARISON = Comparison(divide, held, NUMBERS, CLASSES)


def trained(strategy, folder, name):
    """How far a model whose layers are split is from copies of it."""
    keras.config.set_floatx(os.environ.get("FLOATX", "float64"))
    return COMPARISON.train(strategy, TRAINED[name], WAYS if name == "both" else WAYS[:1])


def life(strategy, folder, name):
    """Evaluates, predicts, saves, and resumes split and from copies."""
    keras.config.set_floatx("float64")
    strategy.verify = "never"
    return COMPARISON.live(strategy, folder, TRAINED["everything"] | {"optimizer": adam()})


def halves(strategy, folder, name):
    """Products of parts in bfloat16, added in float32."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    case = TRAINED["attention"] | {"optimizer": lambda: optimizers.SGD(0.1)}
    models = [COMPARISON.create(strategy, case, way) for way in ("copies", "split")]
    for model in models:
        model.fit(COMPARISON.batches(strategy, case), epochs=2, verbose=0)
    keras.config.set_dtype_policy("float32")
    return {"weights": apart(*models)}


def exchanges(strategy, folder, name):
    """What workers exchange in the forward passes of attention whose scores drop out."""
    keras.config.set_floatx("float32")
    seen = []

    def counted(original):
        def call(*arguments):
            seen.append(original.__name__)
            return original(*arguments)

        return call

    names = ("all_gather", "reduce_scatter", "rows_to_features", "features_to_rows")
    before = {each: getattr(Group, each) for each in names}
    with strategy.scope(), tfmulti.sharded_parameters():
        model = tfmulti.tensor_parallel(attention(dropout=0.3), HEADS)
        optimizer = tfmulti.DistributedOptimizer("adam", shard="parameters")
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = tfmulti.distribute_train((WORDS, CLASSES), strategy, 8)
    history = model.fit(batches, epochs=2, verbose=0).history
    for each in names:
        setattr(Group, each, counted(before[each]))
    model.evaluate(batches, verbose=0)
    for each in names:
        setattr(Group, each, before[each])
    return {"loss": history["loss"], "seen": sorted(set(seen))}


def refusals(strategy, folder, name):
    def needs(create_model, optimizer=None, **more):
        def program():
            with strategy.scope():
                model = tfmulti.tensor_parallel(create_model(), more.pop("layout", PAIR), **more)
                made = optimizer or tfmulti.DistributedOptimizer("sgd", shard="parameters")
                model.compile(made, "mse")
            model.fit(NUMBERS, NUMBERS[:, :3], verbose=0)

        return cases.message_of(program)

    def sharded(create_optimizer):
        with strategy.scope():
            return tfmulti.DistributedOptimizer(create_optimizer(), shard="parameters")

    def cut():
        with strategy.scope():
            tfmulti.pipeline(tfmulti.tensor_parallel(mlp(), PAIR))

    def of_a_pipeline():
        with strategy.scope():
            tfmulti.tensor_parallel(tfmulti.pipeline(mlp()), PAIR)

    def adapted():
        with strategy.scope():
            model = tfmulti.tensor_parallel(mlp(), PAIR)
            model.get_layer("wide").enable_lora(2)
            model.compile(tfmulti.DistributedOptimizer("sgd", shard="parameters"), "mse")
        model.fit(NUMBERS, NUMBERS[:, :3], verbose=0)

    return {
        "lora": cases.message_of(adapted),
        "groups of three": needs(mlp, group=3),
        "groups of one": needs(mlp, group=1),
        "narrow": needs(lambda: mlp(layers.Dense(1, name="wide")), layout={"wide": "column"}),
        "twice": needs(lambda: tfmulti.tensor_parallel(mlp(), PAIR)),
        "not sharded": needs(mlp, optimizer="sgd"),
        "in a loop": needs(lambda: stepping(AssigningInLoop)),
        "lamb": needs(mlp, optimizer=sharded(optimizers.Lamb)),
        "pipeline": cases.message_of(cut),
        "of a pipeline": cases.message_of(of_a_pipeline),
    }


CASES = {"life": life, "halves": halves, "exchanges": exchanges, "refusals": refusals}


def run_case(strategy, folder, name):
    return CASES.get(name, trained)(strategy, folder, name)


if __name__ == "__main__":
    cases.main(run_case)
