"""The README's script in a notebook kernel, headless."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

README = Path(__file__).parents[1] / "README.md"
SCRIPT = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]


def run_cells(*cells, allow_errors=False):
    """Runs cells in a fresh kernel; gives the outputs of each as one text."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = nbclient.NotebookClient(notebook, timeout=240, allow_errors=allow_errors)
    client.execute()
    texts = []
    for cell in notebook.cells:
        parts = [out.get("text") or out.get("evalue") or "" for out in cell.outputs]
        parts += [str(out["data"].get("text/plain")) for out in cell.outputs if "data" in out]
        texts.append("\n".join(parts))
    return texts


def test_the_script_of_the_readme_runs_twice_in_one_kernel():
    check = "accuracy = model.evaluate(test[0], test[1], verbose=0)[1]\nround(accuracy, 4)"
    first, accuracy, second, again = run_cells(SCRIPT, check, SCRIPT, check)
    assert "Epoch 5/5" in first
    assert "Epoch 5/5" in second
    assert float(accuracy) > 0.9
    assert float(again) > 0.9


@pytest.mark.slow
def test_two_replicas_in_a_kernel():
    script = SCRIPT.replace('"auto"', '"mirrored", logical_cpus=2')
    outputs, replicas = run_cells(script, "strategy.num_replicas_in_sync, strategy.why")
    assert "Epoch 5/5" in outputs
    assert "(2, 'mirrored on CPU:0, CPU:1 (as asked)')" in replicas


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        ('create_strategy("mirrored", logical_cpus=3)', "`logical_cpus` must be set before"),
        (
            'create_strategy("multi_worker", tf_config={"cluster": {"worker": ["127.0.0.1:%d"]}, '
            '"task": {"type": "worker", "index": 0}})',
            "`multi_worker` must be created before TensorFlow is used",
        ),
    ],
    ids=["logical_cpus", "multi_worker"],
)
def test_what_comes_too_late_is_said_in_three_parts(call, rule, free_ports):
    if "%d" in call:
        call %= free_ports(1)[0]
    used = "import tensorflow as tf\ntf.constant(1) + 1"
    _, message = run_cells(used, f"import tfmulti\ntfmulti.{call}", allow_errors=True)
    assert rule in message
    assert "Received: " in message
    assert "restart the process (in a notebook: the kernel)" in message
