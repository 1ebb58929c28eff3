"""Trains a model on a dataset under a strategy, and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
import time

import numpy as np

from tfmulti import callbacks, keras_compat
from tfmulti.cluster import environment
from tfmulti.data import datasets, distribute_eval, distribute_train
from tfmulti.data.datasets import load_dataset
from tfmulti.parallel.sharded_parameters import sharded_parameters
from tfmulti.strategies import create_strategy
from tfmulti.train import models
from tfmulti.train.asynchronous import train_async
from tfmulti.train.batch_size import resolve_batch_size
from tfmulti.train.config import TrainConfig
from tfmulti.train.models import compile_model, create_model, prepare_keras, stage_devices
from tfmulti.train.run_reporter import RunReporter, RunSettings, digest_weights


def train_and_evaluate(config: TrainConfig, print_fn=print) -> dict:
    """Trains and validates a model, on this worker or this process's devices.

    Every worker of a cluster calls it with the same configuration. With `workdir` the chief
    writes `model.keras`, `history.csv`, `result.json` and `logs/`.

    Args:
        config: The run.
        print_fn: Function that takes one line of text for the user.

    Returns:
        The contents of `result.json`.

    Raises:
        ValueError: For a model, data and settings that are incompatible.
        RuntimeError: If the devices or the cluster are missing.
    """
    strategy = _create_strategy(config)
    if keras_compat.has_servers(strategy):
        config.check_with_servers()
    # Reports missing devices before data are loaded.
    stages = stage_devices(config)
    config = resolve_batch_size(config, strategy, print_fn)
    global_batch_size = config.resolve_global_batch_size(strategy.num_replicas_in_sync)
    prepare_keras(config)
    _find_functions(config, strategy)
    train_split, test_split = load_dataset(config.dataset)
    train = distribute_train(
        train_split,
        strategy,
        global_batch_size,
        seed=config.seed,
        remainder=config.remainder,
        steps_per_epoch=config.steps_per_epoch,
        audit=config.audit_shards,
    )
    test = distribute_eval(test_split, strategy, global_batch_size)
    sharded = sharded_parameters() if config.sharded == "parameters" else contextlib.nullcontext()
    with strategy.scope(), sharded:
        model = create_model(config.model, train_split)
        base_rate = compile_model(model, config, train)
    reporter = RunReporter(strategy, config.workdir, print_fn)
    finished = reporter.result_of_finished()
    if finished is not None:
        return finished
    settings = RunSettings(config, train.plan, reporter.num_workers, model, base_rate)
    reporter.introduce(settings, stages)
    tells = config.monitor and reporter.is_chief
    throughput = callbacks.Throughput(train, print_fn=reporter.print_fn if tells else None)
    began = time.perf_counter()
    chosen = [throughput, *reporter.create_callbacks(train, config)]
    try:
        history = _fit(model, train, test, config, chosen, reporter.print_fn)
        seconds = time.perf_counter() - began
        result = _describe(settings, reporter, throughput, history, seconds)
        result |= {n: v for n, v in vars(history).items() if n == "steps_by_worker"}
        result["weights_sha256"] = digest_weights(model)
        reporter.finish(model, result)
    finally:
        reporter.close()
    return result


def _find_functions(config, strategy) -> None:
    """Raises ValueError for a function that is not there: data may take minutes to load."""
    datasets.find_function(config.dataset)
    # What the module of a model creates has always been created in the scope.
    with strategy.scope():
        models.find_function(config.model)


def _fit(model, train, test, config, chosen, print_fn):
    settings = {"validation_data": test, "epochs": config.epochs, "verbose": 0, "callbacks": chosen}
    if keras_compat.has_servers(model.distribute_strategy):
        staleness = config.max_staleness
        return train_async(model, train, max_staleness=staleness, print_fn=print_fn, **settings)
    return model.fit(train, shuffle=False, **settings)


def _create_strategy(config):
    names = ("logical_cpus", "tf_config", "communication", "bucket_bytes", "start_timeout")
    names += ("heartbeat_timeout", "verify", "on_difference", "num_ps")
    settings = {name: getattr(config, name) for name in names}
    fields = [f for f in dataclasses.fields(config) if not f.metadata["per_worker"]]
    of_all = {f"--{field.name}": getattr(config, field.name) for field in fields}
    return create_strategy(config.strategy, must_agree=of_all, **settings)


def _describe(settings, reporter, throughput, history, seconds) -> dict:
    # A list for a metric that has a value for each class.
    metrics = {name: np.asarray(v[-1], float).tolist() for name, v in history.history.items()}
    measured = {name: metrics.pop(name, None) for name in callbacks.MEASURED}
    workers = getattr(reporter.strategy, "num_workers", None)
    # Steps and examples are counted over the whole run, including earlier starts.
    steps, examples = reporter.done_before(settings.plan)
    return {
        "strategy": type(reporter.strategy).__name__,
        "num_workers": workers or reporter.num_workers,
        "num_replicas": workers or reporter.strategy.num_replicas_in_sync,
        "global_batch_size": settings.plan.global_batch_size,
        "per_replica_batch_size": settings.per_replica_batch_size,
        "learning_rate": _learning_rate(settings.learning_rate, reporter.saver),
        "steps": steps + throughput.steps,
        "resumed_step": steps,
        "epochs": len(history.epoch),
        "examples": examples + throughput.examples,
        "seconds": round(seconds, 3),
        "examples_per_second": measured["examples_per_second"],
        "metrics": metrics,
        "restarts": environment.count_restarts(os.environ),
        "versions": {
            "python": platform.python_version(),
            **keras_compat.installed_versions(),
            "numpy": np.__version__,
        },
    }


def _learning_rate(given, saver) -> float | None:
    """Returns the rate with which the run began; if it was resumed, maybe not the one given now."""
    begun = getattr(saver, "resumed_rate", None)
    # The checkpoint's is a float32.
    if begun is None or given is None or math.isclose(begun, given, rel_tol=1e-6):
        return given
    return begun
