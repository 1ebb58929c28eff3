"""Runs TensorFlow in another process, with a timeout: it may hang or crash."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence

from tfmulti.doctor.report import FAILURE, OK, Check
from tfmulti.runtime import processes

TIMEOUT_S = 30.0
_MARK = "tfmulti.doctor: "
_LAST_LINES = 4
_PYTHON_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
_ABOUT_GPUS = ("dlopen", "Could not find cuda", "libcu", "CUDA_ERROR", "failed call to cuInit")

SCRIPT = """
import json, time
began = time.perf_counter()
import tensorflow as tf
import keras
facts = {"seconds": time.perf_counter() - began}
facts["tensorflow"], facts["keras"] = tf.version.VERSION, keras.version()
facts["backend"] = keras.backend.backend()
facts["build"] = {name: str(value) for name, value in tf.sysconfig.get_build_info().items()}
facts["gpus"] = []
for gpu in tf.config.list_physical_devices("GPU"):
    details = {name: str(value) for name, value in
               tf.config.experimental.get_device_details(gpu).items()}
    try:
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        pass
    facts["gpus"].append({"name": gpu.name, "fault": "", **details})
for index, gpu in enumerate(facts["gpus"]):
    try:
        with tf.device(f"GPU:{index}"):
            ones = tf.ones((64, 64))
            if float(tf.reduce_sum(ones @ ones)) != 64.0 ** 3:
                gpu["fault"] = "a matrix product has a wrong sum"
    except Exception as error:
        gpu["fault"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
print("tfmulti.doctor: " + json.dumps(facts), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of the TensorFlow process.

    Attributes:
        facts: `seconds`, `tensorflow`, `keras`, `backend`, `build` and `gpus`; None where it
            failed.
        fault: How it failed; else empty.
        words: Its last words where it failed; else what it wrote about GPUs.
    """

    facts: dict | None
    fault: str = ""
    words: str = ""


def run_tensorflow(
    timeout_s: float, command: Sequence[str] = (sys.executable, "-c", SCRIPT)
) -> Report:
    """Imports TensorFlow in another process, and computes there on each GPU.

    Args:
        timeout_s: Seconds that it has.
        command: What to run.
    """
    # Another check reports a different Keras backend; use TensorFlow here to check the rest.
    env = {"TF_CPP_MIN_LOG_LEVEL": "0", "KERAS_BACKEND": "tensorflow"}
    [done] = processes.run_together(command, [env], timeout_s=timeout_s, grace_s=2.0)
    return read_report(done, timeout_s)


def read_report(done: processes.Finished, timeout_s: float) -> Report:
    """Returns the report of the process, or how it failed.

    >>> read_report(processes.Finished(-11, "", "", processes.FAILED), 1.0).fault
    'it was ended by SIGSEGV'
    """
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if marked:
        # GPUs may fail when the process exits, after the report is complete.
        facts = json.loads(marked[-1].removeprefix(_MARK))
        about = [line for line in lines if any(sign in line for sign in _ABOUT_GPUS)]
        # Without the time and process at the start of each line.
        words = [line.partition("] ")[2] or line for line in about]
        return Report(facts, words="; ".join(dict.fromkeys(words)))
    is_error = lines and _PYTHON_ERROR.match(lines[-1])
    words = lines[-1] if is_error else " | ".join(lines[-_LAST_LINES:])
    if done.how == processes.TIMED_OUT:
        return Report(None, f"no answer in {timeout_s:g} s", words)
    if done.returncode < 0:
        return Report(None, f"it was ended by {processes.signal_name(-done.returncode)}", words)
    return Report(None, f"it ended with exit code {done.returncode}", words)


def check_import(report: Report) -> Check:
    """Checks the import of TensorFlow and Keras."""
    name = "import of TensorFlow"
    if report.facts is None:
        last = f"; its last words: {report.words}" if report.words else ""
        return Check(name, FAILURE, f"{report.fault}{last}", _hint(report))
    facts = report.facts
    text = f"TensorFlow {facts['tensorflow']} and Keras {facts['keras']}"
    return Check(name, OK, f"{text} in {facts['seconds']:.1f} s")


def _hint(report) -> str:
    if "SIGILL" in report.fault:
        return "The wheels need a processor with AVX: use another machine, or build TensorFlow."
    if "no answer" in report.fault:
        return "Look for a file system that hangs; --tensorflow_timeout gives it longer."
    if "GLIBC" in report.words or "GLIBCXX" in report.words:
        return "This system is too old for the wheel: use a newer system or container."
    if "ModuleNotFoundError" in report.words or "ImportError" in report.words:
        return "Install what is missing, or recreate the environment: pip install . in the clone."
    return "Try python -c 'import tensorflow, keras'; recreate the environment."
