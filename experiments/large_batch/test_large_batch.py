"""Every rule ends alike on one device and on two; the table and the plot are written."""

from experiments import common
from experiments.large_batch import experiment

TINY = {"base_batch_size": 240, "epochs": 1, "num_seeds": 1, "warmup_epochs": 1.0}


def test_two_replicas_end_where_one_device_ends(ends_alike, tmp_path, monkeypatch):
    rules = {name: experiment.RULES[name] for name in ["linear, warm-up"]}
    monkeypatch.setattr(experiment, "RULES", rules)
    metrics = ends_alike(
        experiment.train, experiment.Settings, batch_sizes="720", workdir=str(tmp_path), **TINY
    )
    assert set(metrics) == {f"{a}: {b}, 720" for a in ("loss", "error") for b in rules}
    assert (tmp_path / "large_batch.png").stat().st_size > 10_000
    lines = (tmp_path / common.TABLE).read_text().splitlines()
    assert lines[0] == "| learning rate | 720 |" and len(lines) == 3


def test_at_the_base_batch_size_the_rules_are_one(monkeypatch):
    trainer = experiment.Trainer(experiment.Settings(strategy="one_device", **TINY))
    first, _ = trainer.run("none", 240, seed=0)
    assert trainer.run("linear", 240, seed=0)[0] is first
    assert len(trainer.known) == 1
