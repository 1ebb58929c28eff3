"""What is said of errors: the cause first, and the user's line."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti
from tfmulti.doctor.__main__ import DoctorConfig
from tfmulti.runtime import command_line, errors

ROWS = np.zeros((4, 1), "float32")


def raised_by(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_users_innermost_line_is_named_and_frameworks_are_passed_over():
    def build():
        return keras.layers.Dense(3, activation="reluu")  # The line.

    place = errors.place_of(raised_by(build))
    assert place.startswith("tests/test_error_messages.py:") or "test_error_messages.py:" in place
    assert "in build" in place
    assert 'keras.layers.Dense(3, activation="reluu")  # The line.' in place


def test_the_users_line_is_the_one_that_called_tfmulti():
    def scale():
        return tfmulti.scale_learning_rate(0.1, 0)  # The call.

    error = raised_by(scale)
    assert "`global_batch_size` and" in errors.short_message(error)
    assert "# The call." in errors.place_of(error)


def test_a_function_within_a_data_pipeline_is_found_by_its_line():
    def read(value):
        if value > 2:
            raise ValueError("record has no label")  # Its line.
        return value

    data = tf.data.Dataset.range(5).map(lambda x: tf.numpy_function(read, [x], tf.int64))
    error = raised_by(list, data)
    assert errors.short_message(error) == "ValueError: record has no label"
    place = errors.place_of(error)
    assert "test_error_messages.py" in place
    assert "in read" in place
    assert "# Its line." in place


def test_a_traced_function_of_a_pipeline_is_found_too():
    def change(value):
        return tf.reshape(value, [3, 7])  # Its line.

    error = raised_by(tf.data.Dataset.from_tensor_slices(np.zeros((4, 8))).map, change)
    assert "Cannot reshape a tensor with 8 elements" in errors.short_message(error)
    assert "# Its line." in errors.place_of(error)


def test_what_an_operation_of_a_graph_says_comes_without_the_graphs_frames():
    model = keras.Sequential([keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    error = raised_by(model.fit, np.zeros((4, 3)), np.array([0, 1, 5, 1]))
    first, second = errors.short_message(error).splitlines()
    assert first.startswith("InvalidArgumentError: Received a label value of 5 which is outside")
    assert second.startswith("  in the graph at compile_loss/sparse_categorical_crossentropy")


def test_lines_without_end_are_cut():
    cause = errors.short_message(ValueError("Labels: " + "1 " * 5000))
    assert cause.startswith("Labels: 1 1") and len(cause) < 1100


def test_the_cause_within_a_layer_comes_before_the_words_about_the_call():
    model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(3)])
    error = raised_by(model, np.zeros((4, 8), "float32"))
    first, second = errors.short_message(error).splitlines()
    assert first.startswith("Input 0 ")
    assert "received input with shape (4, 8)" in first
    assert second.startswith("  in Sequential.call(), which received inputs=tf.Tensor(shape=(4, 8)")
    assert "\x1b" not in first


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor [Op:Add]"),
        tf.errors.InternalError(None, None, "CUDNN_STATUS_ALLOC_FAILED in stream"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_said_in_three_parts(error):
    text = errors.short_message(error)
    assert text.startswith("A training step must fit in the memory of its device. Received: ")
    assert "--per_replica_batch_size auto" in text
    assert "[Op:" not in text


def test_another_internal_error_is_none_of_memory():
    assert not errors.is_out_of_memory(tf.errors.InternalError(None, None, "broken"))
    assert not errors.is_out_of_memory(RuntimeError("out of memory"))


@pytest.mark.parametrize(
    "words",
    [
        "runs/model.keras; No space left on device",
        "runs/model.keras; Disk quota exceeded",
        "data.tfrecord; Too many open files",
        "Received message larger than max (4194305 vs. 4194304)",
    ],
)
def test_a_resource_that_is_no_memory_is_called_what_it_is(words):
    error = tf.errors.ResourceExhaustedError(None, None, words)
    assert not errors.is_out_of_memory(error)
    assert errors.short_message(error) == f"ResourceExhaustedError: {words}"


def test_an_error_is_shown_with_its_line_and_without_frames(capsys):
    def fail():
        raise KeyError("large")

    command_line.show_error(raised_by(fail), with_traceback=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: KeyError: 'large'"
    assert lines[1].endswith('in fail: raise KeyError("large")')
    assert len(lines) == 3
    command_line.show_error(raised_by(fail), with_traceback=True)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_leaves_no_traceback():
    code = "from tfmulti.runtime import command_line\ndef main(): raise KeyboardInterrupt\n"
    command = [sys.executable, "-c", f"{code}command_line.run_and_exit(main)"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == command_line.INTERRUPTED
    assert done.stderr == "Interrupted.\n"


def test_an_interrupt_of_a_command_leaves_no_traceback(monkeypatch, capsys):
    def program(config, tracebacks):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    assert command_line.run(DoctorConfig, "doctor", program, ["doctor"]) == command_line.INTERRUPTED
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    "name, call",
    [
        ("model", lambda: tfmulti.checkpoint_activations(3)),
        ("model", lambda: tfmulti.pipeline(3)),
        ("model", lambda: tfmulti.tensor_parallel(3, {"kernel": "column"})),
        ("model", lambda: tfmulti.synchronize_batch_normalization(3)),
        ("model", lambda: tfmulti.train_async(3, (ROWS, ROWS), batch_size=2)),
        ("strategy", lambda: tfmulti.distribute_train((ROWS, ROWS), 3, 2)),
        ("strategy", lambda: tfmulti.distribute_eval((ROWS, ROWS), 3, 2)),
    ],
)
def test_arguments_of_another_type_are_told(name, call):
    with pytest.raises(ValueError, match=rf"^`{name}` must be a .* Received: {name}=3\. "):
        call()
