"""What a real GPU shows: skipped where there is none.

`make test-gpu` runs these tests, and others on four parts of one GPU.
"""

import json
import os
import subprocess
import sys

import pytest

from tfmulti import hardware
from tfmulti.hardware.gpus import find_visible

GPUS = hardware.read_driver().gpus
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU of NVIDIA's")

# CUDA's own library, because frameworks read CUDA_VISIBLE_DEVICES with code of their own.
COUNT = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(count.value)
"""
UUID = (GPUS[0].uuid or "") if GPUS else ""
NUMBERS = [None, "", " ", "0", "0,99", "99,0", "0,0", "-1", "0,-1", "-1,0", " 0 ", "00", "+0"]
BETWEEN = ["0 1", "0;1", "0.0", "0a", "0x0", "0,", ",0", "0,,0", "a,0", "0,a", "none", "all"]
NAMES = [UUID, UUID[:12], UUID.upper(), UUID.lower(), UUID[4:], "GPU-", "GPU-0000", "GPU-zz,0"]
MIXED = [f"{UUID},0", f"0,{UUID}", f"{UUID},{UUID}", f"{UUID},99", "0,MIG-1"]


def run(*command, visible=None, timeout_s=300):
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(len(GPUS) != 1, reason="is written for one GPU")
@pytest.mark.parametrize("value", NUMBERS + BETWEEN + NAMES + MIXED)
def test_cuda_shows_the_gpus_that_are_predicted(value):
    code, printed, errors = run(sys.executable, "-c", COUNT, visible=value)
    assert code == 0, errors
    assert len(find_visible(value, [UUID])[0]) == int(printed)


def test_memory_in_use_is_that_of_nvidia_smi():
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    _, printed, _ = run(*query)
    shown = [tuple(map(int, line.split(", "))) for line in printed.splitlines()]
    found = [(gpu.used_mib, gpu.memory_mib) for gpu in hardware.read_driver().gpus]
    for (used, total), (shown_used, shown_total) in zip(found, shown, strict=True):
        assert total == shown_total
        # Other programs come and go.
        assert abs(used - shown_used) < 0.01 * total


def test_the_doctor_computes_on_every_gpu():
    _, printed, errors = run(sys.executable, "-m", "tfmulti.doctor", "--json")
    checks = {check["name"]: check for check in json.loads(printed)["checks"]}
    for name in ("GPUs of the driver", "GPUs of TensorFlow", "sum on each GPU"):
        assert checks[name]["status"] == "ok", (checks[name], errors)


def test_training_uses_the_gpu(tmp_path):
    train = [sys.executable, "-m", "tfmulti.train", "--epochs=1", f"--workdir={tmp_path}"]
    code, printed, errors = run(*train, "--strategy=auto")
    assert code == 0, errors
    assert "GPU:0" in printed + errors


MASKED = """
import json
import keras, numpy as np, tensorflow as tf, tfmulti

def masked_gradients(kind, dtype):
    layer = getattr(keras.layers, kind)(8, return_sequences=True, use_cudnn=True, dtype=dtype)
    x = tf.random.stateless_normal([16, 12, 8], (1, 2), dtype=dtype)
    mask = tf.sequence_mask(np.arange(16) % 10 + 2, 12)
    largest = 0.0
    for _ in range(10):
        # Memory that TensorFlow uses again.
        tf.reduce_sum(tf.fill([2**18], tf.constant(1e30, dtype))).numpy()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, mask=mask) ** 2)
        gradient = tape.gradient(loss, x).numpy()[~mask.numpy()]
        largest = max(largest, float(np.abs(np.nan_to_num(gradient, nan=np.inf)).max()))
    return largest

plain, ours = {}, {}
for kind in ("LSTM", "GRU"):
    for dtype in ("float32", "float64"):
        name = f"{kind} {dtype}"
        plain[name] = masked_gradients(kind, dtype)
        with tfmulti.create_strategy("one_device", devices=["GPU:0"]).scope():
            ours[name] = masked_gradients(kind, dtype)
print(json.dumps([plain, ours]))
"""


def test_masked_time_steps_of_cudnn_have_no_gradient():
    code, printed, errors = run(sys.executable, "-c", MASKED)
    assert code == 0, errors
    plain, ours = json.loads(printed.splitlines()[-1])
    # cuDNN leaves what the memory held, if only at times.
    print("the largest gradient of a masked step in plain Keras:", plain)
    assert not any(ours.values()), (plain, ours)
