import contextlib
import functools
import json
import os
import subprocess
import sys
from unittest import mock

import keras
import numpy as np
import pytest
from replicas import create_strategy

import tfmulti
from tfmulti import checkpoint, rendezvous
from tfmulti.checkpoint import folder_lock, generations
from tfmulti.cluster import environment
from tfmulti.runtime import command_line
from tfmulti.strategies import coordination
from tfmulti.train import __main__ as command
from tfmulti.train import loop, models, run_reporter, techniques
from tfmulti.train.config import TrainConfig


def run(*arguments, env=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "tfmulti.train", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )


ONE, LOCAL = "--strategy=one_device", "--synchronize_every=2"
FIND = "--per_replica_batch_size=auto"


@pytest.mark.parametrize(
    ("begun", "code"),
    [
        ("not", command_line.ERROR),
        ("restarted", environment.PEER_LOST),
        ("saved", environment.PEER_LOST),
    ],
)
def test_workers_that_are_late_after_a_restart_end_that_start_alone(
    monkeypatch, tmp_path, begun, code
):
    """At a first start somebody has to look: 1, which schedulers do not restart."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1" if begun == "restarted" else "0")
    config = TrainConfig(strategy="multi_worker", workdir=str(tmp_path))
    if begun == "saved":
        (tmp_path / checkpoint.FOLDER / "step_0000000012").mkdir(parents=True)
        assert checkpoint.saved_in(tmp_path / checkpoint.FOLDER)
    assert command._end(rendezvous.WorkersMissingError("late"), config, False) == code
    assert command._end(rendezvous.RendezvousError("unlike"), config, False) == command_line.ERROR


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "--model=cnnn",
            ["`model` must be one of cnn, mlp, or", "model='cnnn'. Use", "'mine:create'"],
        ),
        ("extra", ["flags only", "Received: extra"]),
        ("--stratgy mirrored", ["Unknown command line flag 'stratgy'", "strategy"]),
        ("--strategy horovod", ["horovod", "mirrored"]),
        ("--epochs 0", ["`epochs` must be at least 1", "epochs=0"]),
        ("--global_batch_size=8 --per_replica_batch_size=4", ["exclude each other"]),
        ("--base_batch_size=8", ["`base_batch_size` needs a rule", "base_batch_size=8, lea"]),
        ("--checkpoint_steps=3", ["`checkpoint_steps` needs a folder", "3 without workdir"]),
        ("--strategy=mirrored --tf_config=x.json", ["`tf_config` can be used with multi_worker"]),
        ("--strategy=mirrored --communication=ring", ["`communication` can be used with"]),
        ("--strategy=mirrored --bucket_bytes=8", ["`bucket_bytes` can be used with multi"]),
        ("--strategy=parameter_server --bucket_bytes=8", ["`bucket_bytes` cannot be used with p"]),
        (f"{ONE} --logical_cpus=2", ["`logical_cpus` above 1"]),
        (f"{ONE} --logical_cpus=2 --pipeline_stages=3", ["stages=3, logical_cpus=2", "cpus 3"]),
        ("--strategy=mirrored --pipeline_stages=2", ["needs one_device", "strategy='mirrored'"]),
        (f"{ONE} --pipeline_stages=2 --estimate_memory=2", ["cannot estimate models in parts"]),
        ("--pipeline_stages=2 --estimate_memory=2", ["cannot estimate", "pipeline_stages=2, est"]),
        (
            "--strategy=multi_worker --tensor_parallel=kernel=column --estimate_memory=2",
            ["cannot estimate", "tensor_parallel='kernel=column'", "Leave --tensor_parallel out"],
        ),
        (f"{LOCAL} --pipeline_stages=2", [": synchronize_every=2, pipeline_stages=2."]),
        (f"{LOCAL} --tensor_parallel=x=row", ["synchronize_every=2, tensor_parallel='x=row'."]),
        (f"{LOCAL} --compression=bfloat16", ["synchronize_every=2, compression='bfloat16'."]),
        (
            "--shard=parameters --compression=bfloat16",
            ["Received: shard='parameters', compression='bfloat16'. Leave --compression out"],
        ),
        ("--pipeline_stages=2 --compression=bfloat16", ["stages=2, compression='bfloat16'."]),
        ("--micro_batches=8", ["Received: micro_batches=8, without pipeline_stages."]),
        (f"{FIND} --tensor_parallel=x=row", ["Received: ", "='auto', tensor_parallel='x=row'."]),
        (
            f"{FIND} --strategy=multi_worker --pipeline_stages=2",
            [
                "`pipeline_stages` divides over workers. Received: ",
                "'auto', pipeline_stages=2. Use",
            ],
        ),
        ("--tensor_parallel=dense/kernel=diagonal", ["'diagonal' is not one of", "vocabulary"]),
        ("--tensor_parallel=dense(/kernel=row", ["must be a regular expression"]),
    ],
)
def test_bad_usage_exits_2_before_tensorflow_starts(arguments, words, capsys):
    assert command.main(["train", *arguments.split()]) == command_line.BAD_USAGE
    message = capsys.readouterr().err
    assert all(word in message for word in words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        (["--pipeline_stages=9"], "Received: pipeline_stages=9, 0 GPUs. Use --logical_cpus 9"),
        (["--num_ps=1"], "Received: num_ps=1, no TF_CONFIG"),
    ],
)
def test_what_needs_other_processes_is_told_in_one_alone(arguments, received, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    done = run(*arguments, "--epochs=1")
    assert done.returncode == command_line.ERROR
    assert received in done.stderr


def test_servers_that_a_strategy_would_leave_idle_are_told():
    tasks = {kind: [f"127.0.0.1:{i}"] for i, kind in enumerate(("chief", "worker", "ps"), 12345)}
    text = json.dumps({"cluster": tasks, "task": {"type": "chief", "index": 0}})
    done = run("--strategy=one_device", env={"TF_CONFIG": text})
    assert done.returncode == command_line.ERROR
    assert "Received: strategy='one_device', and a TF_CONFIG with parameter servers" in done.stderr


@pytest.mark.parametrize(
    ("tf_config", "word"),
    [
        ("{cluster: nope", "not JSON"),
        ("", "empty"),
        ("[1, 2]", "object"),
        ('{"cluster": {}}', "{}"),
    ],
)
def test_a_cluster_that_cannot_be_read_never_trains_alone(tf_config, word):
    done = run("--strategy", "auto", env={"TF_CONFIG": tf_config})
    assert done.returncode == command_line.ERROR
    assert "TF_CONFIG" in done.stderr
    assert "Epoch" not in done.stdout


@pytest.mark.slow
def test_multi_worker_without_a_cluster_is_refused(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    done = run("--strategy", "multi_worker")
    assert done.returncode == command_line.ERROR
    assert "`multi_worker` needs a cluster in TF_CONFIG" in done.stderr
    assert "Traceback" not in done.stderr


def config(tmp_path, **settings):
    defaults = {"strategy": "mirrored", "logical_cpus": 2, "epochs": 2, "workdir": str(tmp_path)}
    return TrainConfig(**{**defaults, **settings})


@pytest.mark.slow
def test_the_default_model_learns_the_digits_and_the_files_are_there(tmp_path):
    done = run("--strategy=mirrored", "--logical_cpus=2", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"]["val_accuracy"] >= 0.97
    assert set(result) == {
        "strategy",
        "num_workers",
        "num_replicas",
        "global_batch_size",
        "per_replica_batch_size",
        "learning_rate",
        "steps",
        "epochs",
        "examples",
        "seconds",
        "examples_per_second",
        "metrics",
        "weights_sha256",
        "restarts",
        "resumed_step",
        "versions",
    }
    assert (result["num_replicas"], result["examples"]) == (2, 1437 * result["epochs"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.keras", "history.csv", "result.json", "logs"}
    assert list((tmp_path / "logs" / "train").iterdir())
    model = keras.models.load_model(tmp_path / "model.keras")
    assert run_reporter.digest_weights(model) == result["weights_sha256"]
    for word in ("replicas", "global batch size", "examples per second", "validation accuracy"):
        assert word in done.stdout


@pytest.mark.slow
def test_one_device_and_two_replicas_end_with_the_same_weights(tmp_path):
    settings = {"optimizer": "sgd", "epochs": 3}
    for name in ("one_device", "mirrored"):
        cpus = 2 if name == "mirrored" else 0
        run_config = config(tmp_path / name, strategy=name, logical_cpus=cpus, **settings)
        loop.train_and_evaluate(run_config, print_fn=lambda line: None)
    saved = [keras.models.load_model(path) for path in sorted(tmp_path.glob("*/model.keras"))]
    for one, other in zip(*(model.get_weights() for model in saved), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_stages_on_the_devices_of_one_process_end_with_the_weights_of_one_device(tmp_path):
    settings = {"strategy": "one_device", "logical_cpus": 0, "steps_per_epoch": 2, "epochs": 1}
    lines, result = [], {}
    for name, stages in (("one", {}), ("stages", {"pipeline_stages": 2, "logical_cpus": 2})):
        folder = config(tmp_path / name, optimizer="sgd", model="mlp", **{**settings, **stages})
        result[name] = loop.train_and_evaluate(folder, print_fn=lines.append)
    assert any("1 replica in stages on CPU:0, CPU:1" in line for line in lines)
    saved = [keras.models.load_model(path) for path in sorted(tmp_path.glob("*/model.keras"))]
    for one, other in zip(*(model.get_weights() for model in saved), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert result["one"]["num_replicas"] == result["stages"]["num_replicas"] == 1


def test_stages_are_on_devices_without_workers_and_else_on_a_worker_each():
    wanted = TrainConfig(pipeline_stages=2)
    assert techniques.with_stages_placed(wanted, 1).has_stages_on_devices
    assert techniques.with_stages_placed(wanted, 4) == wanted
    with pytest.raises(ValueError, match="Received: pipeline_stages=2, 3 workers. Start"):
        techniques.with_stages_placed(wanted, 3)
    with pytest.raises(ValueError, match="Received: pipeline_stages=2, 1 worker. Start"):
        techniques.with_stages_placed(TrainConfig(strategy="multi_worker", pipeline_stages=2), 1)


def test_the_batch_size_is_found_for_stages_on_devices_and_not_on_workers():
    wanted = TrainConfig(pipeline_stages=2, per_replica_batch_size="auto")
    assert techniques.with_stages_placed(wanted, 1).has_stages_on_devices
    with pytest.raises(ValueError, match="`per_replica_batch_size=auto` .* Received: .*stages=2."):
        techniques.with_stages_placed(wanted, 2)


def test_what_auto_accepts_for_workers_does_not_hinder_stages_on_devices():
    wanted = TrainConfig(pipeline_stages=2, bucket_bytes=8, start_timeout=3.0, communication="ring")
    assert techniques.with_stages_placed(wanted, 1) == TrainConfig("one_device", pipeline_stages=2)


@pytest.mark.parametrize("asked, expected", [(1, 2), (3, 3)])
def test_steps_per_execution_holds_for_a_compiled_model(asked, expected):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
    models.compile_model(model, TrainConfig(steps_per_execution=asked), None)
    assert model.steps_per_execution == expected


@pytest.mark.parametrize(
    "function, given",
    [
        (lambda: None, []),
        (lambda deep=False: None, []),
        (lambda *, deep: None, []),
        (lambda **settings: None, []),
        (lambda data: None, ["data"]),
        (lambda data, deep=False: None, ["data"]),
        (lambda train=None: None, ["data"]),
        (lambda *arguments: None, ["data"]),
    ],
)
def test_a_model_function_is_given_the_data_unless_it_has_settings_only(
    function, given, monkeypatch
):
    seen = []

    @functools.wraps(function)
    def create(*arguments):
        seen.extend(arguments)
        return keras.Sequential()

    monkeypatch.setattr(models, "resolve_function", lambda *_, **__: create)
    models.create_model("theirs:create", "data")
    assert seen == given


@pytest.mark.parametrize("fails", [False, True])
def test_checkpoints_stay_until_all_workers_have_saved(tmp_path, monkeypatch, fails):
    reporter = run_reporter.RunReporter(create_strategy(1), tmp_path, print)
    (tmp_path / "checkpoints").mkdir()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def wait(strategy, number):
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"checkpoints", "model.keras", "result.json"}
        if fails:
            raise Killed

    monkeypatch.setattr(run_reporter.coordination, "min_and_max", wait)
    with pytest.raises(Killed) if fails else contextlib.nullcontext():
        reporter.finish(model, {})
    assert (tmp_path / "checkpoints").exists() == fails


def test_no_worker_ends_before_the_others_have_received_what_it_sends(tmp_path, monkeypatch):
    """One ended after the last collective of a run, while the chief still received its part."""
    strategy, calls = create_strategy(1), []
    for name in ("min_and_max", "leave_together"):
        original = getattr(coordination, name)

        def call(*args, name=name, original=original):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(coordination, name, call)
    train = tfmulti.distribute_train((np.zeros((2, 1)), np.zeros((2, 1))), strategy, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    saver = tfmulti.callbacks.Checkpoint(tmp_path / "checkpoints", train)
    model.fit(train, verbose=0, callbacks=[saver])
    # The end of `Checkpoint` and that of `fit`.
    assert calls[-3:] == ["min_and_max", "leave_together", "leave_together"]
    for end in (model.fit, model.evaluate, model.predict):
        calls.clear()
        end(train, verbose=0)
        assert calls[-1] == "leave_together", end
    run_reporter.RunReporter(strategy, tmp_path, print).finish(model, {})
    assert calls[-2:] == ["min_and_max", "leave_together"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_restart_resumes_also_where_an_earlier_run_is_not_to_be_resumed(
    tmp_path, monkeypatch, restarts
):
    """With `--resume never` it removed the checkpoints that its own run had saved."""
    monkeypatch.setenv(environment.RESTARTS, str(restarts))
    never = config(tmp_path, resume="never", strategy="one_device", logical_cpus=0)
    reporter = run_reporter.RunReporter(create_strategy(1), tmp_path, print)
    saved, log = tmp_path / checkpoint.FOLDER / "step_000000000012", tmp_path / "logs" / "train"
    for path in (saved, log):
        path.mkdir(parents=True)
    train = tfmulti.distribute_train((np.zeros((2, 1)),), reporter.strategy, 2)
    reporter.create_callbacks(train, never)
    reporter.close()
    assert reporter.saver._resume == log.exists() == bool(restarts)
    monkeypatch.setattr(loop, "train_and_evaluate", mock.Mock(side_effect=Killed))
    with pytest.raises(Killed):
        # A start that ends before training leaves no checkpoint that a restart would take.
        command._train(never, False)
    assert saved.exists() == bool(restarts)


def test_a_run_removes_no_files_of_others(tmp_path):
    """As with `--workdir .`: all of logs/ and checkpoints/ was removed."""
    logs, folder = tmp_path / "logs", tmp_path / checkpoint.FOLDER
    written = [logs / "train", logs / "validation", logs / "devices_worker_0"]
    written.append(folder / checkpoint.name_of(3))
    others = [logs / "server", folder / "best.keras"]
    for path in (*written, *others):
        path.mkdir(parents=True)
    (logs / "devices_worker_0.csv").touch()
    strategy = create_strategy(1)
    reporter = run_reporter.RunReporter(strategy, tmp_path, print)
    train = tfmulti.distribute_train((np.zeros((2, 1)),), strategy, 2)
    reporter.create_callbacks(train, config(tmp_path, resume="never"))
    reporter.close()
    assert list(logs.iterdir()) == others[:1]
    reporter.finish(
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), {"weights_sha256": ""}
    )
    assert list(folder.iterdir()) == others[1:]


ANOTHER_RUN = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_leaves_what_another_run_writes_into_its_folder(tmp_path, monkeypatch, resume):
    """It removed logs, and with `--resume never` checkpoints, before it was refused."""
    monkeypatch.setattr(folder_lock, "_PATIENCE_S", 0)
    settings = config(tmp_path, resume=resume, strategy="one_device", logical_cpus=0)
    log, folder = tmp_path / "logs" / "train" / "events", tmp_path / checkpoint.FOLDER
    # A run has logs before its first checkpoint.
    mine = [log, *[folder / "step_000000000012"] * (resume == "never")]
    for path in (*mine, folder):
        path.mkdir(parents=True, exist_ok=True)
    reporter = run_reporter.RunReporter(create_strategy(1), tmp_path, print)
    train = tfmulti.distribute_train((np.zeros((2, 1)),), reporter.strategy, 2)
    begin = lambda *_, **__: reporter.create_callbacks(train, settings)
    monkeypatch.setattr(loop, "train_and_evaluate", begin)
    another = [sys.executable, "-c", ANOTHER_RUN, folder / folder_lock.NAME]
    with subprocess.Popen(another, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"here\n"
        with pytest.raises(generations.CheckpointError, match="used by one run at a time"):
            command._train(settings, False)
        with pytest.raises(generations.CheckpointError, match="used by one run at a time"):
            begin()
        other.kill()
    assert all(path.exists() for path in mine)


def test_workers_resume_together_where_each_launcher_counts_its_own_restarts(tmp_path, monkeypatch):
    """One resumed from the chief's checkpoint, and waited for a worker that did not."""
    reporter = run_reporter.RunReporter(create_strategy(1), tmp_path, print)
    asked = []
    any_worker = lambda strategy, condition: asked.append(condition) or True
    monkeypatch.setattr(run_reporter.coordination, "any_worker", any_worker)
    train = tfmulti.distribute_train((np.zeros((2, 1)),), reporter.strategy, 2)
    reporter.create_callbacks(train, config(tmp_path, resume="never"))
    reporter.close()
    assert asked == [False] and reporter.saver._resume


def test_other_workers_are_told_of_an_exit_within_a_users_code(monkeypatch):
    told = []
    monkeypatch.setattr(command, "_end_worker", told.append)
    monkeypatch.setattr(command, "_train", lambda *_: sys.exit("no data"))
    with pytest.raises(SystemExit, match="no data"):
        command.main(["train", "--strategy=one_device"])
    assert [str(error) for error in told] == ["sys.exit('no data')"]


def test_a_job_that_is_started_again_after_it_has_finished_trains_nothing(tmp_path, monkeypatch):
    """A worker that failed while it exited made the launcher train all again."""

    def start(restarts, job):
        monkeypatch.setenv("TFMULTI_RESTARTS", str(restarts))
        monkeypatch.setenv("TFMULTI_JOB", job)
        settings = config(tmp_path, strategy="one_device", logical_cpus=0)
        monkeypatch.setattr(loop, "train_and_evaluate", lambda *_, **__: told.append("trains"))
        with contextlib.suppress(TypeError):  # It has no result to show.
            command._train(settings, False)
        reporter = run_reporter.RunReporter(create_strategy(1), tmp_path, told.append)
        return reporter, reporter.result_of_finished()

    told = []
    reporter, result = start(0, "one")
    assert result is None
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    reporter.finish(model, {"weights_sha256": "00"})
    assert start(1, "one")[1] == {"weights_sha256": "00"}
    assert start(1, "another")[1] is None
    assert start(0, "one")[1] is None
    # That start was another run, with the same token say.
    assert start(1, "one")[1] is None


def test_an_error_is_told_after_the_program_has_left_the_folder_of_its_cluster(
    tmp_path, monkeypatch, capsys
):
    """Looking for the file again, to report the error to others, failed and hid it."""
    one = {"cluster": {"worker": ["127.0.0.1:20000"]}, "task": {"type": "worker", "index": 0}}
    (tmp_path / "cluster.json").write_text(json.dumps(one))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def train(config, print_fn):
        os.chdir(tmp_path / "elsewhere")
        raise ValueError("the cause")

    monkeypatch.setattr(loop, "train_and_evaluate", train)
    assert command.main(["train", "--strategy=multi_worker", "--tf_config=cluster.json"]) == 1
    assert "the cause" in capsys.readouterr().err


@pytest.mark.parametrize("part_of_it", [False, True])
def test_other_workers_save_a_model_only_where_they_hold_parts_of_it(
    tmp_path, monkeypatch, part_of_it
):
    reporter = run_reporter.RunReporter(create_strategy(1), tmp_path, print)
    reporter.is_chief = False
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    if part_of_it:
        model.layers[0].bias.is_here = False
    saved = []
    monkeypatch.setattr(keras.Model, "save", lambda self, path: saved.append(path))
    reporter.finish(model, {})
    assert bool(saved) == part_of_it and not list(tmp_path.iterdir())


def test_missing_devices_of_stages_are_told_before_data_are_loaded(tmp_path):
    wanted = config(tmp_path, strategy="one_device", pipeline_stages=9, logical_cpus=9)
    with pytest.raises(RuntimeError, match="pipeline_stages=9, 4 logical CPUs. Use 4 stages"):
        models.stage_devices(wanted)
    wanted = config(tmp_path, strategy="one_device", pipeline_stages=9, logical_cpus=0)
    with pytest.raises(RuntimeError, match=r"pipeline_stages=9, \d GPUs"):
        loop.train_and_evaluate(wanted)


def slow_data():
    """Stands for data that take minutes to load."""
    raise Killed


def test_a_model_function_that_is_missing_is_told_before_data_are_loaded():
    settings = {"strategy": "one_device", "dataset": "test_train:slow_data"}
    with pytest.raises(ValueError, match="name a function of its module.*'test_train:confg'"):
        loop.train_and_evaluate(TrainConfig(model="test_train:confg", **settings))
    with pytest.raises(Killed):
        loop.train_and_evaluate(TrainConfig(model="test_train:config", **settings))


@pytest.mark.slow
def test_the_batch_size_is_found_with_stages_on_devices():
    done = run(
        *("--logical_cpus=2", "--pipeline_stages=2", "--epochs=1"),
        *("--per_replica_batch_size=auto", "--memory_limit=4GB", "--model=mlp"),
    )
    assert done.returncode == 0, done.stderr
    assert "fits in" in done.stdout and "in stages on CPU:0, CPU:1" in done.stdout


@pytest.mark.slow
def test_the_audit_is_told(tmp_path):
    lines = []
    loop.train_and_evaluate(config(tmp_path, audit_shards=True), print_fn=lines.append)
    assert lines[0] == "mirrored on CPU:0, CPU:1 (as requested): 2 replicas, global batch size 64"
    shards = [line for line in lines if line.startswith("shards of epoch")]
    assert [line.split(":")[0] for line in shards] == ["shards of epoch 0", "shards of epoch 1"]
    assert all(line.endswith("each row once") for line in shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype_policy": "mixed_float16"},
        {"dtype_policy": "mixed_bfloat16"},
        {"gradient_accumulation_steps": 2, "steps_per_execution": 4},
        {"optimizer": "momentum", "learning_rate_scaling": "linear", "warmup_epochs": 1.0},
        {"remainder": "pad", "steps_per_epoch": 30},
        {"model": "mlp", "remainder": "repeat_first", "per_replica_batch_size": 20},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_flags_that_change_training_train(tmp_path, settings):
    result = loop.train_and_evaluate(config(tmp_path, **settings), print_fn=lambda line: None)
    assert np.isfinite(result["metrics"]["loss"])
    assert result["metrics"]["val_accuracy"] > 0.3


class Killed(Exception):
    """Stands for a process that ends at once."""


@pytest.mark.slow
def test_the_result_counts_the_whole_run_however_often_it_was_started(tmp_path):
    settings = {"epochs": 3, "checkpoint_steps": 7, "global_batch_size": 100}

    def kill(line):
        if line.startswith("Epoch 2/3"):
            raise Killed

    with pytest.raises(Killed):
        loop.train_and_evaluate(config(tmp_path, **settings), kill)
    told = []
    result = loop.train_and_evaluate(config(tmp_path, **settings), told.append)
    assert any("resumed at step 28" in line for line in told)
    assert (result["steps"], result["examples"], result["epochs"]) == (45, 3 * 1437, 3)
    assert result["resumed_step"] == 28


def test_the_table_tells_the_steps_of_the_whole_run_from_those_of_the_last_start():
    result = {"steps": 1138, "seconds": 7.84, "resumed_step": 0, "restarts": 0}
    assert command._show_steps(result) == {"steps": "1,138 in 7.8 s"}
    result |= {"resumed_step": 85, "restarts": 1}
    text = "1,138, of which 1,053 in 7.8 s since the last start"
    assert command._show_steps(result) == {"steps": text, "restarts": 1}


@pytest.mark.slow
def test_the_result_has_the_learning_rate_with_which_a_resumed_run_began(tmp_path):
    settings = {"checkpoint_steps": 1, "steps_per_epoch": 2, "learning_rate_scaling": "none"}

    def kill(line):
        if line.startswith("Epoch 1/2"):
            raise Killed

    with pytest.raises(Killed):
        loop.train_and_evaluate(config(tmp_path, learning_rate=0.01, **settings), kill)
    told = []
    result = loop.train_and_evaluate(config(tmp_path, learning_rate=0.02, **settings), told.append)
    assert any("learning rate 0.01 is used, and not 0.02" in line for line in told)
    assert result["learning_rate"] == 0.01


USERS_CODE = """
import keras, numpy as np

def data():
    x = np.random.RandomState(0).randn(30, 4).astype("float32")
    return (x, x.sum(1)), (x[:10], x[:10].sum(1))

def model(train):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model

def nothing(train):
    return None
"""


@pytest.mark.slow
def test_only_deterministic_operations_are_used_where_asked():
    done = run("--strategy=mirrored", "--deterministic", "--epochs=1", "--steps_per_epoch=2")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_users_compiled_model_and_data(tmp_path):
    (tmp_path / "theirs.py").write_text(USERS_CODE)
    flags = ["--strategy=mirrored", "--logical_cpus=2", "--model=theirs:model", "--epochs=2"]
    done = run(*flags, "--dataset=theirs:data", "--workdir=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())["metrics"]
    assert set(metrics) == {"loss", "mae", "val_loss", "val_mae"}
    done = run(*flags, "--dataset=theirs:data", "--optimizer=adam", cwd=tmp_path)
    assert done.returncode == command_line.ERROR
    assert "`optimizer` sets the optimizer of a model that is not compiled" in done.stderr
    done = run("--model=theirs:nothing", "--dataset=theirs:data", cwd=tmp_path)
    assert done.returncode == command_line.ERROR
    assert "which returned NoneType" in done.stderr
