"""Runs the blocks of a page in a folder of their own."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from documentation import commands
from documentation.pages import ROOT, Block, blocks_of

SECONDS = 300
# What makes a command of the documentation small, where a test runs it.
TINY = {
    "tfmulti.train": ["--epochs=1", "--steps_per_epoch=2"],
    "tfmulti.parity": ["--replicas=2", "--workers=0", "--steps=2"],
    "tfmulti.bench": [
        *("--setups=one_worker", "--replicas=1", "--rounds=1"),
        *("--steps=4", "--minutes=0.1", "--noallreduce", "--workdir=runs/bench"),
    ],
}
TINY["benchmarks"] = TINY["tfmulti.bench"]
# Where a page speaks of files that a reader has.
_FILES = ("tf_config", "experiments")
_YOURS = textwrap.dedent(
    """
    import keras
    import numpy as np

    def load():
        x, y = np.random.RandomState(0).rand(96, 4).astype("float32"), np.arange(96) % 3
        return (x[:64], y[:64]), (x[64:], y[64:])

    def create(train):
        return keras.Sequential([keras.layers.Dense(3)])
    """
)


def run_python(page: str, folder: Path) -> None:
    """Runs the Python blocks of a page: those of its session, and those that stand alone."""
    session = []
    for block in _prepare(page, folder):
        if block.language != "python" or block.is_checked_only or "hidden" in block.words:
            continue
        if block.words.startswith("program"):
            continue
        if block.words.startswith(("alone", "workers")):
            number = block.words.removeprefix("workers ") if "workers" in block.words else None
            _run_script(block, block.text, folder, number)
        else:
            session.append(block)
    if session:
        _run_script(session[0], "".join(block.text for block in session), folder, None)


def _run_script(block, text, folder, workers):
    script = folder / f"block_{block.line}.py"
    script.write_text(text)
    command = [sys.executable, script.name]
    if workers:
        command = [
            sys.executable,
            "-m",
            "tfmulti.launch",
            f"--num_workers={workers}",
            "--",
            *command,
        ]
    _wait([_start(command, folder, {})], block.name)


def run_diff(block: Block, folder: Path, sign: str) -> None:
    """Runs one side of a diff as a script: `-` is before, `+` is after."""
    _prepare(block.page, folder)
    _run_script(block, side_of(block, sign), folder, None)


def side_of(block: Block, sign: str) -> str:
    """Returns one side of a diff."""
    lines = block.text.splitlines()
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", sign))


def run_shell(block: Block, folder: Path) -> None:
    """Runs the commands of a shell block that are ours, small."""
    _prepare(block.page, folder)
    own = [command for command in commands.commands_of(block) if command.runs_here]
    if block.words == "together":
        with _fixed_ports():
            _wait([_start(_tiny(each), folder, _variables(each)) for each in own], block.name)
        return
    for command in own:
        _wait([_start(_tiny(command), folder, _variables(command))], block.name)


@contextlib.contextmanager
def _fixed_ports():
    """Keeps other tests from the ports of the files in `tf_config` meanwhile."""
    with open(Path(tempfile.gettempdir()) / "tfmulti_fixed_ports", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(page, folder) -> tuple[Block, ...]:
    for name in _FILES:
        if (ROOT / name).is_dir() and not (folder / name).exists():
            shutil.copytree(ROOT / name, folder / name)
    package = folder / "package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "module.py").write_text(_YOURS)
    for block in blocks_of(page):
        if block.file:
            (folder / block.file).write_text(block.text)
    return blocks_of(page)


def _tiny(command):
    words = [sys.executable if word == "python" else word for word in command.words]
    inner = command
    while inner.module == "tfmulti.launch":
        flags = inner.flags
        inner = commands.Command((), tuple(flags[flags.index("--") + 1 :]))
    if inner.module in ("tfmulti.bench", "benchmarks") and "--model" not in inner.words:
        words.append("--workloads=compute")
    return words + TINY.get(inner.module, [])


def _variables(command):
    variables = {}
    for each in command.variables:
        name, _, value = each.partition("=")
        if value.startswith("$(cat="):
            value = (ROOT / value[len("$(cat=") : -1]).read_text()
        variables[name] = value
    return variables


def _start(command, folder, variables):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **variables}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait(processes, name):
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(_end, process)
        ended = [(p.communicate(timeout=SECONDS)[0], p.returncode) for p in processes]
    for output, code in ended:
        assert code == 0, f"{name}\n{output[-4000:]}"


def _end(process):
    if process.poll() is None:
        process.kill()
        process.wait()
