"""Pitfalls of Keras and TensorFlow that let training fail, or go wrong in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tfmulti.cluster import Cluster
from tfmulti.cluster.network import split_address
from tfmulti.doctor.packages import VersionOf, version_of
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check, plural

_DEFAULTS = {"floatx": "float32", "image_data_format": "channels_last"}
_LIBRARIES = ("libcudart.so*", "libcudnn*.so*", "libcublas.so*", "libnccl.so*")
_TRUE = ("1", "true", "True")


def check_pitfalls(
    environ: Mapping[str, str],
    cluster: Cluster | None = None,
    num_gpus: int = 0,
    home: Path | None = None,
    installed: VersionOf = version_of,
) -> list[Check]:
    """Looks for the traps.

    Args:
        environ: The environment.
        cluster: The cluster, or None.
        num_gpus: GPUs of this host.
        home: The home folder; None takes the user's.
        installed: Returns the version of a package, or None.
    """
    folder = Path(environ.get("KERAS_HOME", (home or Path.home()) / ".keras"))
    return [
        check_backend(environ, folder / "keras.json"),
        check_keras_file(folder / "keras.json"),
        check_legacy(environ, installed),
        check_sharing(cluster, num_gpus, environ),
        check_libraries(environ, installed),
        Check(
            "order in the program",
            UNKNOWN,
            "the doctor does not read programs; tfmulti tells when it goes wrong",
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
    """Looks whether Keras will use TensorFlow."""
    name = "backend of Keras"
    settings, _ = read_keras_file(path)
    chosen, place = settings.get("backend", "tensorflow"), str(path)
    if environ.get("KERAS_BACKEND"):
        chosen, place = environ["KERAS_BACKEND"], "the variable KERAS_BACKEND"
    elif "backend" not in settings:
        place = "the default"
    if chosen == "tensorflow":
        return Check(name, OK, f"tensorflow ({place})")
    hint = "export KERAS_BACKEND=tensorflow on every worker."
    return Check(name, FAILURE, f"{chosen} ({place}); tfmulti trains on TensorFlow", hint)


def check_keras_file(path: Path) -> Check:
    """Looks for settings of keras.json that change results, and that only this host may have."""
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
    """Looks for Keras 2 in the place of Keras 3."""
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
    """Looks whether several workers of this host would take the same GPUs."""
    name = "GPUs and workers"
    if cluster is None or not num_gpus:
        return Check(name, UNKNOWN, "no GPU here" if not num_gpus else "no cluster here")
    hosts = [split_address(cluster.spec[kind][index])[0] for kind, index in cluster.tasks]
    mine = hosts.count(split_address(cluster.address)[0])
    if mine > 1 and environ.get("CUDA_VISIBLE_DEVICES") is None:
        text = f"{plural(mine, 'worker')} of this host would each take all {num_gpus} GPUs"
        hint = "Give each its own CUDA_VISIBLE_DEVICES, or start one worker for each host."
        return Check(name, FAILURE, text, hint)
    return Check(name, OK, f"{plural(mine, 'worker')} on this host")


def check_libraries(environ: Mapping[str, str], installed: VersionOf) -> Check:
    """Looks for libraries of CUDA that come before those of TensorFlow's packages."""
    name = "LD_LIBRARY_PATH"
    folders = [Path(each) for each in environ.get(name, "").split(":") if each]
    found = [str(path) for each in folders for kind in _LIBRARIES for path in each.glob(kind)]
    if found and installed("nvidia-cudnn-cu12"):
        hint = "unset LD_LIBRARY_PATH: TensorFlow finds the libraries of its packages without it."
        return Check(name, WARNING, f"{found[0]} comes before the packages' libraries", hint)
    return Check(name, OK, "no library of CUDA in it" if folders else "not set")
