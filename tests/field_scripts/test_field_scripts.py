"""The scripts of the field run unchanged under every strategy, and end alike everywhere."""

import sys
from pathlib import Path

import numpy as np
import pytest
from replicas import create_strategy

HERE = Path(__file__).parent
sys.path.append(str(HERE))

import dcgan
import image_classifier
import text_transformer
import vae

SCRIPTS = [image_classifier, text_transformer, dcgan, vae]


def assert_two_finite_epochs(history):
    assert {len(values) for values in history.values()} == {2}
    for name, values in history.items():
        assert np.all(np.isfinite(values)), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script_runs_on_one_machine(script, num_replicas):
    strategy = create_strategy(num_replicas)
    model, history = script.main(strategy)
    assert_two_finite_epochs(history)
    assert model.weights
    for weight in model.weights:
        first, *others = strategy.experimental_local_results(weight.value)
        assert len(others) == num_replicas - 1
        for other in others:
            np.testing.assert_array_equal(first.numpy(), other.numpy(), err_msg=weight.path)


@pytest.mark.slow
def test_a_vae_with_call_can_predict():
    model, history = vae.main(create_strategy(2), vae.CallableVAE)
    assert_two_finite_epochs(history)
    images = np.random.default_rng(1).random((5, 8, 8, 1)).astype("float32")
    together = model.predict(images, batch_size=4, verbose=0)
    rows = model(images).numpy()
    np.testing.assert_allclose(together, rows, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_scripts_run_on_two_workers(run_workers, tmp_path):
    """Every worker ends with the same weights, and has seen the same losses."""
    environment = {"PYTHONPATH": str(HERE.parents[1])}
    run_workers(2, [HERE / "field_worker.py", tmp_path], env=environment)
    first, second = (np.load(tmp_path / f"worker_{index}.npz") for index in range(2))
    assert {name.split("/")[0] for name in first.files} == {s.__name__ for s in SCRIPTS}
    assert set(first.files) == set(second.files)
    histories = {name: first[name] for name in first.files if "/history/" in name}
    assert_two_finite_epochs(histories)
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
