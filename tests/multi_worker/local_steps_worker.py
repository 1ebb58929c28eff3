"""One worker trains with local steps: `python local_steps_worker.py FOLDER CASES`.

Prints a line of JSON with what each case saw. `reference` trains the same on one device without a
strategy: a model for each worker, which are averaged by NumPy.
"""

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
from tfmulti.step import local_steps

ROWS, BATCH, SEED, EPOCHS = 33, 16, 3, 3
optimizers = keras.optimizers
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "averages": lambda: optimizers.Nadam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "schedule": lambda: optimizers.Lion(optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)),
    "accumulation": lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "muon": lambda: optimizers.Muon(0.01),
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
    return [
        v
        for v in [*model.weights, *model.optimizer.variables]
        if v is not model.optimizer.iterations and "learning_rate" not in v.path
    ]


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
    pending = 0
    for epoch in range(epochs):
        for step in range(plan.steps_per_epoch):
            for number, model in enumerate(models):
                own, _ = plan.replica_batch(epoch, step, number)
                if len(own):
                    model.train_on_batch(x[own], y[own])
                else:
                    model.optimizer.iterations.assign_add(1)
            pending += 1
            if pending == every or step + 1 == plan.steps_per_epoch or step + 1 in stops:
                average(models)
                pending = 0
    return state_of(models[0])


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


CASES = {}

if __name__ == "__main__":
    cases.main(CASES, default=train)
