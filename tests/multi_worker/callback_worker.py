"""One worker trains with stock callbacks: `python callback_worker.py FOLDER CASES`.

Prints a line of JSON with what each case saw.
"""

import os
import shutil
import signal
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cases
import keras
import numpy as np
import tensorflow as tf

import tfmulti
from tfmulti import checkpoint, topology
from tfmulti.checkpoint import generations
from tfmulti.sharding import epoch_order

NUM_ROWS, BATCH_SIZE = 43, 16


def rows(count=NUM_ROWS):
    rng = np.random.RandomState(0)
    return rng.randn(count, 4).astype("float32"), rng.randn(count, 1).astype("float32")


def build(strategy, optimizer=None, rate=0.1, **compiled):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(rate) if optimizer is None else optimizer()
        model.compile(tfmulti.DistributedOptimizer(optimizer), "mse", **compiled)
    return model


def fit(model, callbacks=(), epochs=4, data=None):
    strategy = model.distribute_strategy
    data = tfmulti.distribute_train(rows() if data is None else data, strategy, BATCH_SIZE, seed=0)
    test = tfmulti.distribute_eval(rows(21), strategy, BATCH_SIZE)
    return model.fit(data, validation_data=test, epochs=epochs, verbose=0, callbacks=callbacks)


def weights_of(model):
    return [weight.ravel().tolist() for weight in model.get_weights()]


def files(strategy, folder):
    """All that write, into the same place on every worker."""
    model = build(strategy)
    kept, weights = folder / "best.keras", folder / "epoch_{epoch}.weights.h5"
    callbacks = [
        keras.callbacks.ModelCheckpoint(kept, save_best_only=True),
        keras.callbacks.ModelCheckpoint(weights, save_weights_only=True),
        keras.callbacks.ModelCheckpoint(folder / "steps.keras", save_freq=2),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TensorBoard(folder / "logs", histogram_freq=1, update_freq="batch"),
    ]
    history = fit(model, callbacks).history
    # A program may read on every worker what the chief has written.
    *savers, table, logs = callbacks
    paths = [*[each.filepath for each in savers], table.filename, logs.log_dir]
    kept_here = [float(path.startswith(str(folder))) for path in paths]
    return {"history": history, "weights": weights_of(model), "kept here": kept_here}


def early_stopping(strategy, folder):
    model = build(strategy, rate=1.0)
    callbacks = [keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)]
    history = fit(model, callbacks, epochs=10)
    return {"epochs": history.epoch, "weights": weights_of(model)}


def plateau(strategy, folder):
    model = build(strategy, rate=1.0)
    callbacks = [keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=1.0)]
    history = fit(model, callbacks).history
    return {"rates": [float(rate) for rate in history["learning_rate"]]}


def not_a_number(strategy, folder):
    """One row is bad; only the replica that has it sees a loss that is not a number."""
    model, seen = build(strategy), []
    x, y = rows()
    y[epoch_order(NUM_ROWS, 0, epoch=0)[2 * BATCH_SIZE - 1]] = np.nan
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"]))
    )
    fit(model, [note, keras.callbacks.TerminateOnNaN()], data=(x, y))
    return {"steps": int(model.optimizer.iterations.numpy()), "losses": [str(v) for v in seen]}


def averages(strategy, folder):
    """SwapEMAWeights evaluates and saves with averages."""
    model = build(strategy, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.ModelCheckpoint(folder / "ema.weights.h5", save_weights_only=True),
    ]
    history = fit(model, callbacks).history
    model.load_weights(folder / "ema.weights.h5")
    return {"history": history, "weights": weights_of(model)}


def one_stops(strategy, folder):
    """One worker alone asks to stop, after its second epoch."""
    model = build(strategy)
    worker = topology.worker_index(strategy)

    def ask(epoch, logs):
        model.stop_training = worker == 1 and epoch == 1

    history = fit(model, [keras.callbacks.LambdaCallback(on_epoch_end=ask)], epochs=5)
    return {"epochs": history.epoch}


def unequal(strategy, folder):
    """Datasets of workers that do not end together: batches of 4, one worker has 5, one 3."""
    worker = topology.worker_index(strategy)
    x, y = rows(32)
    mine = (x[:20], y[:20]) if worker == 0 else (x[20:], y[20:])

    def dataset(context=None):
        return tf.data.Dataset.from_tensor_slices(mine).batch(4)

    def from_function():
        return strategy.distribute_datasets_from_function(dataset)

    def without_autoshard():
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return tf.data.Dataset.from_tensor_slices(mine).batch(8).with_options(options)

    seen = {}
    for create in (from_function, without_autoshard):
        model = build(strategy)
        history = model.fit(create(), epochs=2, verbose=0).history
        evaluated = model.evaluate(create(), verbose=0)
        steps = int(model.optimizer.iterations.numpy())
        seen[create.__name__] = [history["loss"], evaluated, steps, weights_of(model)]
        model.fit(create(), steps_per_epoch=9, epochs=1, verbose=0)
        seen[f"{create.__name__}, too few"] = int(model.optimizer.iterations.numpy()) - steps
    return seen


def backup(strategy, folder):
    try:
        fit(build(strategy), [keras.callbacks.BackupAndRestore(folder / "backup")])
    except ValueError as error:
        return str(error).split(".")[0]


def random_states(strategy, folder):
    """Each worker draws numbers of its own, also after a run has resumed."""
    seed = 100 + topology.worker_index(strategy)
    data = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=0)
    drawn = []
    for epochs in (1, 2):
        model, saver = build(strategy), tfmulti.callbacks.Checkpoint(folder / "random", data)
        # What the second `fit` begins with does not count.
        np.random.seed(seed * epochs)
        draw = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: drawn.append(np.random.rand())
        )
        model.fit(data, epochs=epochs, verbose=0, callbacks=[draw, saver])
    np.random.seed(seed)
    return {"drawn": drawn == np.random.rand(2).tolist()}


def sigterm(strategy, folder):
    """One worker alone is told to end while it validates after the last epoch."""
    model, ended = build(strategy), 0
    data = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=0)
    test = tfmulti.distribute_eval(rows(21), strategy, BATCH_SIZE)

    def tell(logs):
        if topology.worker_index(strategy) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    saver = tfmulti.callbacks.Checkpoint(folder / "told", data)
    told = keras.callbacks.LambdaCallback(on_test_end=tell)
    # The worker has other cases.
    with mock.patch("tfmulti.runtime.processes.end_process_at_exit"):
        try:
            model.fit(data, validation_data=test, verbose=0, callbacks=[saver, told])
        except SystemExit as error:
            ended = error.code
    return {"ended": ended, "saved": saver.saved}


def checkpoint_errors(strategy, folder):
    """The chief can read no checkpoint, or write none from the start or later: all end with it."""
    data = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=0)
    damaged, file, lost = folder / "damaged", folder / "file", folder / "lost"

    def lose_folder(epoch, logs=None):
        if topology.is_chief(strategy):
            shutil.rmtree(lost)
            lost.write_text("")

    if topology.is_chief(strategy):
        (damaged / checkpoint.name_of(3)).mkdir(parents=True)
        file.write_text("")
    told = []
    for place in (damaged, file / "folder", lost):
        callbacks = [tfmulti.callbacks.Checkpoint(place, data)]
        if place == lost:
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=lose_folder))
        data.set_position(0)
        try:
            build(strategy).fit(data, verbose=0, callbacks=callbacks)
        except generations.CheckpointError as error:
            told.append(str(error).split(" Received")[0])
    return told


CASES = {
    each.__name__: each
    for each in (
        files,
        early_stopping,
        plateau,
        not_a_number,
        averages,
        one_stops,
        unequal,
        backup,
        random_states,
        sigterm,
        checkpoint_errors,
    )
}


def run_case(strategy, folder, name):
    keras.utils.clear_session()
    return CASES[name](strategy, folder)


if __name__ == "__main__":
    cases.main(run_case, verify="auto")
