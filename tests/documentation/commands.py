"""The commands of shell blocks: found, and read by the real parsers."""

import contextlib
import dataclasses
import functools
import importlib
import io
import re
import shlex
from unittest import mock

from documentation.pages import ROOT, Block
from tfmulti.runtime import command_line

# What a user may be told to run, beside python, pip and make.
PROGRAMS = {
    *("cd", "export", "unset", "git", "source", "sudo", "ulimit", "kill", "cat", "ls"),
    *("mpiexec", "srun", "sbatch", "scancel", "squeue", "sinfo", "kubectl", "docker"),
    *("nvidia-smi", "ss", "nc", "getent", "ip", "free", "df", "nproc", "tensorboard", "torchrun"),
    *("jupyter", "horovodrun", "accelerate"),
}
_ENDS = ("|", "&&", ";", "&", ">", "2>&1", "||")


@dataclasses.dataclass(frozen=True)
class Command:
    """One simple command.

    Attributes:
        variables: What is set before it, `NAME=value` each.
        words: The program and its arguments.
    """

    variables: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def module(self) -> str | None:
        """The entry point, or experiment, that it runs, at once or by another program."""
        for python, dash, module in zip(self.words, self.words[1:], self.words[2:]):
            known = module.startswith(("tfmulti.", "experiments.", "benchmarks"))
            if python.endswith("python") and dash == "-m" and known:
                return module
        return None

    @property
    def flags(self) -> list[str]:
        """What follows after the module."""
        return list(self.words[self.words.index(self.module) + 1 :])

    @property
    def runs_here(self) -> bool:
        return self.module is not None and self.words[0] == "python"


def commands_of(block: Block) -> list[Command]:
    """Reads a shell block."""
    commands = []
    for line in block.text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\(cat ([^)]*)\)", r"$(cat=\1)", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in _ENDS:
                if words:
                    commands.append(_command(words))
                words = []
            else:
                words.append(word)
    return commands


def _command(words):
    count = 0
    while count < len(words) and re.match(r"[A-Z_][A-Z_0-9]*=", words[count]):
        count += 1
    return Command(tuple(words[:count]), tuple(words[count:]))


def entry_points() -> list[str]:
    """Every `python -m tfmulti.NAME`, and that of the benchmarks."""
    names = ["benchmarks"]
    for path in sorted((ROOT / "tfmulti").glob("*")):
        main = path / "__main__.py" if path.is_dir() else path
        if main.exists() and re.search(r"^USAGE = ", main.read_text(), re.MULTILINE):
            names.append(f"tfmulti.{path.stem}")
    return names


@functools.cache
def flags_of(module: str) -> frozenset[str]:
    """The names of all flags of an entry point, as its `--help` tells them."""
    return frozenset(re.findall(r"^  --(\w+):", _call(module, ["--help"])[1], re.MULTILINE))


def read_by_its_parser(command: Command) -> None:
    """Raises AssertionError for flags or values that the entry point refuses."""
    module, flags = command.module, command.flags
    if module.startswith("experiments."):
        read_by_experiment(module, flags)
        return
    assert module in entry_points(), f"{module} is no entry point"
    if module == "tfmulti.launch" and "--" in flags:
        at = flags.index("--")
        inner = _command(flags[at + 1 :])
        assert inner.words, "no command after `--`"
        flags = flags[:at]
        if inner.module:
            read_by_its_parser(inner)
    if "--help" in flags:
        return
    if module == "tfmulti.launch":
        flags = [*flags, "--", "true"]
    errors = io.StringIO()
    with (
        contextlib.suppress(_Read),
        contextlib.redirect_stderr(errors),
        mock.patch.object(command_line, "read_settings", _stop),
    ):
        code = _main_of(module).main([module, *flags])
        raise AssertionError(f"exit code {code}: {errors.getvalue()}")


def read_by_experiment(module: str, flags: list[str]) -> None:
    """Raises SystemExit or AssertionError for flags that an experiment refuses."""
    if module == "experiments.compare":
        assert set(flags[:1]) <= set(experiments()), flags
        return
    from experiments import common

    assert module.split(".")[1] in experiments(), f"{module} is no experiment"
    common.parse(importlib.import_module(module).Settings, [module, *flags])


def experiments() -> list[str]:
    """The names of all experiments that are run as `python -m experiments.NAME.experiment`."""
    return [path.parent.name for path in sorted(ROOT.glob("experiments/*/experiment.py"))]


@functools.cache
def flags_of_experiment(name: str) -> frozenset[str]:
    """The names of an experiment's flags."""
    settings = importlib.import_module(f"experiments.{name}.experiment").Settings
    return frozenset(field.name for field in dataclasses.fields(settings))


class _Read(BaseException):
    """The settings have been read, and would be acted on now."""


_read_settings = command_line.read_settings


def _stop(settings, values):
    _read_settings(settings, values)
    raise _Read


def _main_of(module):
    is_folder = (ROOT / module.replace(".", "/")).is_dir()
    return importlib.import_module(f"{module}.__main__" if is_folder else module)


def _call(module, flags):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = _main_of(module).main([module, *flags])
    return code, output.getvalue()


@functools.cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@functools.cache
def extras() -> frozenset[str]:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return frozenset(parser["options.extras_require"])
