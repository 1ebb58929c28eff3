"""What is replaced acts for our strategies alone, once, and beside what others replace."""

import ast
import configparser
import functools
import gc
import importlib.util
import inspect
import re
import types
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_keras_compat as canaries
from replicas import create_strategy
from test_keras_compat import ours, rows, stock

import tfmulti
from tfmulti import keras_compat
from tfmulti.keras_compat import TABLE, replaced_ops, replacement, table
from tfmulti.keras_compat.replacement import is_replaced, replace

# Tests of what this package adds, or of a stand-in: no change of upstream's would make one fail.
OF_THIS_PACKAGE = (
    "test_assignments_are_counted",
    "test_calls_are_looked_at",
    "test_no_model_is_saved_between_averages",
    "test_gradients_of_masked_steps_that_cudnn_leaves_are_cleared",
)
INSTALLED = [entry for entry in TABLE if entry.make is not None]


def targets(entries):
    return [entry.target for entry in entries]


@pytest.fixture(name="owner")
def owner_fixture():
    """A class with a method that says who was called."""

    class Owner:
        def method(self):
            return ["original"]

    return Owner


def install(owner, used=lambda *_: True):
    replace(owner, "method", lambda original: lambda self: ["ours", *original(self)], used)


def foreign(owner, keep=functools.wraps):
    original = owner.method

    @keep(original)
    def method(self):
        return ["foreign", *original(self)]

    owner.method = method


def without_wraps(original):
    return lambda function: function


@pytest.mark.parametrize("keep", [functools.wraps, without_wraps])
def test_a_wrapper_of_others_below_does_not_keep_ours_out(owner, keep):
    foreign(owner, keep)
    install(owner)
    install(owner)
    assert owner().method() == ["ours", "foreign", "original"]


@pytest.mark.parametrize("keep", [functools.wraps, without_wraps])
def test_a_wrapper_of_others_above_does_not_double_ours(owner, keep):
    install(owner)
    foreign(owner, keep)
    install(owner)
    assert owner().method() == ["foreign", "ours", "original"]


def test_wrappers_of_others_on_both_sides(owner):
    foreign(owner)
    install(owner)
    foreign(owner)
    install(owner)
    assert owner().method() == ["foreign", "ours", "foreign", "original"]


def test_a_partial_of_others_does_not_double_ours(owner):
    install(owner)
    owner.method = functools.partialmethod(owner.method)
    install(owner)
    assert owner().method() == ["ours", "original"]


def test_ours_is_put_back_where_others_have_taken_it_out(owner):
    original = owner.method
    install(owner)
    owner.method = original
    install(owner)
    assert owner().method() == ["ours", "original"]


def test_a_method_that_others_have_put_on_a_subclass_is_replaced_there(owner):
    class Below(owner):
        pass

    foreign(Below)
    install(Below)
    assert Below().method() == ["ours", "foreign", "original"]
    assert owner().method() == ["original"]


def test_a_method_is_replaced_where_it_is_found(owner):
    class Below(owner):
        pass

    install(Below)
    assert "method" not in vars(Below)
    assert owner().method() == ["ours", "original"]


def test_what_was_there_is_called_where_no_strategy_of_ours_is_in_use(owner):
    install(owner, used=lambda *_: False)
    assert owner().method() == ["original"]


@pytest.mark.parametrize("entry", INSTALLED, ids=targets(INSTALLED))
def test_each_entry_is_installed_once(entry):
    ours()
    first = getattr(entry.owner, entry.name)
    ours()
    assert is_replaced(entry.owner, entry.name)
    assert getattr(entry.owner, entry.name) is first


FUNCTIONS = [entry for entry in INSTALLED if entry.arguments is not None]


@pytest.mark.parametrize("entry", FUNCTIONS, ids=targets(FUNCTIONS))
def test_each_entry_stands_beside_wrappers_of_others(entry, monkeypatch):
    ours()
    there = getattr(entry.owner, entry.name)
    around = functools.wraps(there)(lambda *args, **kwargs: there(*args, **kwargs))
    monkeypatch.setattr(entry.owner, entry.name, around)
    ours()
    assert getattr(entry.owner, entry.name) is around
    before = there.tfmulti_replaces
    below = functools.wraps(before)(lambda *args, **kwargs: before(*args, **kwargs))
    monkeypatch.setattr(entry.owner, entry.name, below)
    ours()
    assert getattr(entry.owner, entry.name).tfmulti_replaces is below


class Noting:
    """Takes the place of what an entry does, and notes that it was asked to."""

    def __init__(self, entry, acted):
        there = getattr(entry.owner, entry.name)
        self.cell = there.__closure__[there.__code__.co_freevars.index("new")]
        self.new = self.cell.cell_contents
        new = self.new

        def act(*args, **kwargs):
            acted.add(entry.target)
            return new(*args, **kwargs)

        self.cell.cell_contents = act

    def undo(self):
        self.cell.cell_contents = self.new


@pytest.fixture(name="acted")
def acted_fixture():
    """The targets of entries that have acted."""
    ours()
    acted = set()
    noting = [Noting(entry, acted) for entry in FUNCTIONS]
    yield acted
    for each in noting:
        each.undo()


def exercise(strategy, folder):
    """Trains, evaluates, predicts, saves and loads with most of what is replaced."""

    def largest(y, prediction):
        return tf.reduce_max(prediction)

    x, y = rows(12)
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4, activity_regularizer="l2")(inputs)
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        hidden = keras.layers.Dropout(0.5)(hidden)
        model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
        sgd = keras.optimizers.SGD(0.1, weight_decay=0.01)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd)
        model.compile(optimizer, "mse", metrics=[largest])
    model.fit(x, y, batch_size=6, epochs=2, verbose=0, validation_data=(x, y))
    model.predict(x, batch_size=6, verbose=0)
    model.train_on_batch(x, y)
    model.test_on_batch(x, y)
    model.predict_on_batch(x)
    model.save(folder / "model.keras")
    keras.models.load_model(folder / "model.keras", custom_objects={"largest": largest})
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    strategy.run(tf.function(lambda value: value + 1), args=(next(iter(data)),))
    tf.nn.compute_average_loss(tf.ones([4]), global_batch_size=4)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["none", "stock"])
def test_no_entry_acts_without_a_strategy_of_ours(kind, acted, tmp_path, monkeypatch):
    monkeypatch.setattr(replacement, "_strategies", set())
    exercise(stock() if kind == "stock" else tf.distribute.get_strategy(), tmp_path)
    assert acted == set()


@pytest.mark.slow
def test_entries_act_under_a_strategy_of_ours(acted, tmp_path):
    exercise(create_strategy(2), tmp_path)
    assert len(acted) > 20


@pytest.mark.parametrize("entry", FUNCTIONS, ids=targets(FUNCTIONS))
def test_no_entry_is_used_where_nothing_is_ours(entry, monkeypatch):
    monkeypatch.setattr(replacement, "_strategies", set())
    nothing = types.SimpleNamespace()
    for scope in (tf.distribute.get_strategy(), stock()):
        with scope.scope():
            assert not entry.applies_to(nothing, nothing)


@pytest.mark.slow
def test_a_strategy_that_is_gone_counts_no_more(monkeypatch):
    class Gone:
        repairs_keras = True

    monkeypatch.setattr(replacement, "_strategies", type(replacement._strategies)())
    strategy = Gone()
    replacement.note_strategy(strategy)
    assert replacement.while_a_strategy_exists()
    del strategy
    gc.collect()
    assert not replacement.while_a_strategy_exists()


def test_a_launcher_is_ours_where_our_strategy_has_made_it():
    launcher = types.SimpleNamespace()
    assert not replacement.of_launcher(launcher)
    extended = types.SimpleNamespace(ops=types.SimpleNamespace(_launchers=[launcher]))
    keras_compat.mark_launchers(types.SimpleNamespace(extended=extended))
    assert replacement.of_launcher(launcher)


def test_layers_that_were_made_before_keep_their_losses():
    layer = keras.layers.Dense(1)
    descriptors = {name: vars(keras.Layer)[name] for name in ("_losses", "_loss_ids")}
    for name in descriptors:
        delattr(keras.Layer, name)
    try:
        layer = keras.layers.Dense(1)
        layer._losses.append(3.0)
    finally:
        for name, descriptor in descriptors.items():
            setattr(keras.Layer, name, descriptor)
    assert np.sum(layer.losses) == 3.0


def test_a_model_that_was_trained_is_let_go():
    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_regularizer="l2")])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    layer = weakref.ref(model.layers[0])
    del model
    gc.collect()
    assert layer() is None


@pytest.mark.parametrize("entry", TABLE, ids=targets(TABLE))
def test_each_entry_names_a_test_that_runs(entry):
    assert entry.repairs
    test = getattr(canaries, entry.test)
    assert entry.test.startswith("test_canary_") or entry.test in OF_THIS_PACKAGE
    # One that reads upstream's text fails where a comment changes, and not where it behaves.
    assert "getsource" not in inspect.getsource(test)


def test_no_canary_reads_upstreams_source():
    tree = ast.parse(Path(canaries.__file__).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"getsource", "getsourcelines", "read_text"}


def test_what_is_replaced_for_a_time_is_in_the_table():
    here = {(id(owner), name) for owner, name, _ in replaced_ops._AROUND}
    listed = {(id(e.owner), e.name) for e in TABLE if e.within == "replaced_ops"}
    assert here == listed


def test_what_is_private_to_keras_and_tensorflow_is_in_the_table():
    package = Path(tfmulti.__file__).parent
    of_table = {name for _, name, _ in table.NAMES} | {"_replace"}
    of_python = {"_exit", "_run_exitfuncs", "_replace"}
    files = [path for path in package.rglob("*.py") if path.name != "table.py"]
    names = {path: _private_names(ast.parse(path.read_text())) for path in files}
    of_package = {name for _, own in names.values() for name in own}
    for path, (used, own) in names.items():
        in_compat = path.parent.name == "keras_compat"
        known = own | of_table if in_compat else of_package | of_python
        assert used <= known, f"{path.name} uses {used - known}"


def _private_names(tree):
    """The private attributes that a module uses, and what it defines itself."""
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            (own if is_own else used).add(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            if ast.unparse(node.func).split(".")[-1].strip("_") in (
                "getattr",
                "setattr",
                "hasattr",
            ):
                used.add(str(getattr(node.args[1], "value", "")))
    return {name for name in used if re.match("_[a-zA-Z]", name)}, own


def test_the_page_of_the_site_lists_every_entry():
    path = Path(__file__).parent.parent / "docs" / "hooks.py"
    spec = importlib.util.spec_from_file_location("docs_hooks", path)
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    lines = hooks.table_of_replacements().splitlines()[2:]
    assert len(lines) == len(TABLE)
    for entry, line in zip(TABLE, lines, strict=True):
        assert entry.target in line and entry.test in line


def test_setup_makefile_and_documentation_name_the_versions_that_were_tried():
    root = Path(__file__).parents[1]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    required = setup["options"]["install_requires"]
    for name, (low, high) in table.TRIED.items():
        major, minor = map(int, high.split("."))
        assert f"\n{name}>={low},<{major}.{minor + 1}\n" in f"{required}\n"
    pages = [root / "Makefile", root / "setup.cfg", root / "CONTRIBUTING.md"]
    pages += (root / "docs").rglob("*.md")
    named = [re.findall(r"\bKERAS ?\??= ?([0-9.]+[0-9])", page.read_text()) for page in pages]
    assert {each for found in named for each in found} == {f"{table.TRIED['keras'][0]}.0"}
    tried = " to ".join(table.TRIED["keras"])
    for page in ("README.md", "CHANGELOG.md"):
        assert f"Keras {tried}" in (root / page).read_text()
