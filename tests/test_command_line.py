"""The help of every entry point, and the end of a process."""

import dataclasses
import re
import subprocess
import sys
import time

import pytest

from benchmarks.kinds import BenchmarksConfig
from tfmulti.bench import BenchConfig
from tfmulti.doctor.__main__ import DoctorConfig
from tfmulti.parity import ParityConfig
from tfmulti.train.config import TrainConfig

SETTINGS = {
    "tfmulti.train": TrainConfig,
    "tfmulti.doctor": DoctorConfig,
    "tfmulti.parity": ParityConfig,
    "tfmulti.bench": BenchConfig,
    "benchmarks": BenchmarksConfig,
}

BEGIN = """
import atexit, sys, threading, time
from tfmulti.runtime import command_line
atexit.register(print, "exit functions are called")
"""
WAITS_FOR_EVER = "threading.Thread(target=threading.Event().wait).start()\n"
WRITES = """
def write():
    time.sleep(7)
    print("written")
threading.Thread(target=write, name="tfmulti: checkpoint").start()
"""


@pytest.mark.parametrize(("module", "settings"), SETTINGS.items(), ids=SETTINGS)
def test_help_imports_no_tensorflow_and_shows_every_flag_with_its_default(module, settings):
    code = (
        f"import sys; from {module}.__main__ import main; code = main(['command', '--help'])\n"
        "print(sorted({'tensorflow', 'keras', 'torch'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    names = re.findall(r"^  --(\w+): .*\n      default: ", done.stdout, re.MULTILINE)
    assert {field.name for field in dataclasses.fields(settings)} <= set(names)


def run(code):
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)
    return done, time.monotonic() - began


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("command_line.end_process(3)", 3),
        ("command_line.run_and_exit(lambda: 4)", 4),
        ("command_line.run_and_exit(lambda: sys.exit(143))", 143),
        ("command_line.run_and_exit(lambda: sys.exit('words'))", 1),
        ("command_line.end_process_at_exit(5)", 5),
    ],
)
def test_the_exit_code_and_exit_functions(end, exit_code):
    done, _ = run(end)
    assert done.returncode == exit_code
    assert done.stdout == "exit functions are called\n"


@pytest.mark.slow
def test_a_thread_that_never_ends_holds_nothing_up():
    done, seconds = run(WAITS_FOR_EVER + "command_line.end_process(1)")
    assert done.returncode == 1
    assert seconds < 15


@pytest.mark.slow
def test_our_own_threads_are_waited_for():
    done, _ = run(WRITES + "command_line.end_process(0)")
    assert done.stdout == "written\nexit functions are called\n"
