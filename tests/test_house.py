"""The rules of the house: who imports whom, how large things are, what starts when."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfmulti

PACKAGE = Path(tfmulti.__file__).parent
# A module imports only from those above it.
ORDER = [
    "choices",
    "settings",
    "marks",
    "sharding",
    "runtime",
    "cluster",
    "rendezvous",
    "hardware",
    "devices",
    "keras_compat",
    "topology",
    "mpi",
    "step",
    "verification",
    "parallel",
    "strategies",
    "data",
    "checkpoint",
    "callbacks",
    "train",
    "launch",
    "notebook",
    "parity",
    "bench",
    "doctor",
]
# What runs before TensorFlow, or without it.
PURE = [*ORDER[: ORDER.index("devices")], "checkpoint", *ORDER[ORDER.index("train") :]]
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_is_in_the_order():
    assert {module_of(path) for path in FILES} - {"__init__"} == set(ORDER)


def test_modules_import_from_above_only():
    for path in FILES:
        module = module_of(path)
        if module != "__init__":
            used = {name.split(".")[1] for name in imports_of(path) if name.startswith("tfmulti.")}
            below = [x for x in used - {module} if ORDER.index(x) >= ORDER.index(module)]
            assert not below, f"{path} imports {below}"


def test_private_names_of_keras_and_tensorflow_live_in_one_place():
    private = ("keras.src", "tensorflow.python", "keras._")
    for path in FILES:
        found = [name for name in imports_of(path) if name.startswith(private)]
        assert not found or module_of(path) == "keras_compat", f"{path} uses {found}"


def test_what_is_noted_on_objects_of_others_is_listed_in_one_place():
    ours = ("marks", "keras_compat/replacement")
    for path in FILES:
        if str(path.relative_to(PACKAGE)).removesuffix(".py") not in ours:
            nodes = ast.walk(ast.parse(path.read_text()))
            names = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
            noted = [name for name in names if name.startswith("tfmulti_")]
            assert not noted, f"{path} sets or reads {noted}: use tfmulti.marks"


def test_modules_and_functions_are_small():
    for path in [*FILES, *(PACKAGE.parent / "benchmarks").rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{path} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= 45, f"{node.name} of {path} has {lines} lines"


def test_no_tensorflow_at_import():
    modules = ["tfmulti", *(f"tfmulti.{name}" for name in PURE)]
    code = (
        f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
        "    assert not {'tensorflow', 'keras'} & set(sys.modules), name"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", tfmulti.__all__)
def test_public_names_resolve_and_are_documented(name):
    assert getattr(tfmulti, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tfmulti.nothing
    assert "create_strategy" in dir(tfmulti)


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, "0"])
def test_the_first_use_keeps_back_what_tensorflow_says_unless_asked_for(level):
    environ = {name: text for name, text in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": level} if level else {}
    code = "import tfmulti; print(tfmulti.create_strategy('one_device').num_replicas_in_sync)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.strip() == "1"
    assert bool(done.stderr) == (level is not None)
