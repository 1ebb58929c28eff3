"""Processes that end together, with plain Python in them; and how one ends itself."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tfmulti.runtime import processes


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


def is_running(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    # A process that has ended may wait for somebody to ask for its exit code.
    with open(f"/proc/{number}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def assert_ends(number):
    limit = time.monotonic() + 10
    while is_running(number):
        assert time.monotonic() < limit, f"process {number} is left behind"
        time.sleep(0.05)


def test_no_connection_takes_a_port_between_its_choice_and_its_use():
    ports = processes.free_ports(100)
    assert len(set(ports)) == 100
    # Linux gives outgoing connections those from 32768 on, unless it is told otherwise.
    assert max(ports) < 32768


def test_each_worker_has_its_tf_config_and_its_output():
    code = """
        import json, os, sys
        task = json.loads(os.environ["TF_CONFIG"])
        print(task["task"]["index"], len(set(task["cluster"]["worker"])), os.environ["WORD"])
        print("x" * 200_000, file=sys.stderr)
    """
    environments = [{"WORD": "hello", "TF_CONFIG": each} for each in processes.tf_configs(3)]
    done = processes.run_together(python(code), environments)
    assert [each.stdout for each in done] == [f"{n} 3 hello\n" for n in range(3)]
    assert {(each.how, each.returncode, len(each.stderr)) for each in done} == {("done", 0, 200001)}


def test_when_one_fails_the_others_are_ended():
    code = """
        import os, sys, time
        if os.environ["NUMBER"] == "1":
            sys.exit("no")
        time.sleep(600)
    """
    environments = [{"NUMBER": str(number)} for number in range(3)]
    done = processes.run_together(python(code), environments, grace_s=0.5)
    assert [each.how for each in done] == ["ended", "failed", "ended"]
    assert done[1].stderr.strip() == "no"
    assert done[0].returncode == -signal.SIGTERM


def test_the_others_have_time_to_fail_by_themselves():
    code = """
        import os, sys, time
        time.sleep(0.3 * int(os.environ["NUMBER"]))
        sys.exit(f"no {os.environ['NUMBER']}")
    """
    done = processes.run_together(python(code), [{"NUMBER": "0"}, {"NUMBER": "1"}], grace_s=5)
    assert [(each.how, each.stderr.strip()) for each in done] == [
        ("failed", "no 0"),
        ("failed", "no 1"),
    ]


def test_what_does_not_listen_is_killed_and_so_is_what_it_started():
    code = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        other = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        print(subprocess.Popen([sys.executable, "-c", other]).pid, flush=True)
        time.sleep(600)
    """
    [done] = processes.run_together(python(code), [{}], timeout_s=2, grace_s=0.5)
    assert (done.how, done.returncode) == ("timed out", -signal.SIGKILL)
    assert_ends(int(done.stdout))


def test_nothing_is_left_behind_when_the_caller_is_interrupted(monkeypatch):
    started = []

    def interrupt(processes_started, *_):
        started.extend(processes_started)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        processes.run_together(python("import time; time.sleep(600)"), [{}, {}])
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2 or all(
        process.poll() is not None for process in started
    )


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads /proc")
def test_a_program_can_end_with_its_parent():
    inner = (
        "import os, time; from tfmulti.runtime import processes; processes.end_with_parent(); "
        "print(os.getpid(), flush=True); open(os.environ['FILE'], 'w').write(str(os.getpid())); "
        "time.sleep(600)"
    )
    code = f"""
        import sys
        from tfmulti.runtime import processes
        processes.run_together([sys.executable, "-c", {inner!r}], [{{}}])
    """
    path = f"/tmp/tfmulti_test_{os.getpid()}"
    parent = subprocess.Popen(python(code), env={**os.environ, "FILE": path})
    try:
        limit = time.monotonic() + 20
        while not os.path.exists(path) or not open(path).read():
            assert time.monotonic() < limit
            time.sleep(0.05)
        number = int(open(path).read())
    finally:
        parent.kill()
        parent.wait()
    assert_ends(number)
    os.unlink(path)


BEGIN = """
import atexit, sys, threading, time
from tfmulti.runtime import command_line, processes
atexit.register(print, "exit functions are called")
"""
WAITS_FOR_EVER = "threading.Thread(target=threading.Event().wait).start()\n"
WRITES = """
def write():
    time.sleep(7)
    print("written")
threading.Thread(target=write, name="tfmulti: checkpoint").start()
"""


def run_to_its_end(code):
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)
    return done, time.monotonic() - began


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("processes.end_process(3)", 3),
        ("command_line.run_and_exit(lambda: 4)", 4),
        ("command_line.run_and_exit(lambda: sys.exit(143))", 143),
        ("command_line.run_and_exit(lambda: sys.exit('words'))", 1),
        ("command_line.run_and_exit(lambda: sys.exit())", 0),
        ("processes.end_process_at_exit(5)", 5),
    ],
)
def test_the_exit_code_and_exit_functions(end, exit_code):
    done, _ = run_to_its_end(end)
    assert done.returncode == exit_code
    assert done.stdout == "exit functions are called\n"


def test_the_text_of_an_exit_is_shown():
    done, _ = run_to_its_end("command_line.run_and_exit(lambda: sys.exit('no data at /data'))")
    assert done.stderr == "no data at /data\n"


def test_sigterm_ends_the_first_process_of_a_container():
    code = (
        "import time\nfrom tfmulti.runtime import command_line\n"
        "def main(): print('here', flush=True); time.sleep(600)\n"
        "command_line.run_and_exit(main)"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if process.stdout.readline() != b"here\n":
            pytest.skip("this user may not create a namespace of processes")
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        try:
            assert process.wait(20) == 143
        finally:
            process.kill()


def test_the_exit_code_stays_where_output_cannot_be_written():
    code = BEGIN + "print('more'); processes.end_process(144)"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], env=buffered, stdout=full, stderr=full)
    assert done.returncode == 144


@pytest.mark.slow
def test_a_thread_that_never_ends_holds_nothing_up():
    done, seconds = run_to_its_end(WAITS_FOR_EVER + "processes.end_process(1)")
    assert done.returncode == 1
    assert seconds < 15


@pytest.mark.slow
def test_our_own_threads_are_waited_for():
    done, _ = run_to_its_end(WRITES + "processes.end_process(0)")
    assert done.stdout == "written\nexit functions are called\n"
