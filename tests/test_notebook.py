"""Notebook kernels, headless: the README's script, the quick start, and `notebook_launch`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import jupyter_client.manager
import nbclient
import nbformat
import numpy as np
import pytest

import tfmulti
from tfmulti import notebook
from tfmulti.launch.config import LaunchConfig
from tfmulti.runtime import processes

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
QUICKSTART = ROOT / "experiments" / "notebooks" / "quickstart.ipynb"
SCRIPT = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]


def run_cells(*cells, allow_errors=False):
    """Runs cells in a fresh kernel; gives the outputs of each as one text."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    return run_notebook(notebook, allow_errors=allow_errors)


def run_notebook(notebook, **options):
    client = nbclient.NotebookClient(notebook, timeout=240, **options)
    client.execute()
    texts = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        parts = [out.get("text") or out.get("evalue") or "" for out in cell.outputs]
        parts += [str(out["data"].get("text/plain")) for out in cell.outputs if "data" in out]
        texts.append("\n".join(parts))
    return texts


def test_a_cell_shows_that_there_are_too_few_gpus(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    job = notebook._create_job(tmp_path, LaunchConfig(num_workers=2))
    job.command = ["true"]
    assert job.run() == 0
    assert "2 workers train on the CPU" in capsys.readouterr().out


def test_what_a_worker_has_said_in_an_earlier_call_is_not_told(tmp_path):
    before = "Traceback (most recent call last):\n  of another call\n"
    (tmp_path / "worker_0.log").write_text(before)
    job = notebook._create_job(tmp_path, LaunchConfig(num_workers=1, log_dir=str(tmp_path)))
    job.command = ["sh", "-c", "echo now; kill -KILL $$"]
    assert job.run() == 128 + signal.SIGKILL
    told = notebook._explain(tmp_path, job, print)
    assert re.fullmatch(r"worker 0 of 1 was ended by SIGKILL after .* s\.\nnow", told)


@pytest.mark.slow
def test_the_script_of_the_readme_runs_twice_in_one_kernel():
    check = "accuracy = model.evaluate(test[0], test[1], verbose=0)[1]\nround(accuracy, 4)"
    first, accuracy, second, again = run_cells(SCRIPT, check, SCRIPT, check)
    assert "Epoch 5/5" in first
    assert "Epoch 5/5" in second
    assert float(accuracy) > 0.9
    assert float(again) > 0.9


@pytest.mark.slow
def test_two_replicas_in_a_kernel():
    script = SCRIPT.replace('"auto"', '"mirrored", logical_cpus=2')
    outputs, replicas = run_cells(script, "strategy.num_replicas_in_sync, strategy.why")
    assert "Epoch 5/5" in outputs
    assert "(2, 'mirrored on CPU:0, CPU:1 (as requested)')" in replicas


# Of logical CPUs tests/test_strategies.py has it.
@pytest.mark.slow
def test_a_cluster_that_comes_too_late_is_said_in_three_parts():
    config = json.loads(processes.tf_configs(1)[0])
    call = f'tfmulti.create_strategy("multi_worker", tf_config={config})'
    used = "import tensorflow as tf\ntf.constant(1) + 1"
    _, message = run_cells(used, f"import tfmulti\n{call}", allow_errors=True)
    assert "`multi_worker` must be created before TensorFlow is used" in message
    assert "Received: " in message
    assert "restart the process (in a notebook: the kernel)" in message


@pytest.mark.slow
def test_the_quick_start(tmp_path):
    notebook = nbformat.read(QUICKSTART, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    texts = run_notebook(notebook, resources={"metadata": {"path": str(tmp_path)}})
    assert texts[0] == ""  # tfmulti is there.
    assert "one_device on CPU:0" in texts[1]
    assert float(re.search("accuracy ([0-9.]+)", texts[4])[1]) > 0.9
    assert float(texts[5]) == 0.0 and (tmp_path / "model.keras").exists()
    assert "Epoch 5/5" in texts[6]
    assert float(re.search("training loss: (.*)", texts[7])[1]) < 1e-3
    assert float(re.search("accuracy: (.*)", texts[7])[1]) > 0.9
    shown = [sum("image/png" in out.get("data", {}) for out in cell.get("outputs", []))
             for cell in notebook.cells]  # fmt: skip
    assert sum(shown) == 3


DEFINITIONS = """
import keras
import numpy as np
import tensorflow as tf
import tfmulti

@keras.saving.register_keras_serializable()
class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale

def soften(x):
    return keras.ops.tanh(x) + 0.1 * x

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
used = tf.reduce_sum(x)

def work(epochs):
    class Absolute(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    strategy = tfmulti.create_strategy("auto")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(3, soften), Scale()]
        layers += [keras.layers.Lambda(lambda x: 2 * x), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, loss=Absolute(), metrics=["mse"])
    data = tfmulti.distribute_train((x, x[:, :1]), strategy, 16, seed=0)
    history = model.fit(data, epochs=epochs, verbose=2)
    return {"history": history, "models": [model, model], "predicted": model.predict(x, verbose=0)}
"""


@pytest.mark.slow
def test_a_function_of_the_notebook_after_tensorflow_was_used_there_and_again():
    launch = """
        first = tfmulti.notebook_launch(work, 2, args=(2,))
        second = tfmulti.notebook_launch(work, 2, kwargs={"epochs": 2})
    """
    check = """
        model, same = first["models"]
        print(np.abs(model.predict(x, verbose=0) - first["predicted"]).max())
        print(first["history"].history == second["history"].history, first["history"].epoch)
        print(model is same, type(model.layers[1]) is Scale, model.loss, len(model.layers))
        values = model.evaluate(x, x[:, :1], verbose=0, return_dict=True)
        print(int(model.optimizer.iterations), sorted(values))
    """
    cells = [textwrap.dedent(cell) for cell in (launch, check)]
    _, launched, checked = run_cells(DEFINITIONS, *cells)
    assert launched.count("Epoch 2/2") == 2 and "[worker" not in launched
    lines = checked.splitlines()
    # Workers predict other numbers of rows at a time, which may change the last bit.
    assert float(lines[0]) < 1e-6
    assert lines[1] == "True [0, 1]"
    assert re.fullmatch("True True <.*Absolute object at .*> 4", lines[2])
    assert lines[-1] == "8 ['loss', 'mse']"


def test_cells_run_again_and_errors_name_them():
    work = """
        import tfmulti

        def add(number):
            return base + number

        base = 40
        print([tfmulti.notebook_launch(lambda: add(2), 2) for _ in range(2)])
    """
    fail = """
        def check(number):
            raise KeyError(f"no {number}")

        def work():
            check(5)

        tfmulti.notebook_launch(work, 2)
    """
    cells = [textwrap.dedent(cell) for cell in (work, fail)]
    printed, failed = run_cells(*cells, allow_errors=True)
    assert printed.strip() == "[42, 42]"
    assert re.match(r"KeyError: 'no 5'\nOn worker [01] of 2, in work:\n", failed)
    assert "  Cell In[2], line 5, in work\n    check(5)\n" in failed
    assert failed.endswith('  Cell In[2], line 2, in check\n    raise KeyError(f"no {number}")')


def index_of_worker():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


@pytest.mark.slow
def test_what_the_chief_returns_comes_back(capsys):
    array = np.arange(1_000_000.0)

    def work(number, *, word):
        print(word, "\u00e4")
        return index_of_worker(), {"sum": array.sum() + number}, lambda: array[3]

    result = tfmulti.notebook_launch(work, 3, args=(2,), kwargs={"word": "one"})
    assert result[:2] == (0, {"sum": array.sum() + 2}) and result[2]() == 3.0
    assert capsys.readouterr().out == "one \u00e4\n"
    tfmulti.notebook_launch(work, 2, args=(2,), kwargs={"word": "one"}, all_output=True)
    written = sorted(capsys.readouterr().out.splitlines())
    assert written == ["[worker 0] one \u00e4", "[worker 1] one \u00e4"]


@pytest.mark.slow
def test_the_error_of_the_worker_that_failed_comes_first(tmp_path):
    def check(index):
        if index == 1:
            raise ValueError("bad record")
        time.sleep(600)

    def work():
        check(index_of_worker())

    with pytest.raises(RuntimeError) as error:
        tfmulti.notebook_launch(work, 2, log_dir=str(tmp_path))
    text = str(error.value)
    assert re.match(r"ValueError: bad record\nOn worker 1 of 2, in .*work:\n", text)
    assert text.endswith(', in check\n    raise ValueError("bad record")')
    log = (tmp_path / "worker_1.log").read_text()
    assert "Traceback" in log and log.endswith("ValueError: bad record\n")


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told():
    with pytest.raises(RuntimeError, match=r"worker 0 of 1 was ended by SIGKILL after .* s"):
        tfmulti.notebook_launch(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)


@pytest.mark.slow
def test_what_cannot_go_to_another_process_is_named():
    import tensorflow as tf

    lock, tensor = threading.Lock(), tf.constant(1.0)

    def inner():
        return lock

    for function, received in (
        (inner, r"inner with `lock`: .* cannot pickle '_thread.lock' object"),
        (lambda: inner(), r"<lambda> with `lock`: "),
        (lambda: tensor + 1, r"<lambda> with `tensor`: an object of .*Tensor"),
    ):
        with pytest.raises(ValueError, match=rf"(?s)`function` must .* Received: .*{received}"):
            tfmulti.notebook_launch(function, 2)
    with pytest.raises(RuntimeError, match=r"(?s)ValueError: `function` must return .*lock"):
        tfmulti.notebook_launch(lambda: {"lock": threading.Lock()}, 1)


@pytest.mark.parametrize(
    ("function", "num_workers", "settings", "rule"),
    [
        (
            5,
            2,
            {},
            "`function` must be a function for every worker to call. Received: function=5. ",
        ),
        (print, 0, {}, "`num_workers` must be a whole number from 1. Received: num_workers=0. "),
        (print, "2", {}, "`num_workers` must be a whole .* Received: num_workers='2'. "),
        (print, 2, {"start_timeout": "9"}, "`start_timeout` must be None or a number. Rec.*='9'. "),
        (print, 2, {"grace": None}, "`grace` must be a number. Received: grace=None. "),
        (print, 2, {"epochs": 3}, "Keyword arg.* must be among all_output, .* Received: epochs. "),
        (
            print,
            2,
            {"args": "mnist"},
            "`args` must be a tuple .*='mnist'. One argument needs a comma",
        ),
        (index_of_worker, 2, {"args": (10,)}, "Received: 1 in `args`, .*: too many positional arg"),
        (lambda epochs: 1, 2, {}, "Received: 0 in `args`, .*'epochs'. Its parameters are .epochs."),
        (print, 2, {"threads": -1}, "`threads` must be at least 0. Received: threads=-1. "),
    ],
)
def test_settings_are_checked_before_anything_starts(function, num_workers, settings, rule):
    with pytest.raises(ValueError, match=rule):
        tfmulti.notebook_launch(function, num_workers, **settings)


def test_a_script_without_a_file_and_another_thread():
    code = """
        import threading, tfmulti
        base = 40
        def work(number):
            return base + number
        def run():
            print(tfmulti.notebook_launch(work, 2, args=(2,)))
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    """
    done = subprocess.run(
        [sys.executable], input=textwrap.dedent(code), capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("42\n42\n", "")


class Kernel:
    """A kernel that a test can interrupt and kill, and the mark of all that it starts."""

    def __init__(self):
        name, value = "TEST_MARK", uuid.uuid4().hex
        self.mark = f"{name}={value}".encode()
        environ = {**os.environ, name: value}
        self.manager, self.client = jupyter_client.manager.start_new_kernel(env=environ)

    def wait_for(self, found):
        """Waits for a message of the cell that runs; gives its content."""
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if found(message["msg_type"], message["content"]):
                return message["content"]

    def left(self):
        """The processes with the mark: the kernel, and all that it has started."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


FOREVER = """
import time, tfmulti

def work():
    print("it runs", flush=True)
    while True:
        time.sleep(0.01)

tfmulti.notebook_launch(work, 2)
"""


def test_nothing_is_left_of_a_cell_that_is_interrupted_nor_of_a_kernel_that_dies(kernel, tmp_path):
    def runs(kind, content):
        return kind == "stream" and "it runs" in content["text"]

    kernel.client.execute(FOREVER)
    kernel.wait_for(runs)
    alone = kernel.manager.provisioner.pid
    assert len(kernel.left()) > 2
    kernel.manager.interrupt_kernel()
    assert kernel.wait_for(lambda kind, _: kind == "error")["ename"] == "KeyboardInterrupt"
    # Jupyter forgets cells that are sent before.
    kernel.wait_for(lambda kind, content: content.get("execution_state") == "idle")
    assert kernel.left() == [alone]
    assert not list(tmp_path.glob("tfmulti_*"))
    kernel.client.execute(FOREVER)
    kernel.wait_for(runs)
    os.kill(alone, signal.SIGKILL)
    limit = time.monotonic() + 30
    while kernel.left() and time.monotonic() < limit:
        time.sleep(0.05)
    assert kernel.left() == []


@pytest.mark.slow
def test_an_error_in_training_on_one_worker_ends_all():
    fail = """
        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if strategy_index() == 1 and batch == 1:
                    raise ValueError("bad record")

        def strategy_index():
            return tfmulti.resolve_cluster(check_network=False).worker_index

        def train():
            strategy = tfmulti.create_strategy("multi_worker")
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
            data = tfmulti.distribute_train((x, x[:, :1]), strategy, 16, seed=0)
            model.fit(data, epochs=5, verbose=0, callbacks=[Stop()])

        tfmulti.notebook_launch(train, 2)
    """
    _, failed = run_cells(DEFINITIONS, textwrap.dedent(fail), allow_errors=True)
    assert "\nValueError: bad record\nOn worker 1 of 2, in train:\n" in f"\n{failed}"
    assert "  Cell In[2], line 15, in train\n    model.fit(" in failed
