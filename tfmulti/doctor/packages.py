"""Checks versions of packages, conflicts between them, and pitfalls of Keras and TensorFlow."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tfmulti.cluster import Cluster
from tfmulti.cluster.network import split_address
from tfmulti.cluster.slurm import SOURCE as SLURM
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.runtime import console

# All of them write the same folder `tensorflow`.
TENSORFLOWS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "tensorflow-macos",
    "intel-tensorflow",
    "tf-nightly",
    "tf-nightly-cpu",
)
_KERASES = ("keras", "keras-nightly")
_OURS = ("tfmulti", "tensorflow", "keras")
_MPIS = ("impi-rt", "mpich", "openmpi")
_OFTEN_HIDDEN = ("tensorflow", "keras", "numpy", "absl", "rich", "tfmulti")

VersionOf = Callable[[str], "str | None"]


def version_of(name: str) -> str | None:
    """Returns the version of an installed package, or None.

    >>> version_of("no-such-package") is None
    True
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements_of(name: str, extra: str = "") -> list[Requirement]:
    """Returns the requirements of a package on this machine, none if it is not installed."""
    if version_of(name) is None:
        return []
    found = map(Requirement, importlib.metadata.requires(name) or [])
    return [each for each in found if not each.marker or each.marker.evaluate({"extra": extra})]


def check_packages() -> list[Check]:
    """Checks all packages of this Python."""
    wanted = {requirement.name: requirement for requirement in requirements_of("tfmulti")}
    about = importlib.metadata.metadata("tfmulti") if version_of("tfmulti") else {}
    return [
        check_python(platform.python_version(), about.get("Requires-Python") or ""),
        check_version("TensorFlow", TENSORFLOWS, wanted.get("tensorflow"), version_of),
        check_version("Keras", _KERASES, wanted.get("keras"), version_of),
        check_needs({name: requirements_of(name) for name in _OURS}, version_of),
        check_mpi(version_of),
        check_hidden(Path.cwd()),
    ]


def check_python(version: str, wanted: str) -> Check:
    """Compares the version of Python with a range.

    >>> check_python("3.9.1", "<3.14,>=3.10").status
    'failure'
    """
    if not wanted:
        return Check("Python", UNKNOWN, version, "Install tfmulti, to check its requirements.")
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Check("Python", OK, f"{version} (wanted: {wanted})")
    return Check("Python", FAILURE, f"{version} (wanted: {wanted})", "Use another Python.")


def check_version(
    title: str, names: Iterable[str], wanted: Requirement | None, installed: VersionOf
) -> Check:
    """Checks that one of several variants of a package is installed, and its version."""
    found = {name: version for name in names if (version := installed(name))}
    if not found:
        return Check(title, FAILURE, "not installed", f"pip install '{wanted or title.lower()}'")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        hint = f"pip uninstall {' '.join(found)}, then install one: they overwrite each other."
        return Check(title, FAILURE, f"{text} are installed together", hint)
    if wanted is None:
        return Check(title, UNKNOWN, text, "Install tfmulti, to check its requirements.")
    [version] = found.values()
    text = f"{text} (wanted: {wanted.specifier})"
    if wanted.specifier.contains(version, prereleases=True):
        return Check(title, OK, text)
    return Check(title, FAILURE, text, f"pip install '{wanted.name}{wanted.specifier}'")


def unmet(requirements: Iterable[Requirement], installed: VersionOf) -> list[str]:
    """Returns the unmet requirements, each with the installed version.

    >>> unmet([Requirement("numpy>=2"), Requirement("rich")], {"numpy": "1.26", "rich": "15"}.get)
    ['numpy>=2 (here: 1.26)']
    """
    found = []
    for requirement in requirements:
        version = installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            found.append(f"{wanted} (here: {version or 'not installed'})")
    return found


def check_needs(needs: dict[str, list[Requirement]], installed: VersionOf) -> Check:
    """Checks the requirements of these packages.

    `pip check` judges all packages of the environment, the user's too, knows only one name for
    TensorFlow, and is missing where uv made the environment.
    """
    others = [name for name in TENSORFLOWS[1:] if installed(name)]
    faults = []
    for name, requirements in needs.items():
        # Another build of TensorFlow has another name; another check covers its version.
        kept = [
            requirement
            for requirement in requirements
            if not (others and requirement.name == "tensorflow")
        ]
        faults += [f"{name} needs {fault}" for fault in unmet(kept, installed)]
    count = sum(len(requirements) for requirements in needs.values())
    if faults:
        return Check("their needs", FAILURE, "; ".join(faults), "pip install the versions needed.")
    if not count:
        return Check("their needs", UNKNOWN, "no package lists its requirements")
    return Check("their needs", OK, f"{count} requirements hold")


def check_mpi(installed: VersionOf) -> Check:
    """Looks for two MPI libraries, of which a program may load the wrong one."""
    found = [f"{name} {version}" for name in _MPIS if (version := installed(name))]
    mpi4py = installed("mpi4py")
    if len(found) > 1:
        hint = "Keep one; mpiexec and the library that mpi4py loads must be of the same MPI."
        return Check("MPI", WARNING, f"several: {', '.join(found)}", hint)
    if not mpi4py:
        return Check("MPI", OK, "mpi4py is not installed; only --communication mpi needs it")
    library = found[0] if found else "the MPI of this system"
    return Check("MPI", OK, f"mpi4py {mpi4py} with {library}")


def check_hidden(folder: Path) -> Check:
    """Looks for files in a folder that Python would import instead of a package.

    Args:
        folder: Where programs are started: it comes first when Python looks for modules.
    """
    found = [f"{name}.py" for name in _OFTEN_HIDDEN if (folder / f"{name}.py").is_file()]
    if found:
        return Check(
            "file names",
            FAILURE,
            f"{', '.join(found)} in {folder} hides the package of that name",
            "Rename the file, and remove __pycache__ beside it.",
        )
    return Check("file names", OK, f"no file in {folder} hides a package")


_DEFAULTS = {"floatx": "float32", "image_data_format": "channels_last"}
_LIBRARIES = ("libcudart.so*", "libcudnn*.so*", "libcublas.so*", "libnccl.so*")
_TRUE = ("1", "true", "True")


def check_pitfalls(
    environ: Mapping[str, str],
    cluster: Cluster | None = None,
    num_gpus: int = 0,
    installed: VersionOf = version_of,
) -> list[Check]:
    """Looks for the pitfalls.

    Args:
        environ: The environment.
        cluster: The cluster, or None.
        num_gpus: GPUs of this host.
        installed: Returns the version of a package, or None.
    """
    folder = Path(environ.get("KERAS_HOME", Path.home() / ".keras"))
    return [
        check_backend(environ, folder / "keras.json"),
        check_keras_file(folder / "keras.json"),
        check_legacy(environ, installed),
        check_sharing(cluster, num_gpus, environ),
        check_libraries(environ, installed),
        Check(
            "order in the program",
            UNKNOWN,
            "the doctor does not read programs; tfmulti raises an error in that case",
            "Create the strategy before the first operation of TensorFlow, and one only in a "
            "process: in a notebook restart the kernel first, or use notebook_launch.",
        ),
    ]


def read_keras_file(path: Path) -> tuple[dict, str]:
    """Returns the settings of keras.json, and what is wrong with the file."""
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read ({error})"
    return (settings, "") if isinstance(settings, dict) else ({}, f"{path} is no object")


def check_backend(environ: Mapping[str, str], path: Path) -> Check:
    """Checks that Keras will use TensorFlow."""
    name = "backend of Keras"
    settings, _ = read_keras_file(path)
    chosen, source = settings.get("backend", "tensorflow"), str(path)
    if environ.get("KERAS_BACKEND"):
        chosen, source = environ["KERAS_BACKEND"], "the variable KERAS_BACKEND"
    elif "backend" not in settings:
        source = "the default"
    if chosen == "tensorflow":
        return Check(name, OK, f"tensorflow ({source})")
    hint = "export KERAS_BACKEND=tensorflow on every worker."
    return Check(name, FAILURE, f"{chosen} ({source}); tfmulti trains on TensorFlow", hint)


def check_keras_file(path: Path) -> Check:
    """Looks for settings in keras.json that change results and may differ on other hosts."""
    name = "keras.json"
    settings, fault = read_keras_file(path)
    if fault:
        return Check(name, WARNING, f"{fault}: Keras ignores it", "Correct it, or delete it.")
    odd = [
        f"{key}={settings[key]}"
        for key, usual in _DEFAULTS.items()
        if settings.get(key, usual) != usual
    ]
    if odd:
        hint = "Every worker must have the same; set it in the program instead."
        return Check(name, WARNING, f"{path} sets {', '.join(odd)}", hint)
    return Check(name, OK, "the usual settings" if settings else "none")


def check_legacy(environ: Mapping[str, str], installed: VersionOf) -> Check:
    """Looks for Keras 2 instead of Keras 3."""
    name = "Keras 2"
    version = installed("tf_keras") or installed("tf-keras")
    if environ.get("TF_USE_LEGACY_KERAS") in _TRUE:
        text = f"TF_USE_LEGACY_KERAS={environ['TF_USE_LEGACY_KERAS']}: tf.keras is tf_keras"
        hint = "unset TF_USE_LEGACY_KERAS: models of Keras 2 and 3 do not mix."
        return Check(name, FAILURE, text, hint)
    if version:
        text = f"tf_keras {version} is installed beside Keras 3"
        return Check(name, OK, f"{text}: take care that models come from `import keras`")
    return Check(name, OK, "not installed, and not asked for")


def check_sharing(cluster: Cluster | None, num_gpus: int, environ: Mapping[str, str]) -> Check:
    """Checks whether several workers of this host would use the same GPUs."""
    name = "GPUs and workers"
    if cluster is None or not num_gpus:
        return Check(name, UNKNOWN, "no GPU here" if not num_gpus else "no cluster here")
    # With parameter servers workers alone compute.
    tasks = [task for task in cluster.tasks if not cluster.has_servers or task[0] == "worker"]
    hosts = [split_address(cluster.spec[kind][index])[0] for kind, index in tasks]
    mine = hosts.count(split_address(cluster.address)[0])
    text = f"{console.count(mine, 'worker')} on this host"
    if mine == 1 or cluster.source == SLURM:
        return Check(name, OK, f"{text}, each with its own" if mine > 1 else text)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        text = f"{console.count(mine, 'worker')} of this host would each take all {num_gpus} GPUs"
        hint = "Start them with python -m tfmulti.launch, which gives each its own, or only one."
        return Check(name, FAILURE, text, hint)
    text += f', and CUDA_VISIBLE_DEVICES="{visible}" in this one: each must have its own'
    return Check(name, UNKNOWN, text)


def check_libraries(environ: Mapping[str, str], installed: VersionOf) -> Check:
    """Looks for CUDA libraries that would be loaded instead of those of TensorFlow's packages."""
    name = "LD_LIBRARY_PATH"
    folders = [Path(each) for each in environ.get(name, "").split(":") if each]
    found = [str(path) for folder in folders for kind in _LIBRARIES for path in folder.glob(kind)]
    if found and installed("nvidia-cudnn-cu12"):
        hint = "unset LD_LIBRARY_PATH: TensorFlow finds the libraries of its packages without it."
        return Check(name, WARNING, f"{found[0]} comes before the packages' libraries", hint)
    return Check(name, OK, "no library of CUDA in it" if folders else "not set")
