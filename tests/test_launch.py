"""The launcher: who fails first is told, all are restarted or ended, nothing is left behind."""

import contextlib
import io
import json
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
import uuid
from pathlib import Path

import pytest

from tfmulti import rendezvous
from tfmulti.cluster import Cluster, environment
from tfmulti.launch import __main__ as command
from tfmulti.launch import job, logs, restarts, terminal
from tfmulti.launch.config import LaunchConfig, part_of, read_hosts, tf_configs_here, variables_of
from tfmulti.launch.pmi import ProcessManager
from tfmulti.runtime import memory
from tfmulti.runtime.processes import free_ports

PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
restarts = int(os.environ["TFMULTI_RESTARTS"])
def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.01)
def step():
    Path(os.environ["TFMULTI_PROGRESS"]).touch()
"""
FOREVER = "time.sleep(600)"


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras, which takes longer than most tests here."""


def worker(code):
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]


class Launched:
    """A launcher in a process of its own, and the mark of all that it starts."""

    def __init__(self, *arguments, env=None, **options):
        self.mark = f"TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfmulti.launch", *map(str, arguments)],
            env={**os.environ, **(env or {}), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def wait_for_line(self, words):
        for line in self.process.stdout:
            if words in line:
                return line
        pytest.fail(f"no line with {words}: {self.process.stderr.read()}")

    def finish(self):
        """Returns the exit code and what was written; nothing may be left behind."""
        stdout, stderr = self.process.communicate(timeout=60)
        assert not self.left()
        return self.process.returncode, stdout, stderr

    def left(self):
        """The processes with the mark: all that the launcher has started, however deep."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def wait_for_lines(self, words, count):
        for _ in range(count):
            self.wait_for_line(words)


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(*arguments, env=None, **options):
        env = {"TMPDIR": str(tmp_path), **(env or {})}
        started.append(Launched(*arguments, env=env, **options))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()


@pytest.fixture
def run(launch):
    return lambda *arguments, **options: launch(*arguments, **options).finish()


@pytest.fixture
def run_job(monkeypatch, tmp_path):
    """Runs a job in this process, with short waits; returns the exit code and what was told."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(job, "CAUSE_WAIT_S", 1.0)

    def run(code, **settings):
        config = LaunchConfig(**{"num_workers": 2, "log_dir": str(tmp_path / "logs"), **settings})
        told = []
        return job.Job(config, worker(code), told.append).run(), "\n".join(told)

    return run


def test_each_worker_knows_who_it_is_and_the_chief_is_shown(run, tmp_path):
    code = """
        names = ("TFMULTI_TOKEN", "TFMULTI_PROGRESS", "TFMULTI_START_TIMEOUT")
        print(json.dumps([config, restarts, *(os.environ[name] for name in names)]))
        print("no line end", end="")
    """
    flags = ["--num_workers=3", "--start_timeout=7", f"--log_dir={tmp_path}"]
    done, stdout, stderr = run(*flags, "--", *worker(code))
    assert (done, stderr) == (0, "")
    texts = [(tmp_path / f"worker_{index}.log").read_text() for index in range(3)]
    said = [json.loads(text.splitlines()[0]) for text in texts]
    assert stdout == "".join(f"[worker 0] {line}\n" for line in texts[0].splitlines())
    assert [each[0]["task"]["index"] for each in said] == [0, 1, 2]
    assert len({json.dumps(each[0]["cluster"]) for each in said}) == 1
    assert len(set(said[0][0]["cluster"]["worker"])) == 3
    assert len({each[2] for each in said}) == 1 and len(said[0][2]) == 64
    assert len({each[3] for each in said}) == 3
    assert {(each[1], each[4]) for each in said} == {(0, "7.0")}


@pytest.mark.parametrize(("given", "expected"), [(None, "3"), ("0", "0")])
def test_tensorflow_is_quiet_unless_asked_for(run, monkeypatch, given, expected):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if given is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", given)
    code = 'print(os.environ["TF_CPP_MIN_LOG_LEVEL"])'
    done, stdout, _ = run("--num_workers=1", "--", *worker(code))
    assert (done, stdout) == (0, f"[worker 0] {expected}\n")


def test_all_output_of_all_workers_whatever_it_is(run):
    code = 'sys.stdout.buffer.write(b"\\xff" * 100_000 + b"\\n"); print("ok", file=sys.stderr)'
    flags = ["--num_workers=2", "--all_output"]
    done, stdout, stderr = run(*flags, "--", *worker(code), errors="replace")
    assert (done, stderr) == (0, "")
    for index in range(2):
        assert f"[worker {index}] ok\n" in stdout
        assert f"[worker {index}] " + "\ufffd" * 100_000 in stdout


def test_the_first_failure_is_told_with_its_traceback_and_all_end(run):
    code = f"""
        if index == 1:
            raise ValueError("bad record")
        {FOREVER}
    """
    done, stdout, stderr = run("--num_workers=3", "--", *worker(code))
    assert done == 1
    assert re.match(r"worker 1 failed with exit code 1 after \d+\.\d s \(log: ", stderr)
    assert "[worker 1] Traceback (most recent call last):" in stderr
    assert "[worker 1] ValueError: bad record\n" in stderr
    folder = Path(re.search("The logs of all workers are in (.*)", stderr)[1])
    assert (folder / "worker_1.log").read_text().endswith("ValueError: bad record\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal_is_told_by_name(run_job, number):
    code = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if index:
            os.kill(os.getpid(), {int(number)})
        {FOREVER}
    """
    done, told = run_job(code)
    assert done == 128 + number
    assert f"worker 1 was ended by {number.name} after" in told


def test_who_lost_a_peer_is_not_the_first(run_job, tmp_path):
    code = f"""
        path = {str(tmp_path / "gone")!r}
        if index == 0:
            Path(path).touch()
            sys.exit({environment.PEER_LOST})
        wait_for(path)
        sys.exit("error: the cause")
    """
    done, told = run_job(code)
    assert done == 1
    assert "worker 1 failed with exit code 1" in told and "error: the cause" in told
    assert "worker 0" not in told


def test_who_ended_early_is_told(run_job, tmp_path):
    code = f"""
        path = {str(tmp_path / "ended")!r}
        if index == 1:
            Path(path).touch()
            sys.exit(0)
        wait_for(path)
        time.sleep(2)
        sys.exit({environment.PEER_LOST})
    """
    done, told = run_job(code)
    assert done == environment.PEER_LOST
    assert "worker 1 exited early with code 0" in told


def test_a_peer_that_hangs_is_not_waited_for(run_job):
    code = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if index == 0:
            sys.exit({environment.PEER_LOST})
        {FOREVER}
    """
    done, told = run_job(code, grace=0.2)
    assert done == environment.PEER_LOST and "worker 0 failed with exit code 144" in told
    assert "No worker failed by itself; still running: worker 1" in told


def test_restarts_have_fresh_ports_and_a_fresh_token(run_job, tmp_path):
    code = f"""
        text = json.dumps([config["cluster"], os.environ["TFMULTI_TOKEN"]])
        Path({str(tmp_path)!r}, f"{{restarts}}_{{index}}").write_text(text)
        print("start", restarts)
        if index == 1 and restarts < 2:
            wait_for(Path({str(tmp_path)!r}, f"{{restarts}}_0"))
            sys.exit(9)
        if restarts < 2:
            {FOREVER}
    """
    done, told = run_job(code, max_restarts=2)
    assert done == 0
    assert "Restart 1 (of 2) of all workers in 0.01 s" in told
    assert "Restart 2 (of 2) of all workers in 0.02 s" in told
    said = [[(tmp_path / f"{r}_{i}").read_text() for i in range(2)] for r in range(3)]
    assert all(first == second for first, second in said)
    tokens = {json.loads(first)[1] for first, _ in said}
    ports = {address for first, _ in said for address in json.loads(first)[0]["worker"]}
    assert (len(tokens), len(ports)) == (3, 6)
    log = (tmp_path / "logs" / "worker_1.log").read_text()
    assert log == "start 0\n--- restart 1 ---\nstart 1\n--- restart 2 ---\nstart 2\n"


def test_a_job_that_was_preempted_a_thousand_times_is_restarted_again(tmp_path):
    counted = restarts.Restarts(0, print)
    counted.total = 5000
    (tmp_path / "0").touch()
    preempted = logs.WorkerExit(0, environment.PREEMPTED, 1.0)
    assert counted.delay_of_all(preempted, tmp_path) == 30.0


@pytest.mark.parametrize("code", [-signal.SIGTERM, environment.PREEMPTED])
def test_a_worker_that_ends_at_each_start_is_not_restarted_for_ever(tmp_path, code):
    """With servers a worker is restarted alone: the steps that the chief has done are not its."""
    (tmp_path / "worker_0").touch()
    told = []
    counted = restarts.Restarts(3, told.append)
    at_start, preempted = (logs.WorkerExit(1, code, seconds) for seconds in (0.1, 600.0))
    delays = [
        counted.delay_of_one(each, "worker 1", tmp_path)
        for each in (at_start, at_start, preempted, preempted, at_start, at_start)
    ]
    assert delays == [1.0, 2.0, 1.0, 1.0, 1.0, None]
    numbers = [re.search(r"Restart (.*\)) of", line)[1] for line in told]
    preempted = [f"{number} (preempted, not counted)" for number in (3, 4)]
    assert numbers == ["1 (of 3)", "2 (of 3)", *preempted, "3 (of 3)"]


def test_restarts_are_bounded(run_job):
    done, told = run_job("sys.exit(9)", max_restarts=2)
    assert done == 9
    assert told.count("failed with exit code 9") == 3


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_before_the_first_step_is_not_repeated(run_job, code):
    done, told = run_job(f"sys.exit({code})", max_restarts=3)
    assert done == code
    assert told.count("failed with") == 1
    assert "Not restarted: it failed before the first training step." in told
    assert "a custom loop must create the file that TFMULTI_PROGRESS names" in told


def test_an_error_after_a_step_is(run_job, tmp_path):
    code = f"""
        path = {str(tmp_path / "stepped")!r}
        if index == 0:
            step()
            Path(path).touch()
        wait_for(path)
        sys.exit(0 if restarts else 1)
    """
    done, told = run_job(code, max_restarts=1)
    assert done == 0 and told.count("failed with exit code 1") == 1


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGTERM)", "sys.exit(143)"])
@pytest.mark.parametrize("steps", [False, True])
def test_a_preemption_counts_unless_a_step_was_done(run_job, steps, end):
    """With nothing saved, a job that gets no further would be restarted for ever."""
    code = f"""
        if restarts < 2:
            {"step()" if steps else "pass"}
            {end}
    """
    done, told = run_job(code, num_workers=1)
    assert done == (0 if steps else 128 + signal.SIGTERM)
    assert told.count("(preempted, not counted)") == (2 if steps else 0)


def test_a_signal_after_the_chief_of_servers_has_ended_well_is_no_failure(monkeypatch):
    config = LaunchConfig(num_workers=1, num_ps=1)
    watch = job._Watch(job.Job(config, ["true"], print), None, range(3))
    watch._ended = [logs.WorkerExit(0, 0, 1.0), logs.WorkerExit(2, -signal.SIGKILL, 1.0)]
    watch._running, watch._signalled = set(), int(signal.SIGTERM)
    monkeypatch.setattr(watch._job, "next_event", lambda wait_s: None)
    outcome = watch.run()
    assert (outcome.first, outcome.signalled) == (None, None)


def test_a_preempted_worker_does_not_count(run_job):
    code = f"""
        if restarts < 3 and index == 1:
            step()
            sys.exit({environment.PREEMPTED})
        if restarts < 3:
            {FOREVER}
    """
    done, told = run_job(code)
    assert done == 0
    assert told.count("(preempted, not counted)") == 3


READY = """
def end(number, _):
    print("saved on", signal.Signals(number).name)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("ready")
time.sleep(600)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_are_no_failure(launch, number):
    flags = ["--num_workers=2", "--max_restarts=5", "--all_output"]
    launched = launch(*flags, "--", *worker(READY))
    launched.wait_for_lines("ready", 2)
    launched.process.send_signal(number)
    done, stdout, stderr = launched.finish()
    assert done == 128 + number
    assert sorted(stdout.splitlines()) == [f"[worker {i}] saved on {number.name}" for i in (0, 1)]
    assert "failed" not in stderr and "Restart" not in stderr


SAVES = """
told = []
signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
print("ready", os.getpid())
while not told:
    time.sleep(0.01)
print("saving")
wait_for(sys.argv[1])
print("saved, told", len(told))
sys.exit(143)
"""


def test_one_end_that_is_told_with_several_signals_leaves_time_to_save(launch, tmp_path):
    """As when systemd or logind ends a job: each process gets SIGTERM, SIGHUP or both."""
    hear_all = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    go_on = tmp_path / "go on"
    launched = launch("--num_workers=1", "--", *worker(SAVES), str(go_on), preexec_fn=hear_all)
    program = int(launched.wait_for_line("ready").split()[-1])
    guards = set(launched.left()) - {program, launched.process.pid}
    launched.process.terminate()
    launched.wait_for_line("saving")
    for pid in guards:
        os.kill(pid, signal.SIGTERM)
    for pid in (launched.process.pid, *guards, program):
        os.kill(pid, signal.SIGHUP)
    # Both have been heard once each has passed on, or not, what came last.
    time.sleep(0.3)
    go_on.touch()
    done, stdout, _ = launched.finish()
    assert (done, stdout) == (143, "[worker 0] saved, told 1\n")


# A program that a shell has started without `exec`, with a child that loads data.
IN_A_SHELL = """
import signal, subprocess, sys, time
told = []
for number in map(int, sys.argv[1].split(",")):
    signal.signal(number, lambda number, _: told.append(number))
child = subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
while not told:
    time.sleep(0.01)
# As long as a checkpoint takes: what comes meanwhile is heard.
time.sleep(1)
print("saved, told", *told, "child", child.poll(), flush=True)
sys.exit(143)
"""


@pytest.fixture
def launch_script(launch, tmp_path):
    def start(shell, lines, *flags):
        (tmp_path / "program.py").write_text(IN_A_SHELL)
        program = f"{sys.executable} {tmp_path / 'program.py'}"
        (tmp_path / "train.sh").write_text(lines.format(program=program))
        launched = launch("--num_workers=1", *flags, "--", shell, tmp_path / "train.sh")
        launched.wait_for_line("ready")
        return launched

    return start


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_program_that_a_shell_has_started_saves_after_sigterm_too(launch_script, shell):
    launched = launch_script(shell, "{program} 15\necho not reached\n")
    launched.process.terminate()
    done, stdout, _ = launched.finish()
    assert (done, stdout) == (143, "[worker 0] saved, told 15 child None\n")


def test_so_does_one_in_a_shell_within_a_shell(launch_script):
    launched = launch_script("sh", "sh -c '{program} 15; echo not reached'\necho nor here\n")
    launched.process.terminate()
    done, stdout, _ = launched.finish()
    assert (done, stdout) == (143, "[worker 0] saved, told 15 child None\n")


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_ctrl_c_reaches_the_program_in_a_shell_once(launch_script, shell):
    """And its children, as on a terminal."""
    launched = launch_script(shell, "{program} 2\nexit 3\n")
    launched.process.send_signal(signal.SIGINT)
    done, stdout, _ = launched.finish()
    # bash waits for its program, and dash is ended.
    assert (done, stdout) == (130, "[worker 0] saved, told 2 child -2\n")


def test_a_program_in_the_background_hears_of_ctrl_c_by_sigterm(launch_script):
    launched = launch_script("bash", "{program} 15 &\nwait\n")
    launched.process.send_signal(signal.SIGINT)
    done, stdout, _ = launched.finish()
    assert (done, stdout) == (130, "[worker 0] saved, told 15 child None\n")


def test_what_a_shell_leaves_has_no_more_than_the_grace_period(launch_script):
    lines = "trap '' TERM\n{program} 2 &\ntrap - TERM\nwait\n"
    launched = launch_script("bash", lines, "--grace=0.5")
    launched.process.terminate()
    done, stdout, _ = launched.finish()
    assert (done, stdout) == (143, "")


def test_the_same_signal_later_means_at_once(monkeypatch):
    sent, now = [], [100.0]
    monkeypatch.setattr(job, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    group = types.SimpleNamespace(send=sent.append)
    watch = job._Watch(job.Job(LaunchConfig(num_workers=1, grace=30.0), ["true"]), group, [0])
    for number, seconds, end in (
        (signal.SIGHUP, 0.0, 130.0),
        (signal.SIGTERM, 0.1, 130.0),
        (signal.SIGTERM, 0.5, 130.0),
        (signal.SIGINT, 5.0, 130.0),
        (signal.SIGTERM, 6.0, 106.0),
    ):
        now[0] = 100.0 + seconds
        watch._pass_on(number)
        assert watch._kill_at == end
    assert sent == [signal.SIGTERM]


CANNOT_KILL = """
import os, sys
from tfmulti.launch import supervisor
# As for a process of another user.
supervisor._send, supervisor._KILL_S = lambda *_: None, 0.2
sys.exit(supervisor.main(os.pipe()[0], sys.argv[1:]))
"""


def test_what_may_not_be_killed_is_named_and_not_waited_for():
    command = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & exit 5"]
    done = subprocess.run(
        [sys.executable, "-c", CANNOT_KILL, *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 5
    [left] = re.fullmatch(r".* not killed in 0.2 s: (\d+)\.\n", done.stderr).groups()
    os.kill(int(left), signal.SIGKILL)


def test_temporary_folders_of_workers_are_removed_and_are_no_progress(launch, tmp_path):
    code = """
    folder = Path(os.environ["TFMULTI_PROGRESS"]).parent / "model"
    folder.mkdir()
    Path(NOTE).write_text(str(folder))
    sys.exit(1)
    """
    code = code.replace("NOTE", repr(str(tmp_path / "note")))
    launched = launch("--num_workers=1", "--max_restarts=2", "--", *worker(code))
    done, _, stderr = launched.finish()
    assert done == 1 and "Not restarted: it failed before the first training step." in stderr
    assert not Path((tmp_path / "note").read_text()).exists()


def test_workers_without_a_handler_end_too(launch):
    launched = launch("--num_workers=2", "--", *worker(f'print("ready")\n{FOREVER}'))
    launched.wait_for_line("ready")
    launched.process.terminate()
    assert launched.finish()[0] == 143


def test_a_signal_between_restarts_ends_the_job(launch):
    flags = ["--num_workers=1", "--max_restarts=5"]
    launched = launch(*flags, "--", *worker("sys.exit(9)"))
    for line in launched.process.stderr:
        if "Restart 2 " in line:
            break
    launched.process.terminate()
    assert launched.finish()[0] == 143


# A worker with a child in its session and one in a session of its own; none wants to end.
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
    "print('born', flush=True); time.sleep(600)"
for apart in (False, True):
    started = subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=apart
    )
    started.stdout.readline()
print("ready")
"""


def test_who_does_not_end_is_killed_with_all_its_children(launch):
    flags = ["--num_workers=2", "--grace=0.3", "--all_output"]
    launched = launch(*flags, "--", *worker(STUBBORN + FOREVER))
    launched.wait_for_lines("ready", 2)
    # The launcher, and for each worker: its guard, itself, and two children.
    assert len(launched.left()) == 9
    launched.process.terminate()
    done, _, told = launched.finish()
    # What it may not have saved is told.
    assert done == 143 and told.count("was ended by SIGKILL") == 2


def test_nothing_is_left_when_the_launcher_is_killed(launch):
    launched = launch("--num_workers=2", "--all_output", "--", *worker(STUBBORN + FOREVER))
    launched.wait_for_lines("ready", 2)
    launched.process.kill()
    limit = time.monotonic() + 30
    while launched.left():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_nothing_is_left_of_a_worker_that_is_done(run):
    assert run("--num_workers=2", "--", *worker(STUBBORN))[0] == 0


def test_what_a_failed_worker_has_started_is_ended_too(run):
    code = STUBBORN + f"if index: sys.exit(5)\n{FOREVER}"
    assert run("--num_workers=2", "--grace=0.3", "--", *worker(code))[0] == 5


def test_under_nohup_the_end_of_the_terminal_is_not_heard(launch):
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launched = launch("--num_workers=1", "--", *worker(READY), preexec_fn=ignore)
    launched.wait_for_line("ready")
    launched.process.send_signal(signal.SIGHUP)
    launched.process.terminate()
    _, stdout, _ = launched.finish()
    assert stdout == "[worker 0] saved on SIGTERM\n"


def test_who_reads_may_go(launch):
    code = 'for _ in range(1000): print("x" * 1000)\nPath(sys.argv[1]).touch()'
    launched = launch("--num_workers=1", "--", *worker(code), os.devnull)
    launched.process.stdout.close()
    assert launched.process.wait(60) == 0


def test_a_job_is_restarted_also_where_nobody_reads_what_the_launcher_says():
    code = "sys.exit(0 if restarts else 9)"
    command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=1", "--max_restarts=1", "--"]
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run([*command, *worker(code)], stderr=writes, timeout=60)
    os.close(writes)
    assert ended.returncode == 0


def test_a_command_that_is_not_there(tmp_path):
    config = LaunchConfig(num_workers=2, log_dir=str(tmp_path), max_restarts=3)
    told, started = [], job.Job(config, ["no-such-program"], lambda line: told.append(line))
    assert started.run() == 127 and started.restarts == 0
    assert "Received: no-such-program: No such file or directory." in "\n".join(told)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "must follow after `--`. Received: no command."),
        (
            ["--num_workers=2", "python"],
            "flags only. Received: python. Write flags, `--` and the command",
        ),
        (["--num_workers=2", "--"], "must follow after `--`"),
        (["--num_worker=2", "--", "true"], "Unknown command line flag 'num_worker'"),
        (["--num_workers=0", "--", "true"], "`num_workers` must be at least 1"),
        (["--", "true"], "Either `num_workers` (on this machine) or `hosts`"),
        (["--num_workers=2", "--hosts=x", "--", "true"], "hosts=x. Use for example"),
        (
            ["--num_workers=2", "--host_index=0", "--", "true"],
            "`host_index` can be used with hosts",
        ),
        (
            ["--num_workers=2", "--base_port=5000", "--", "true"],
            "`base_port` can be used with hosts",
        ),
        (["--hosts=/no/such", "--", "true"], "`hosts` must be a file of text. Received: /no/such"),
    ],
)
def test_bad_usage_exits_2(arguments, words, capsys):
    assert command.main(["launch", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_help_tells_every_flag_with_its_default(run):
    done, stdout, _ = run("--help")
    assert done == 0
    assert stdout.count("default: ") == len(LaunchConfig.__dataclass_fields__)


def test_a_hosts_file_gives_every_host_the_same_cluster(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two machines\n10.0.0.1 slots=2\n\n[fd00::2]:5000 slots=2 # more\nthird\n")
    config = LaunchConfig(hosts=str(path))
    expected = [["10.0.0.1:2222", "10.0.0.1:2223"], ["[fd00::2]:5000", "[fd00::2]:5001"]]
    assert read_hosts(str(path), 2222) == [*expected, ["third:2222"]]
    found = {}
    for index, variable in enumerate(("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        found |= tf_configs_here(config, {variable: str(index)})
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert len({json.dumps(json.loads(text)["cluster"]) for text in found.values()}) == 1
    config = LaunchConfig(hosts=str(path), host_index=2, base_port=7)
    assert list(tf_configs_here(config, {"SLURM_NODEID": "0"})) == [4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must name at least one host"),
        ("a\na:2222", "each address once. Received: {path} with a:2222"),
        ("a slots=0", "must be `host[:port] [slots=N]`. Received: {path}, line 1: a slots=0."),
        ("a\nb 2 3", "{path}, line 2: b 2 3"),
        ("a:65535 slots=2", "must have a port from 1 to 65535"),
        ("0.0.0.0", "must name a host that the other workers can reach"),
        ("a\nb", "`host_index` must say which line of `hosts` this is, from 0 to 1"),
    ],
)
def test_a_wrong_hosts_file_is_told_with_its_line(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        tf_configs_here(LaunchConfig(hosts=str(path)), {})
    assert words.format(path=path) in str(caught.value)


def test_two_hosts_train_together(launch, tmp_path):
    """Two launchers on this machine, as on two: their workers come together."""
    path = tmp_path / "hosts"
    first, second = free_ports(2)
    path.write_text(f"127.0.0.1:{first}\n127.0.0.1:{second}\n")
    code = """
        from tfmulti import cluster, rendezvous
        said = rendezvous.join(cluster.resolve_cluster(), timeout_s=20)
        print("met", len(said), index)
    """
    started = [
        launch(
            f"--hosts={path}",
            "--all_output",
            "--",
            *worker(code),
            env={"JOB_COMPLETION_INDEX": str(index), "TFMULTI_TOKEN": "of this test"},
        )
        for index in range(2)
    ]
    for index, launched in enumerate(started):
        assert launched.finish() == (0, f"[worker {index}] met 2 {index}\n", "")


@pytest.mark.parametrize("change", ["write_text('127.0.0.1:7 slots=2')", "unlink()"])
def test_a_hosts_file_that_changes_does_not_change_the_job(run_job, tmp_path, change):
    path = tmp_path / "hosts"
    path.write_text(f"127.0.0.1:{free_ports(1)[0]}\n")
    code = f"""
        print(config["cluster"])
        if not restarts:
            Path({str(path)!r}).{change}
            sys.exit(9)
    """
    done, told = run_job(code, num_workers=None, hosts=str(path), max_restarts=1)
    assert done == 0
    assert f"{path} has changed. The job continues with the hosts that it began with" in told
    first, _, again = (tmp_path / "logs" / "worker_0.log").read_text().splitlines()
    assert first == again


TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    fit()
    ^^^^^
ValueError: bad error: record
more of the message
"""


# AutoGraph's code has no indent.
OF_GENERATED = TRACEBACK.replace(
    "    ^^^^^\n", "^^^^^\n" + '  File "b.py", line 2, in f\n    g()\n' * 7
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        (OF_GENERATED, OF_GENERATED.strip()),
        ("a\nb", "a\nb"),
        (f"Epoch 1\n{TRACEBACK}", TRACEBACK.strip()),
        (f"{TRACEBACK}E1234 heartbeat\n2026-01-01 00:00 lost\n", TRACEBACK.strip()),
        (f"{TRACEBACK}\nDuring handling\n\n{TRACEBACK}", TRACEBACK.strip()),
        (TRACEBACK + "x\n" * 12 + "error: later\n\nmore\n\n", "error: later\n\nmore"),
        ("x.py: error: no flag\n", "x.py: error: no flag"),
        ("1\n2\n3\n4\n5\n6\n", "2\n3\n4\n5\n6"),
    ],
)
def test_the_tail_of_a_log_is_its_last_error(text, words):
    assert logs.log_tail(text) == words


def test_events_of_signals_come_in_order():
    from tfmulti.launch.group import signals_as_events

    events, before = queue.SimpleQueue(), signal.getsignal(signal.SIGTERM)
    # A shell has what it runs in the background ignore SIGINT.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    with signals_as_events(events):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGINT, interrupts)
    assert [events.get_nowait(), events.get_nowait()] == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


def train(cluster, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "tfmulti.train", "--strategy=multi_worker", *flags],
        env={**os.environ, "TF_CONFIG": cluster.to_json(), "TFMULTI_TOKEN": "of this test"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def pair():
    spec = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    return [Cluster(spec, "worker", index) for index in range(2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_worker_that_is_missing_is_named_by_train(pair, missing):
    process = train(pair[1 - missing], "--start_timeout=1")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert f"had not connected: worker {missing} at {pair[missing].address}" in stderr


@pytest.mark.slow
def test_settings_that_differ_are_named_by_train(pair):
    process = train(pair[0], "--epochs=3")
    with pytest.raises(
        rendezvous.RendezvousError, match="--epochs is 3 on worker 0, but 4 on worker 1"
    ):
        rendezvous.join(pair[1], {"--epochs": 4}, timeout_s=100, token="of this test")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "--epochs is 3 on worker 0, but 4 on worker 1" in stderr


@pytest.mark.parametrize("level, shown", [(None, False), ("0", True)])
def test_lines_of_tensorflows_runtime_stay_in_the_file_unless_asked_for(
    tmp_path, monkeypatch, level, shown
):
    if level is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    line = "E0000 00:00:1795335027.548115 1 collective.cc:8] BaseCollectiveExecutor::StartAbort"
    terminal = io.BytesIO()
    log = logs.Log(tmp_path / "log", "worker 0", True, terminal)
    with log.open_for_worker() as file:
        file.write(f"before\n{line}\nEnd of it\n".encode())
    log.show_rest()
    log.close()
    assert (line in terminal.getvalue().decode()) == shown
    assert b"[worker 0] before\n" in terminal.getvalue() and b"End of it" in terminal.getvalue()
    assert line in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_log_folder_that_is_used_again_keeps_what_is_in_it(run, tmp_path):
    def start(code):
        flags = ["--num_workers=1", "--max_restarts=1", f"--log_dir={tmp_path}"]
        return run(*flags, "--", *worker(code))

    crash = """
        print("Traceback (most recent call last):\\n  the cause", end="")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert start(crash)[0] == 137
    # What is told of the second is its own.
    done, stdout, stderr = start("os.kill(os.getpid(), signal.SIGKILL)")
    assert (done, stdout) == (137, "[worker 0] --- restart 1 ---\n")
    assert "was ended by SIGKILL" in stderr and "Traceback" not in stderr
    assert start("print('third')") == (0, "[worker 0] third\n", "")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", "TIME", read_log(tmp_path))
    cause = "Traceback (most recent call last):\n  the cause\n"
    assert text == (
        f"{cause}--- restart 1 ---\n{cause}"
        "--- start 2 of the launcher, TIME ---\n--- restart 1 ---\n"
        "--- start 3 of the launcher, TIME ---\nthird\n"
    )


def read_log(folder):
    return (folder / "worker_0.log").read_text()


def test_a_log_folder_of_a_launcher_that_runs_is_refused(launch, run, tmp_path):
    flags = ["--num_workers=1", f"--log_dir={tmp_path}", "--"]
    first = launch(*flags, *worker(READY))
    first.wait_for_line("ready")
    done, _, stderr = run(*flags, "true")
    assert done == 2
    path = tmp_path / "worker_0.log"
    assert f"Received: {path}, to which another one writes now. Use another" in stderr
    first.process.terminate()
    assert first.finish()[0] == 143
    assert read_log(tmp_path) == "ready\nsaved on SIGTERM\n"
    assert run(*flags, "true")[0] == 0


class Picture:
    """Keras's progress bar, as it writes itself: over and over again within one line."""

    def __init__(self, log):
        self.log, self.file = log, log.open_for_worker()

    def draw(self, words, end=""):
        self.file.write(("\b" * 9 + "\r" + words + end).encode())
        self.file.flush()
        self.log.show_new()


def test_a_progress_bar_is_shown_while_it_grows_and_is_not_kept(tmp_path, monkeypatch):
    terminal, times = io.BytesIO(), iter(range(1_000_000))
    clock = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(logs, "time", clock, raising=False)
    monkeypatch.setattr(logs, "_BAR_S", 100, raising=False)
    log = logs.Log(tmp_path / "log", "worker 0", True, terminal)
    bar = Picture(log)
    for step in range(1, 1000):
        bar.draw(f"{step}/1000")
        assert len(log._rest) < 30
    shown = terminal.getvalue().decode().splitlines()
    assert 5 < len(shown) < 20 and all(line.endswith("/1000") for line in shown)
    assert shown[0] == "[worker 0] 1/1000" and len(set(shown)) == len(shown)
    bar.draw("1000/1000", end="\nEpoch 2/2\r\nand")
    log.show_rest()
    bar.file.close()
    log.close()
    rest = terminal.getvalue().decode().splitlines()[len(shown) :]
    assert rest == ["[worker 0] 1000/1000", "[worker 0] Epoch 2/2", "[worker 0] and"]


STALLED = """
def end(number, _):
    Path(sys.argv[1], "saved").touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, end)
print("x\\n" * 3_000_000)
Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""


def wait_for_file(path):
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, f"no {path}"
        time.sleep(0.01)


def test_a_reader_that_stops_reading_holds_nothing_up(launch, tmp_path):
    launched = launch("--num_workers=1", "--", *worker(STALLED), tmp_path)
    wait_for_file(tmp_path / "ready")
    launched.process.terminate()
    assert launched.process.wait(30) == 143 and (tmp_path / "saved").exists()
    told = launched.process.stderr.read()
    left_out, folder = re.fullmatch(
        r"Lines of output not shown, since nobody read them: ([\d,]+)\n"
        r"The logs of all workers are in (.*)\n",
        told,
    ).groups()
    shown = launched.process.stdout.read().count("\n")
    assert shown + int(left_out.replace(",", "")) == 3_000_001
    assert (Path(folder) / "worker_0.log").stat().st_size == 6_000_001


@pytest.mark.slow
def test_a_failure_is_told_and_restarted_though_nobody_reads_the_output(launch, tmp_path):
    code = """
        print("x\\n" * 3_000_000)
        if restarts:
            Path(sys.argv[1], "again").touch()
        sys.exit(9)
    """
    launched = launch("--num_workers=1", "--max_restarts=1", "--", *worker(code), tmp_path)
    wait_for_file(tmp_path / "again")
    assert launched.process.wait(30) == 9
    told = launched.process.stderr.read()
    assert told.index("failed with exit code 9") < told.index("Restart 1 (of 1)")


@pytest.mark.slow
def test_nobody_reads_either_of_the_two(launch, tmp_path):
    reads, writes = os.pipe()
    command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=1", "--", *worker(STALLED)]
    started = subprocess.Popen([*command, str(tmp_path)], stdout=writes, stderr=writes)
    os.close(writes)
    wait_for_file(tmp_path / "ready")
    started.terminate()
    try:
        assert started.wait(30) == 143 and (tmp_path / "saved").exists()
    finally:
        started.kill()
        os.close(reads)


def test_a_great_deal_of_output_is_shown_whole_and_in_order(run):
    code = """
        for first in range(0, 200_000, 1000):
            print(*(f"{index} {number}" for number in range(first, first + 1000)), sep="\\n")
        print("end", end="")
    """
    done, stdout, stderr = run("--num_workers=2", "--all_output", "--", *worker(code))
    assert (done, stderr) == (0, "")
    for index in range(2):
        begin = f"[worker {index}] "
        lines = [line for line in stdout.splitlines() if line.startswith(begin)]
        assert lines == [f"{begin}{index} {number}" for number in range(200_000)] + [f"{begin}end"]


@pytest.fixture
def output(monkeypatch):
    """An output whose two files are pipes, and their ends to read from."""
    monkeypatch.setattr(terminal, "STALLED_S", 1.0)
    with contextlib.ExitStack() as stack:
        ends = [os.pipe() for _ in range(2)]
        for name, (_, writes) in zip(("stdout", "stderr"), ends):
            monkeypatch.setattr(sys, name, stack.enter_context(open(writes, "w")))
        files = [stack.enter_context(open(reads, "rb", 0)) for reads, _ in ends]
        # Closed first, which ends a write that nobody reads.
        yield terminal.Output(), *files


def test_what_the_launcher_says_waits_for_lines_before_it_unless_nobody_reads_them(output):
    shown, lines, words = output
    shown.write(b"a\n" * 50_000)
    shown.print_error("told")
    assert not select.select([words], [], [], 0.05)[0]
    assert lines.read(100_000) and words.read(100) == b"told\n"
    shown.write(b"b\n" * 50_000)
    shown.print_error("told again")
    assert words.read(100) == b"told again\n"
    assert shown.drain() > 0


@pytest.mark.slow
def test_lines_that_nobody_reads_are_left_out_and_counted(output):
    shown, lines, _ = output
    while shown.has_room():
        shown.write(b"a\n" * 100_000)
    assert not shown.has_room(60.0)
    shown.write(b"left out\n" * 3)
    while not shown.has_room(1.0):
        lines.read(1 << 16)
    shown.write(b"later\n")
    text = b""
    while not text.endswith(b"later\n"):
        text += lines.read(1 << 16)
    assert text.endswith(b"a\n(3 lines are left out here)\nlater\n")
    assert shown.drain() == 0


SHOW = """
import json, os, sys
names = ["MALLOC_MMAP_MAX_", "TF_CPU_ALLOCATOR_USE_BFC"]
names += ["TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"]
shown = [sorted(os.sched_getaffinity(0)), *(os.environ.get(name) for name in names)]
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
open(f"{sys.argv[1]}/{index}.json", "w").write(json.dumps(shown))
"""


def shown_by_workers(tmp_path, **settings):
    config = LaunchConfig(num_workers=2, log_dir=str(tmp_path), **settings)
    assert job.Job(config, [sys.executable, "-c", SHOW, str(tmp_path)], print).run() == 0
    return [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]


@pytest.fixture
def no_threads(monkeypatch):
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)
    # The tests may run in a container with a quota.
    monkeypatch.setattr(memory, "read_limits", lambda *_: memory.Limits())


@pytest.mark.usefixtures("no_threads")
def test_workers_divide_the_cores_and_keep_their_memory(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    parts = [part_of(cores, place, 2) for place in range(2)]
    threads = [str(len(part)) for part in parts]
    assert shown_by_workers(tmp_path, pin=True) == [
        [part, "0", "true", number, number, str(max(4, len(part)))]
        for part, number in zip(parts, threads)
    ]


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize(
    ("quota", "num_workers", "threads"),
    [(None, 2, 32), (2.0, 2, 1), (2.0, 4, 1), (7.5, 2, 3), (200.0, 2, 32)],
)
def test_threads_keep_within_the_quota_of_a_container(monkeypatch, quota, num_workers, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(memory, "read_limits", lambda *_: memory.Limits(cores=quota))
    settings = LaunchConfig(num_workers=num_workers)
    given = [variables_of(settings, place, num_workers) for place in range(num_workers)]
    assert [each["TF_NUM_INTRAOP_THREADS"] for each in given] == [str(threads)] * num_workers
    # With fewer arenas of malloc, gRPC's threads wait for one another.
    assert [each["MALLOC_ARENA_MAX"] for each in given] == [str(max(4, threads))] * num_workers


@pytest.mark.usefixtures("no_threads")
def test_each_can_be_switched_off(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    shown = shown_by_workers(tmp_path, threads=0, allocator="default")
    assert shown == [[cores, *[None] * 5]] * 2


@pytest.mark.usefixtures("no_threads")
def test_variables_of_the_user_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "false")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    shown = shown_by_workers(tmp_path, threads=3)
    assert [each[1:] for each in shown] == [["0", "false", "3", "7", "4"]] * 2


SHOW_GPUS = 'import os; print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))'


@pytest.mark.parametrize(
    ("visible", "flags", "expected", "told"),
    [
        ("4,5,6,7", ["--num_workers=2"], ["worker 0] gpus 4,5", "worker 1] gpus 6,7"], ""),
        ("4,5", ["--num_workers=1"], ["worker 0] gpus 4,5"], ""),
        ("-1", ["--num_workers=2"], ["worker 0] gpus -1", "worker 1] gpus -1"], ""),
        (
            "4",
            ["--num_workers=2"],
            ["worker 0] gpus -1", "worker 1] gpus -1"],
            "2 workers train on the CPU: two cannot share a GPU, and this host has 1 GPU.",
        ),
        (
            "4",
            ["--num_workers=1", "--num_ps=1"],
            ["chief] gpus -1", "ps 0] gpus -1", "worker 0] gpus 4"],
            "",
        ),
        (
            "4,5,6",
            ["--num_workers=2", "--num_ps=1"],
            ["chief] gpus -1", "ps 0] gpus -1", "worker 0] gpus 4", "worker 1] gpus 5"],
            "",
        ),
        (
            "4",
            ["--num_workers=2", "--num_ps=1"],
            ["chief] gpus -1", "ps 0] gpus -1", "worker 0] gpus 4", "worker 1] gpus 4"],
            "",
        ),
        ("4,4", ["--num_workers=2"], ["worker 0] gpus 4,4", "worker 1] gpus 4,4"], ""),
    ],
)
def test_each_worker_has_gpus_of_its_own(launch, visible, flags, expected, told):
    command = [sys.executable, "-c", SHOW_GPUS]
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    launched = launch(*flags, "--all_output", "--", *command, env=environ)
    code, printed, errors = launched.finish()
    assert code == 0
    shown = [line.lstrip("[") for line in printed.splitlines() if "gpus" in line]
    assert sorted(shown) == expected
    assert told in errors and ("train on the CPU" in errors) == bool(told)


@pytest.mark.parametrize(
    ("visible", "fault"),
    [
        ("0,0", '"0" comes twice, so CUDA gives no GPU at all'),
        ("0,x,1", '"x" names no GPU, so it and all after it are ignored'),
        ("0;1", 'of "0;1" CUDA reads the first number only'),
        *((good, None) for good in ("0,1", "-1", "", "NoDevFiles")),
    ],
)
def test_a_fault_in_the_list_of_gpus_is_told(monkeypatch, tmp_path, visible, fault):
    """CUDA says nothing of it, and the workers would train on the CPU, or on fewer GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = []
    config = LaunchConfig(num_workers=1, log_dir=str(tmp_path))
    assert job.Job(config, ["true"], told.append).run() == 0
    expected = f"Received: CUDA_VISIBLE_DEVICES={visible}: {fault}. Correct it, or unset it"
    assert len(told) == bool(fault) and all(expected in line for line in told)


def test_mpi_goes_with_workers_of_this_machine():
    with pytest.raises(ValueError, match="Received: mpi=True, hosts=hosts.txt"):
        LaunchConfig(hosts="hosts.txt", mpi=True)


@pytest.mark.parametrize("mpi", [False, True])
def test_workers_have_nothing_of_the_mpi_process_that_the_launcher_is(monkeypatch, tmp_path, mpi):
    """As in `srun --pty bash` where PMI-2 is the default: MPI reads PMI_FD before PMI_PORT.

    Or as in `mpiexec -ppn 1 python -m tfmulti.launch --hosts`: a worker would join that MPI job.
    """
    inherited = {"PMI_FD": "13", "PMI_JOBID": "7.0", "PMI_RANK": "0", "PMI_SIZE": "2"}
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    for name, value in {**inherited, **step}.items():
        monkeypatch.setenv(name, value)
    names = ("PMI_FD", "PMI_RANK", "PMI_SIZE")
    code = f"""
        from tfmulti.cluster import mpi
        shown = [*map(os.environ.get, {names!r}), mpi.size_in_environment()]
        print(json.dumps(shown))
    """
    config = LaunchConfig(num_workers=2, log_dir=str(tmp_path), mpi=mpi)
    assert job.Job(config, worker(code)).run() == 0
    shown = [json.loads((tmp_path / f"worker_{index}.log").read_text()) for index in range(2)]
    own = [[None, str(index), "2", 2] for index in range(2)]
    assert shown == (own if mpi else [[None, None, None, 0]] * 2)


class Process:
    """One process of an MPI job, as its library speaks with the process manager."""

    def __init__(self, manager, index):
        variables = manager.variables(index)
        host, port = variables["PMI_PORT"].split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.lines = self.socket.makefile("rw")
        self.number = variables["PMI_ID"]

    def say(self, line):
        self.lines.write(f"{line}\n")
        self.lines.flush()

    def hear(self, number=1):
        return [self.lines.readline().strip() for _ in range(number)]

    def ask(self, line):
        self.say(line)
        return self.hear()[0]


def test_the_process_manager_lets_processes_find_one_another():
    with ProcessManager(2) as manager:
        one, other = (Process(manager, index) for index in range(2))
        for process in (one, other):
            process.say(f"cmd=initack pmiid={process.number}")
            answers = process.hear(4)
            assert answers[1:3] == ["cmd=set size=2", f"cmd=set rank={process.number}"]
        assert one.ask("cmd=init pmi_version=1 pmi_subversion=1").endswith("rc=0")
        assert "(vector,(0,1,2))" in one.ask("cmd=get kvsname=x key=PMI_process_mapping")
        assert "rc=0" in one.ask("cmd=put kvsname=x key=place value=here")
        assert "rc=-1" in other.ask("cmd=get kvsname=x key=nothing")
        assert "rc=-1" in other.ask("cmd=spawn")
        one.say("cmd=barrier_in")
        assert other.ask("cmd=barrier_in") == one.hear()[0] == "cmd=barrier_out rc=0"
        assert "value=here" in other.ask("cmd=get kvsname=x key=place")
        assert one.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
