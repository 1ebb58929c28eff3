"""What a terminal shows while training goes on, and what a log file has of it."""

import io
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy
from rich.console import Console

import tfmulti
from tfmulti.callbacks import Events, Progress, progress
from tfmulti.callbacks.progress import Screen
from tfmulti.callbacks.throughput import Meter


def build(strategy, steps_per_execution=1):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


def arrays(count=10):
    return np.ones((count, 4), "float32"), np.ones((count, 1), "float32")


def fit(callback_of, *, epochs=3, steps_per_execution=1, **settings):
    """Trains three steps an epoch, of four rows; `callback_of` is a function of the data."""
    strategy = create_strategy(2)
    model = build(strategy, steps_per_execution)
    train = tfmulti.distribute_train(arrays(), strategy, 4, seed=0)
    test = tfmulti.distribute_eval(arrays(), strategy, 4)
    callback = callback_of(train)
    settings = {"verbose": 0, "validation_data": test, **settings}
    model.fit(train, epochs=epochs, callbacks=[callback], **settings)
    return callback


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns that keeps what is written to it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr(progress, "Screen", lambda: Screen(console))
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    return console


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_log_has_one_plain_line_for_each_epoch():
    lines = []
    fit(lambda train: Progress(train, print_fn=lines.append))
    assert [line.split(" - ")[0] for line in lines] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
    for line in lines:
        assert line.isprintable()
        names = re.findall(r"(\w+): \d", line)
        assert names == ["loss", "val_loss", "mae", "val_mae"]
        assert re.search(r"[\d.,]+ examples/s$", line)


def test_keras_gives_way_and_says_nothing(capsys):
    fit(lambda train: Progress(train, print_fn=lambda line: None), verbose="auto")
    assert capsys.readouterr().out == ""


def test_without_a_terminal_lines_are_printed(capsys):
    fit(Progress, epochs=1)
    text = capsys.readouterr().out
    assert text.startswith("Epoch 1/1 - ")
    assert text.count("\n") == 1


@pytest.mark.slow
def test_several_steps_of_a_call_and_an_unknown_number_of_steps():
    lines = []
    fit(lambda train: Progress(train, print_fn=lines.append), steps_per_execution=3)
    assert len(lines) == 3
    model = build(create_strategy(1))

    def batches():
        yield from [arrays(4)] * 5

    spec = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model.fit(data, epochs=2, verbose=0, callbacks=[Progress(print_fn=lines.append)])
    assert lines[-1].startswith("Epoch 2/2 - ")
    assert lines[-1].endswith("steps/s")


def test_long_epochs_are_told_of_between_their_ends():
    class Slow:
        now = 0.0

        def __call__(self):
            self.now += 30.0
            return self.now

    lines = []
    fit(lambda train: Progress(train, print_fn=lines.append, clock=Slow()), epochs=1)
    assert lines[0].startswith("Epoch 1/1 - step ")
    assert lines[-1].startswith("Epoch 1/1 - ")
    assert "step" not in lines[-1]


def test_a_terminal_keeps_the_epochs_and_loses_the_bar(terminal, capsys):
    callback = fit(Progress)
    text = terminal.file.getvalue()
    assert "compiling the first step" in plain(text)
    lines = plain(text).replace("\r", "\n").splitlines()
    rows = [line.rstrip() for line in lines if re.search(r" val \d", line)]
    assert [row.split("  ")[0].strip() for row in rows] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
    assert all(re.search(r"loss [\d.]+ val [\d.]+  mae [\d.]+ val [\d.]+  ", row) for row in rows)
    # The cursor is back, and standard output is what it was.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    callback.close()
    print("still there")
    assert capsys.readouterr().out == "still there\n"


def test_what_is_printed_meanwhile_goes_above_the_bar(terminal):
    class Talks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            print(f"talk of epoch {epoch}")

    strategy = create_strategy(1)
    model = build(strategy)
    model.fit(*arrays(), epochs=2, verbose=0, callbacks=[Progress(), Talks()])
    assert "talk of epoch 1\n" in plain(terminal.file.getvalue()).replace("\r", "\n")


def test_the_terminal_is_given_back_where_fit_is_left(terminal):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("left")

    model = build(create_strategy(1))
    callback = Progress()
    with pytest.raises(RuntimeError, match="left"):
        model.fit(*arrays(), verbose=0, callbacks=[callback, Fails()])
    callback.close()
    text = terminal.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_the_bar_has_room_on_every_terminal(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False)
    screen = Screen(console)
    times = iter(range(100))
    meter = Meter(lambda: float(next(times)))
    meter.begin(20, 1000)
    meter.begin_epoch(11)
    meter.count(1)
    meter.count(700)
    screen.open()
    screen.draw("Epoch 12/20", "train", meter, 0.1234, "44,736 examples/s")
    bar = plain(console.file.getvalue()).replace("\r", "\n").splitlines()[-1]
    screen.close()
    assert len(bar) <= width
    assert "Epoch 12/20" in bar
    assert "700/1000" in bar
    assert ("examples/s" in bar) == (width >= 80)
    assert ("━━" in bar) == ("left" in bar) == (width >= 60)


def test_the_bar_is_drawn_four_times_a_second_at_most(monkeypatch):
    drawn = []
    monkeypatch.setattr(Screen, "draw", lambda self, *args: drawn.append(args))
    monkeypatch.setattr(Screen, "open", lambda self: None)
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    now = [0.0]
    callback = Progress(clock=lambda: now[0])
    callback.set_params({"epochs": 1, "steps": 1000})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    for step in range(1000):
        now[0] += 0.01
        callback.on_train_batch_end(step, {"loss": 1.0})
    # Ten seconds.
    assert 30 <= len(drawn) <= 42
    monkeypatch.undo()
    callback.close()


def test_a_worker_tells_of_its_events():
    lines = []
    fit(lambda train: Events(lines.append), epochs=2)
    assert lines[0] == "began: 2 epochs of 3 steps"
    assert [line.split(" done in ")[0] for line in lines[1:3]] == ["epoch 1/2", "epoch 2/2"]
    assert lines[3] == "training has ended"
