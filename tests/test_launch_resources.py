"""What a launched worker gets of the machine, and MPI's process manager."""

import json
import os
import socket
import sys

import pytest

from tfmulti.launch.config import LaunchConfig, part_of
from tfmulti.launch.job import Job
from tfmulti.launch.pmi import ProcessManager

SHOW = """
import json, os, sys
names = ("MALLOC_MMAP_MAX_", "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
shown = [sorted(os.sched_getaffinity(0)), *(os.environ.get(name) for name in names)]
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
open(f"{sys.argv[1]}/{index}.json", "w").write(json.dumps(shown))
"""


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras, which takes longer than most tests here."""


def shown_by_workers(tmp_path, **settings):
    config = LaunchConfig(num_workers=2, log_dir=str(tmp_path), **settings)
    assert Job(config, [sys.executable, "-c", SHOW, str(tmp_path)], print).run() == 0
    return [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]


@pytest.fixture(autouse=True)
def no_threads_in_environment(monkeypatch):
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_workers_divide_the_cores_and_keep_their_memory(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    parts = [part_of(cores, place, 2) for place in range(2)]
    threads = [str(len(part)) for part in parts]
    assert shown_by_workers(tmp_path, pin=True) == [
        [part, "0", number, number] for part, number in zip(parts, threads)
    ]


def test_each_can_be_switched_off(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    shown = shown_by_workers(tmp_path, threads=0, allocator="default")
    assert shown == [[cores, None, None, None]] * 2


def test_threads_that_the_user_has_set_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert [worker[2:] for worker in shown_by_workers(tmp_path, threads=3)] == [["3", "7"]] * 2


def test_mpi_goes_with_workers_of_this_machine():
    with pytest.raises(ValueError, match="Received: mpi=True, hosts=hosts.txt"):
        LaunchConfig(hosts="hosts.txt", mpi=True)


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
