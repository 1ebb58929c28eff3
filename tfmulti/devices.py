"""Lists, chooses and describes devices."""

from __future__ import annotations

import os

import tensorflow as tf


def list_gpus() -> list[str]:
    """Returns TensorFlow's names of the logical GPUs, such as `["GPU:0", "GPU:1"]`."""
    return _names("GPU")


def list_cpus() -> list[str]:
    """Returns TensorFlow's names of the logical CPUs. Starts TensorFlow's runtime."""
    return _names("CPU")


def has_gpu() -> bool:
    """Whether there is a GPU. Does not start TensorFlow's runtime."""
    return count_gpus() > 0


def count_gpus() -> int:
    """Returns how many GPUs TensorFlow may use: `tf.config.set_visible_devices` can hide some."""
    return len(tf.config.get_visible_devices("GPU"))


def has_tpu() -> bool:
    """Whether TensorFlow sees a TPU. Does not start TensorFlow's runtime."""
    return bool(tf.config.list_physical_devices("TPU"))


def grow_gpu_memory() -> None:
    """Makes each GPU allocate memory as needed, if TensorFlow has not started yet.

    Except GPUs that the program has divided into logical ones: those have limits of their own.
    """
    # TensorFlow's servers know the variable alone, and so does a process with logical CPUs.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    for gpu in tf.config.list_physical_devices("GPU"):
        if tf.config.get_logical_device_configuration(gpu):
            continue
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            return


def see_gpus(names: str, environ=os.environ) -> None:
    """Makes only some GPUs visible to this process, if TensorFlow has not listed them yet.

    Args:
        names: The value of CUDA_VISIBLE_DEVICES, such as `"2,3"`.
        environ: The environment.

    Raises:
        RuntimeError: If TensorFlow has found more GPUs already.
    """
    before, environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES"), names
    found = len(tf.config.list_physical_devices("GPU"))
    if found > len(names.split(",")):
        raise RuntimeError(
            "A worker's GPUs must be chosen before TensorFlow has looked for them. Received: "
            f"{found} GPUs already found, CUDA_VISIBLE_DEVICES={before}; this worker was assigned "
            f"{names}. Call create_strategy first, or start the tasks with srun --gpus-per-task=1."
        )


def set_logical_cpus(num_cpus: int) -> None:
    """Splits the machine's CPU into `num_cpus` logical ones, for trials and tests.

    Args:
        num_cpus: Number of logical CPUs, at least 1.

    Raises:
        RuntimeError: If TensorFlow is in use already and has fewer.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if len(configured) >= num_cpus:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * num_cpus
        )
    except RuntimeError as error:
        raise RuntimeError(
            "`logical_cpus` must be set before TensorFlow is used in this process. "
            f"Received: logical_cpus={num_cpus}, with {len(list_cpus())} in use. "
            "Call create_strategy first, or restart the process (in a notebook: the kernel)."
        ) from error


def check_names(devices: list[str]) -> None:
    """Raises ValueError for what is no list of names, such as one name by itself."""
    is_list = isinstance(devices, list | tuple) and len(devices) > 0
    if not is_list or not all(isinstance(name, str) for name in devices):
        example = [devices] if isinstance(devices, str) else ["GPU:0", "GPU:1"]
        raise ValueError(
            "`devices` must be a list of names of devices. "
            f"Received: devices={devices!r}. Write devices={example}."
        )


def check_devices(devices: list[str]) -> list[str]:
    """Returns `devices` in TensorFlow's short form, after checking that each is there.

    Args:
        devices: Names such as `["CPU:0", "CPU:1"]` or `["/gpu:0"]`, or TensorFlow's full names,
            as `tensor.device` gives them.

    Raises:
        ValueError: For a name that is unknown or given twice, or what is no list of names.
    """
    check_names(devices)
    known = _names(None)
    short = [_short(name) for name in devices]
    strangers = [name for name in short if name not in known]
    if strangers or len(set(short)) < len(short):
        raise ValueError(
            "`devices` must name devices of this machine, each once. "
            f"Received: devices={list(devices)}. Known here: {', '.join(known)}. "
            "With `logical_cpus=N` one machine has CPU:0 to CPU:N-1."
        )
    return short


def _short(name) -> str:
    local = name.upper().removeprefix("/JOB:LOCALHOST/REPLICA:0/TASK:0")
    return local.removeprefix("/DEVICE:").lstrip("/")


def _names(device_type: str | None) -> list[str]:
    logical = tf.config.list_logical_devices(device_type)
    return [":".join(device.name.split(":")[-2:]).upper() for device in logical]
