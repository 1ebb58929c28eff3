"""What each kind of name gives, and what each mistake in one is answered with."""

import contextlib
import hashlib
import http.server
import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import threading
import time

import keras
import numpy as np
import pytest

from tfmulti.data import datasets, sources
from tfmulti.data.datasets import load_dataset, load_split, resolve_function
from tfmulti.train.models import create_model

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAIL_WITHIN_S = 15
DIGITS_SHA256 = "74e2e100a0c3213b66c16fc558c9711c29eecc366b1c6ee83188e8fa16fb28cb"


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module of the user into the current folder: `user_module("name", source)`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name, source):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.fixture
def tfds(tmp_path, monkeypatch):
    """tensorflow-datasets, with its data folder in tmp_path."""
    import tensorflow_datasets

    monkeypatch.setattr(tensorflow_datasets.core.constants, "DATA_DIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tensorflow_datasets


def create_builder_class(tfds, class_name, splits, *, keys=("image", "label"), **attributes):
    """A builder of images of constant brightness; `splits` maps a name to its labels.

    Making the class registers its name.
    """

    def info(self):
        features = {
            "image": tfds.features.Image(shape=(4, 4, 1)),
            "label": tfds.features.Scalar(np.int64),
        }
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=keys)

    def examples(labels):
        for number, label in enumerate(labels):
            yield number, {"image": np.full((4, 4, 1), number, np.uint8), "label": label}

    def split_generators(self, dl_manager):
        return {name: examples(labels) for name, labels in splits.items()}

    parts = {
        "VERSION": tfds.core.Version("1.0.0"),
        "_info": info,
        "_split_generators": split_generators,
        "_generate_examples": lambda self: None,
        "__module__": __name__,
    }
    return type(class_name, (tfds.core.GeneratorBasedBuilder,), {**parts, **attributes})


@contextlib.contextmanager
def raises_in_three_parts(*texts, kind=ValueError):
    with pytest.raises(kind) as error:
        yield error
    message = str(error.value)
    assert "`" in message.split("Received:")[0] or "must" in message.split("Received:")[0]
    assert "Received: " in message
    for text in texts:
        assert text in message, message


# --- digits


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip(
        "sklearn.datasets", reason="needs scikit-learn: pip install 'tfmulti[libraries]'"
    )
    x, y = map(np.concatenate, zip(*load_dataset()))
    ours = sorted(map(tuple, np.c_[x.reshape(1797, 64) * 16, y]))
    theirs = datasets.load_digits()
    assert ours == sorted(map(tuple, np.c_[theirs.data, theirs.target]))


def test_digits_have_the_shapes_and_values_of_images_with_labels():
    (x, y), (x_test, y_test) = load_dataset()
    assert x.shape == (1437, 8, 8, 1) and x_test.shape == (360, 8, 8, 1)
    assert y.shape == (1437,) and y_test.shape == (360,)
    assert x.dtype == x_test.dtype == np.float32 and y.dtype == y_test.dtype == np.int64
    assert x.min() == 0 and x.max() == 1
    assert set(y) == set(y_test) == set(range(10))


def test_digits_split_is_the_same_everywhere():
    checksum = hashlib.sha256()
    for x, y in load_dataset("digits"):
        checksum.update((x * 16).astype("<i4").tobytes())
        checksum.update(y.astype("<i8").tobytes())
    assert checksum.hexdigest() == DIGITS_SHA256


def test_split_of_digits():
    x, y = load_split("digits/test")
    np.testing.assert_array_equal(y, load_dataset("digits")[1][1])
    assert sources.create_source("digits/train", 0).num_examples == 1437


@pytest.mark.parametrize("name", ["digits", "digits/", "/train"])
def test_split_needs_both_parts(name):
    with raises_in_three_parts(repr(name), "digits/train"):
        load_split(name)


def test_unknown_split_of_digits():
    with raises_in_three_parts("train or test"):
        load_split("digits/validation")


@pytest.mark.slow
def test_import_is_light():
    code = "import sys, tfmulti.data.datasets; print([m for m in sys.modules if '.' not in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for module in ("tensorflow_datasets",):
        assert f"'{module}'" not in done.stdout


# --- functions of the user

GOOD_FUNCTIONS = {
    "arrays": "(np.zeros((6, 2)), np.arange(6)), (np.zeros((3, 2)), np.arange(3))",
    "lists": "[[np.zeros((6, 2)), np.arange(6)], [np.zeros((3, 2)), np.arange(3)]]",
    "weights": "((np.zeros((6, 2)), np.arange(6), np.ones(6)),) * 2",
    "inputs": "(({'a': np.zeros((6, 2)), 'b': np.ones(6)}, np.arange(6)),) * 2",
    "stream": "(tf.data.Dataset.from_tensor_slices((np.zeros((6, 2)), np.arange(6))),) * 2",
    "mixed": "(tf.data.Dataset.from_tensors((1., 2.)).repeat(6), (np.zeros(3), np.zeros(3)))",
}


@pytest.mark.parametrize("kind", GOOD_FUNCTIONS)
def test_function_of_the_user(user_module, kind):
    user_module(
        f"good_{kind}",
        f"""
        import numpy as np
        import tensorflow as tf

        def load():
            return {GOOD_FUNCTIONS[kind]}
        """,
    )
    train, test = load_dataset(f"good_{kind}:load")
    source = sources.create_source(train, 0)
    assert source.num_examples == 6
    assert len(source.element_spec) == (3 if kind == "weights" else 2)
    assert type(load_split(f"good_{kind}:load/train")) is type(train)
    if kind == "inputs":
        assert set(train[0]) == {"a", "b"}
    if kind == "lists":
        assert isinstance(train, tuple)


BAD_RETURNS = {
    "nothing": ("None", "NoneType", "pair"),
    "three": ("(1, 2, 3)", "tuple of (int, int, int)", "pair"),
    "one_split": ("(np.zeros((4, 2)), np.zeros(4))", "ndarray of shape (4, 2)", "train"),
    "only_x": ("((np.zeros(4),), (np.zeros(4),))", "tuple of (ndarray", "train"),
    "test_only_x": ("((np.zeros(4), np.zeros(4)), np.zeros(4))", "ndarray", "test"),
    "python": ("(([1, 2], [3, 4]), ([1], [2]))", "list of (int, int)", "np.asarray"),
    "scalar": ("((np.zeros(4), np.float32(1)), None)", "float32 of shape ()", "one row"),
    "unequal": ("((np.zeros(4), np.zeros(3)), None)", "(4,), ndarray of shape (3,)", "equal"),
    "stream_of_x": ("(tf.data.Dataset.range(3),) * 2", "TensorSpec of shape ()", "single"),
}


@pytest.mark.parametrize("kind", BAD_RETURNS)
def test_function_returns_something_else(user_module, kind):
    value, *texts = BAD_RETURNS[kind]
    source = f"import numpy as np, tensorflow as tf\ndef load():\n    return {value}\n"
    user_module(f"bad_{kind}", source)
    with raises_in_three_parts(f"`bad_{kind}:load` must return", *texts):
        load_dataset(f"bad_{kind}:load")


@pytest.mark.parametrize("name", ["my_data:", ":load", "my-data:load", "a/b.py:load", "m:a b", "m"])
def test_name_of_another_form(name):
    with raises_in_three_parts("`--model` must have the form", f"--model={name!r}", ":load"):
        resolve_function(name, "--model")


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "user_package.missing"])
def test_module_is_not_there(user_module, tmp_path, name):
    user_module("user_package.__init__", "")
    with raises_in_three_parts("`dataset`", name, "PYTHONPATH", str(tmp_path)) as error:
        load_dataset(f"{name}:load")
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_function_is_not_there(user_module):
    user_module("typo_module", "def load_data():\n    pass\n")
    with raises_in_three_parts("`--dataset`", "typo_module:load_dta", "Did you mean 'load_data'?"):
        resolve_function("typo_module:load_dta", "--dataset")


def test_not_callable(user_module):
    user_module("value_module", "DATA = (1, 2)\n")
    with raises_in_three_parts("`--model` must name a function", "tuple of (int, int)"):
        resolve_function("value_module:DATA", "--model")


@pytest.mark.parametrize(
    "body, kind",
    [
        ("import no_such_dependency", ModuleNotFoundError),
        ("from os import no_such_name", ImportError),
        ("import broken_module.part", ModuleNotFoundError),
        ("1 / 0", ZeroDivisionError),
        ("def load(:", SyntaxError),
        ("def load():\n    return {}['key']", KeyError),
    ],
)
def test_errors_of_the_user_come_through(user_module, body, kind):
    path = user_module("broken_module", body + "\n")
    with pytest.raises(kind) as error:
        load_dataset("broken_module:load")
    assert type(error.value) is kind
    where = [str(entry.path) for entry in error.traceback]
    assert str(path) in where or error.value.filename == str(path)
    sys.modules.pop("broken_module", None)


def test_current_folder_is_put_on_the_path(user_module, tmp_path, monkeypatch):
    user_module("here_module", "def load():\n    return 'called'\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert resolve_function("here_module:load", "--model")() == "called"
    resolve_function("here_module:load", "--model")
    assert sys.path.count(str(tmp_path)) == 1


# --- tensorflow-datasets


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def test_prepared_data_is_read_as_arrays(tfds, no_network):
    labels = list(range(100, 150))
    splits = {"train": labels, "test": [1, 2, 3]}
    create_builder_class(tfds, "ReadAsArrays", splits)().download_and_prepare()
    (x, y), (x_test, y_test) = load_dataset("read_as_arrays")
    assert x.shape == (50, 4, 4, 1) and x_test.shape == (3, 4, 4, 1)
    assert x.dtype == np.float32 and y.dtype == np.int64
    order = np.argsort(y)
    assert y[order].tolist() == labels and sorted(y_test) == [1, 2, 3]
    expected = (np.arange(50, dtype=np.float32) / np.float32(255)).reshape(50, 1, 1, 1)
    np.testing.assert_allclose(x[order], np.broadcast_to(expected, x.shape), rtol=1e-6)
    first, rest = load_split("read_as_arrays/train[:10%]"), load_split("read_as_arrays/train[5:]")
    np.testing.assert_array_equal(np.concatenate([first[1], rest[1]]), y)
    assert len(load_split("read_as_arrays:1.0.0/train+test[:2]")[1]) == 52
    assert sources.create_source("read_as_arrays/test", 0).num_examples == 3


def test_large_splits_are_streams_in_the_same_order(tfds, no_network, monkeypatch):
    splits = {"train": list(range(40)), "test": [0, 1]}
    create_builder_class(tfds, "ReadAsStream", splits)().download_and_prepare()
    x, y = load_split("read_as_stream/train")
    monkeypatch.setattr(datasets, "_MEMORY_LIMIT_BYTES", 0)
    train, _ = load_dataset("read_as_stream")
    assert int(train.cardinality()) == 40
    for _ in range(2):
        stream = list(train.as_numpy_iterator())
        np.testing.assert_array_equal([label for _, label in stream], y)
        np.testing.assert_array_equal([image for image, _ in stream], x)


def test_files_of_array_record_are_read(tfds, no_network):
    pytest.importorskip("array_record", reason="array_record is not installed")
    builder = create_builder_class(tfds, "ArrayRecorded", {"train": [5, 6, 7], "test": [8]})()
    builder.download_and_prepare(file_format="array_record")
    (x, y), (_, y_test) = load_dataset("array_recorded")
    assert sorted(y) == [5, 6, 7] and y_test.tolist() == [8]
    assert x.shape == (3, 4, 4, 1) and x.dtype == np.float32


@pytest.mark.parametrize("test_labels", [None, [-1, -1]])
def test_validation_stands_in_for_test(tfds, test_labels):
    splits = {"train": [1, 2, 3], "validation": [4, 5, 6, 7]}
    if test_labels:
        splits["test"] = test_labels
    name = f"Validated{'Twice' if test_labels else 'Once'}"
    create_builder_class(tfds, name, splits)
    _, (_, y) = load_dataset(name)
    assert sorted(y) == [4, 5, 6, 7]


def test_splits_are_missing(tfds):
    create_builder_class(tfds, "OnlyTrain", {"train": [1, 2]})
    with raises_in_three_parts("only_train", "load_split('only_train/train[:90%]')"):
        load_dataset("only_train")
    assert len(load_split("only_train/train")[1]) == 2
    with raises_in_three_parts("'trian'", "train[:10%]"):
        load_split("only_train/trian")


def test_no_supervised_keys(tfds):
    create_builder_class(tfds, "Unsupervised", {"train": [1], "test": [1]}, keys=None)
    with raises_in_three_parts("`dataset` must have supervised keys", "package.module:function"):
        load_dataset("unsupervised")


@pytest.mark.parametrize("name", ["mnits", "mnits/train", "MNITS:1.0.0"])
def test_unknown_name(tfds, no_network, name):
    with raises_in_three_parts("`dataset` must", repr(name), "Did you mean 'mnist'"):
        load_dataset(name)


def test_unknown_name_near_a_built_in_one(tfds):
    with pytest.raises(ValueError, match="Did you mean 'digits'"):
        load_dataset("digit")


@pytest.mark.parametrize("name", ["mnist/train", "mnist:9.9.9", "mnist/train[10%:]"])
def test_unknown_config_or_version(tfds, no_network, name):
    with raises_in_three_parts("config and version", repr(name), "'mnist' alone", "load_split"):
        load_dataset(name)


@pytest.mark.slow
def test_absent_data_fails_in_time_and_data_on_disk_needs_no_code(tfds, tmp_path):
    create_builder_class(tfds, "OnDisk", {"train": [1, 2], "test": [3]})().download_and_prepare()
    script = """
import time
from tfmulti.data.datasets import load_dataset
print(len(load_dataset("on_disk")[0][1]))
for name in ("mnist", "wine_quality"):
    start = time.monotonic()
    try:
        load_dataset(name)
    except RuntimeError as error:
        print(f"{time.monotonic() - start} s: {error}")
"""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        proxy = f"http://127.0.0.1:{closed.getsockname()[1]}"
    env = {**os.environ, "TFDS_DATA_DIR": str(tmp_path), "NO_PROXY": "", "no_proxy": ""}
    env.update(dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], proxy))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True
    )
    count, *lines = done.stdout.splitlines()
    assert count == "2" and len(lines) == 2, done.stderr
    for name, line in zip(("mnist", "wine_quality"), lines):
        assert float(line.split()[0]) < FAIL_WITHIN_S
        for text in (f"dataset='{name}'", f"tfds.load('{name}')", "TFDS_DATA_DIR", "digits"):
            assert text in line


def test_hosts_that_take_the_call_and_never_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data.zip"
        start = time.monotonic()
        fault = datasets.unreachable([url], timeout=0.5)
        assert "127.0.0.1" in fault and time.monotonic() - start < FAIL_WITHIN_S


@pytest.fixture
def answering_server():
    """The address of a server that knows no page."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_any_answer_lets_the_download_begin(tfds, monkeypatch, answering_server):
    monkeypatch.setenv("no_proxy", "*")
    urls = {f"{answering_server}/data.zip": None, "http://absent.invalid/data.zip": None}
    splits = {"train": [1, 2], "test": [3]}
    create_builder_class(tfds, "Answered", splits, url_infos=urls)
    assert len(load_dataset("answered")[0][1]) == 2


def test_files_that_were_downloaded_before_are_prepared(tfds, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    urls = {"http://absent.invalid/data.zip": None}
    create_builder_class(tfds, "Cached", {"train": [1, 2], "test": [3]}, url_infos=urls)
    with pytest.raises(RuntimeError, match="absent.invalid"):
        load_dataset("cached")
    folder = tmp_path / "downloads" / "cached"
    folder.mkdir(parents=True)
    (folder / "data.zip.INFO").write_text("{}")
    assert len(load_dataset("cached")[0][1]) == 2


def test_download_fails(tfds):
    def fail(self, dl_manager):
        raise ConnectionError("the line went dead")

    create_builder_class(tfds, "Failing", {}, _split_generators=fail)
    with raises_in_three_parts(
        "dataset='failing'", "the line went dead", "TFDS_DATA_DIR", kind=RuntimeError
    ) as error:
        load_dataset("failing")
    assert isinstance(error.value.__cause__, ConnectionError)


def test_another_worker_prepares_it_first(tfds):
    cls = create_builder_class(tfds, "Contended", {"train": [1, 2], "test": [3]})
    own = cls._split_generators

    def after_the_other(self, dl_manager):
        cls._split_generators = own
        cls().download_and_prepare()
        return own(self, dl_manager)

    cls._split_generators = after_the_other
    assert len(load_dataset("contended")[0][1]) == 2


@pytest.mark.parametrize("parameters", ["train", "train=None", "*arguments", ""])
def test_a_function_of_a_model_may_take_the_data_or_nothing(user_module, parameters):
    user_module(
        "models_module",
        f"""
        import keras

        def create({parameters}):
            return keras.Sequential([keras.layers.Dense(2)])
        """,
    )
    assert isinstance(create_model("models_module:create", ([1], [0])), keras.Model)
