"""The doctor: what it says of programs, of this host and its traps, and its command line."""

import json
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from tfmulti.cluster import Cluster
from tfmulti.doctor import __main__, cluster_settings, host, packages, tensorflow_process
from tfmulti.doctor import report as found_report
from tfmulti.doctor.host import Host
from tfmulti.doctor.report import Check
from tfmulti.runtime import processes
from tfmulti.runtime.memory import Limits, read_limits

TWO = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 0)
GB = 10**9
STATUSES = {"ok", "warning", "failure", "unknown"}
# Every area that the doctor is for has its line, on every machine.
NAMES = {
    *("Python", "TensorFlow", "Keras", "their needs", "MPI", "file names", "import of TensorFlow"),
    *("GPUs of the driver", "CUDA_VISIBLE_DEVICES", "GPUs of TensorFlow", "sum on each GPU"),
    *("GPUs alike", "memory of the GPUs", "modes of the GPUs", "PCIe", "CUDA of the driver"),
    *("CUDA", "cuDNN", "NCCL", "NVLink", "topology of the GPUs", "memory", "cores"),
    *("container limits", "shared memory", "open files", "work folder", "work folder's speed"),
    *("TF_CONFIG", "names of hosts", "own address", "own port", "private addresses", "secret"),
    *("other workers", "backend of Keras", "keras.json", "Keras 2", "GPUs and workers"),
    *("LD_LIBRARY_PATH", "order in the program"),
}


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras: nothing here imports it."""


def doctor(*arguments, env=None, cwd=None):
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return subprocess.run(
        [sys.executable, "-m", "tfmulti.doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**environ, **(env or {})},
        cwd=cwd,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extra"], "flags only"),
        (["--clutser"], "cluster"),
        (["--tensorflow_timeout=0"], "`tensorflow_timeout` must be at least 1.0"),
    ],
)
def test_bad_usage_exits_2(arguments, words, capsys):
    assert __main__.main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_json_has_every_line_and_a_trap_makes_the_exit_code_1(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "keras.json").write_text('{"backend": "torch"}')
    done = doctor("--json", "--workdir", tmp_path / "run", env={"KERAS_HOME": str(home)})
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"checks"}
    for each in found["checks"]:
        assert list(each) == ["name", "status", "detail", "hint"]
        assert each["status"] in STATUSES
        assert each["detail"]
        assert each["hint"] or each["status"] in ("ok", "unknown")
    statuses = {each["name"]: each["status"] for each in found["checks"]}
    assert len(statuses) == len(found["checks"])
    assert NAMES <= set(statuses)
    assert [name for name, status in statuses.items() if status == "failure"] == [
        "backend of Keras"
    ]
    # TensorFlow has been asked all the same.
    assert statuses["import of TensorFlow"] == "ok"
    assert list(tmp_path.iterdir()) == [home]


def test_a_line_is_never_cut_off(monkeypatch):
    areas = [
        ("Programs", [Check("a name that is long, longer than its column", "ok", "word " * 40)]),
        ("GPUs", [Check("PCIe", "failure", "x" * 300, "hint " * 40), Check("b", "unknown", "c")]),
    ]
    wide = Console(width=80, record=True, force_terminal=True, file=open(os.devnull, "w"))
    found_report.show(areas, wide)
    text = wide.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("x") == 300
    assert (text.count("word"), text.count("hint")) == (40, 40)
    narrow = Console(width=80, record=True, file=open(os.devnull, "w"))
    found_report.show(areas, narrow)
    lines = narrow.export_text().splitlines()
    assert lines[1].startswith("  ok       a name that is long, longer than its column: word word")
    assert lines[3].endswith("hint hint hint ")
    assert lines[-1] == "Not ready: PCIe. (1 failure, 1 ok, 1 not looked at)"


def test_the_verdict_is_the_worst_status():
    def verdict(*statuses):
        return found_report.verdict([Check("a", status, "b") for status in statuses]).plain

    assert verdict("ok", "unknown") == "Ready. (1 ok, 1 not looked at)"
    assert verdict("ok", "warning") == "Ready, with warnings. (1 warning, 1 ok)"


# Programs.


def test_versions_are_compared_with_what_tfmulti_wants():
    wanted = Requirement("tensorflow<2.22,>=2.20")

    def look(**installed):
        installed = {name.replace("_", "-"): version for name, version in installed.items()}
        names = packages.TENSORFLOWS
        return packages.check_version("TensorFlow", names, wanted, installed.get)

    assert look(tensorflow="2.21.0").status == look(tensorflow_cpu="2.20.0").status == "ok"
    assert look(tensorflow="2.19.1").status == "failure"
    assert "2.22,>=2.20" in look(tensorflow="2.19.1").hint
    assert look().detail == "not installed"
    both = look(tensorflow="2.21.0", tensorflow_cpu="2.21.0")
    assert both.status == "failure"
    assert "overwrite each other" in both.hint


def test_unmet_requirements_fail_and_are_named():
    needs = {"keras": [Requirement("numpy>=1.26"), Requirement("h5py")]}
    good = packages.check_needs(needs, {"numpy": "2.1", "h5py": "3.14"}.get)
    assert (good.status, good.detail) == ("ok", "2 requirements hold")
    bad = packages.check_needs(needs, {"numpy": "1.25"}.get)
    assert bad.status == "failure"
    assert "keras needs numpy>=1.26 (here: 1.25)" in bad.detail
    assert "keras needs h5py (here: not installed)" in bad.detail
    other = {"tfmulti": [Requirement("tensorflow>=2.20")]}
    assert packages.check_needs(other, {"tensorflow-cpu": "2.21"}.get).status == "ok"


def test_needs_of_the_installed_tensorflow_are_read():
    names = {each.name for each in packages.requirements_of("tensorflow")}
    extras = {each.name for each in packages.requirements_of("tensorflow", "and-cuda")}
    assert "numpy" in names
    assert any(name.startswith("nvidia-cudnn") for name in extras)
    assert names < extras


def test_two_mpis_and_files_that_hide_packages(tmp_path):
    assert packages.check_mpi({"impi-rt": "1", "mpich": "2", "mpi4py": "4"}.get).status == "warning"
    assert packages.check_mpi({"impi-rt": "1", "mpi4py": "4"}.get).status == "ok"
    assert packages.check_hidden(tmp_path).status == "ok"
    (tmp_path / "keras.py").touch()
    found = packages.check_hidden(tmp_path)
    assert (found.status, "keras.py" in found.detail) == ("failure", True)


@pytest.mark.parametrize(
    ("code", "words", "hint"),
    [
        ("import os; os.kill(os.getpid(), 11)", "it was ended by SIGSEGV", "recreate"),
        ("import os; os.kill(os.getpid(), 4)", "it was ended by SIGILL", "AVX"),
        # A real-time signal has no name.
        ("import os; os.kill(os.getpid(), 40)", "it was ended by signal 40", "recreate"),
        ("import no_such_tensorflow", "ModuleNotFoundError: No module named", "Install"),
        ("print('last words', file=__import__('sys').stderr); exit(3)", "last words", "recreate"),
        ("import time; time.sleep(60)", "no answer in 1 s", "--tensorflow_timeout"),
    ],
)
def test_a_tensorflow_that_fails_is_a_failure_with_its_last_words(code, words, hint):
    report = tensorflow_process.run_tensorflow(1.0, [sys.executable, "-c", code])
    found = tensorflow_process.check_import(report)
    assert found.status == "failure"
    assert words in found.detail
    assert hint in found.hint


def test_what_tensorflow_says_of_gpus_is_kept():
    facts = {"seconds": 1.5, "tensorflow": "2.21.0", "keras": "3.15.1", "gpus": []}
    text = f"noise\n{tensorflow_process._MARK}{json.dumps(facts)}\n"
    errors = "I0000 port.cc] oneDNN\nW0000 gpu_device.cc:2343] Cannot dlopen some GPU libraries.\n"
    done = processes.Finished(-6, text, errors, processes.FAILED)
    report = tensorflow_process.read_report(done, 1.0)
    assert report.facts == facts
    assert report.words == "Cannot dlopen some GPU libraries."
    assert tensorflow_process.check_import(report).detail.endswith("in 1.5 s")


# This host.


def limits_of(root, files):
    """The limits that are read where the file system has these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return read_limits(root)


def test_limits_of_control_groups_of_version_2(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "250000 100000",
        "sys/fs/cgroup/a/b/memory.max": "8000000000",
        "sys/fs/cgroup/a/memory.max": "max",
    }
    assert limits_of(tmp_path, files) == Limits(cores=2.5, memory=8 * GB)
    # A container sees its group as the root.
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}
    assert limits_of(tmp_path / "container", files) == Limits(cores=0.5, memory=None)


def test_limits_of_control_groups_of_version_1(tmp_path):
    # The group's path is the host's, which a container does not see.
    files = {
        "proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000000",
    }
    assert limits_of(tmp_path, files) == Limits(cores=1.5, memory=4 * GB)
    files = {
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert limits_of(tmp_path, files) == Limits()
    assert read_limits(tmp_path / "nowhere") == Limits()


def test_this_host_is_read():
    found = host.read_host()
    assert found.cores >= found.allowed >= 1
    assert found.memory > found.available > 0
    assert found.files > 0
    assert host.check_cores(found, {}).status in STATUSES


def test_memory_is_compared_with_16_gb_for_each_gpu():
    large = Host(memory=64 * GB, available=60 * GB)
    assert host.check_memory(large, 4).status == "ok"
    assert host.check_memory(large, 8).status == "warning"
    assert "8 GPUs want 128 GB" in host.check_memory(large, 8).detail
    limited = Host(memory=64 * GB, available=60 * GB, limits=Limits(memory=20 * GB))
    assert host.check_memory(limited, 2).status == "warning"
    little = Host(memory=64 * GB, available=60 * GB, limits=Limits(memory=GB))
    assert host.check_memory(little, 0).status == "warning"
    assert host.check_memory(large, 0).status == "ok"
    assert host.check_memory(Host(memory=8 * GB, available=GB), 0).status == "warning"
    assert host.check_memory(Host(), 1).status == "unknown"


def test_cores_that_a_container_does_not_give():
    limited = Host(cores=64, allowed=64, limits=Limits(cores=2.0))
    found = host.check_cores(limited, {})
    assert (found.status, "TF_NUM_INTRAOP_THREADS=2" in found.hint) == ("warning", True)
    assert host.check_cores(limited, {"TF_NUM_INTRAOP_THREADS": "2"}).status == "ok"
    assert host.check_cores(limited, {"TF_NUM_INTRAOP_THREADS": "64"}).status == "warning"
    assert host.check_cores(Host(cores=64, allowed=8), {}).detail == "8 of 64"
    assert host.check_container(limited.limits).detail == "2 cores"


def test_shared_memory_and_open_files():
    docker = Host(shared=64_000_000, shared_free=64_000_000)
    assert host.check_shared(docker).status == "warning"
    assert "--shm-size" in host.check_shared(docker).hint
    assert host.check_shared(Host(shared=8 * GB, shared_free=7 * GB)).status == "ok"
    usual = Host(files=1024, most_files=1048576)
    assert host.check_files(usual, 1).status == "ok"
    assert host.check_files(usual, 64).status == "warning"
    assert host.check_files(Host(files=64, most_files=64), 1).status == "failure"


# The work folder.


def test_the_work_folder_is_written_read_and_left_as_it_was(tmp_path):
    space, speed = host.check_workdir(tmp_path, num_bytes=4_000_000)
    assert space.status in ("ok", "warning")
    assert "written to the disk" in speed.detail
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path):
    space, _ = host.check_workdir(tmp_path / "a" / "b", num_bytes=1000)
    assert f"not there yet; {tmp_path}" in space.detail
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    [found] = host.check_workdir(tmp_path / "file" / "run")
    assert (found.status, "is no folder" in found.detail) == ("failure", True)

    def full(folder, num_bytes):
        raise OSError(28, "No space left on device")

    found = host.check_workdir(tmp_path, measure=full)[1]
    assert (found.status, "No space left" in found.detail) == ("failure", True)
    slow = host.check_workdir(tmp_path, num_bytes=GB // 1000, measure=lambda *_: (1.0, 1.0))[1]
    assert slow.status == "warning"


def test_a_folder_that_may_not_be_entered_is_a_failure(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    # As below a folder without permission, which an administrator has everywhere.
    monkeypatch.setattr(host.Path, "exists", refuse)
    [found] = host.check_workdir(tmp_path / "run")
    assert (found.name, found.status) == ("work folder", "failure")
    assert found.detail == f"{tmp_path / 'run'}: Permission denied"


def test_a_disk_that_does_not_answer_is_a_failure_in_time(tmp_path):
    import threading

    never = threading.Event()
    found = host.check_workdir(tmp_path, timeout_s=0.1, measure=lambda *_: never.wait())[1]
    never.set()
    assert (found.status, "not ended in 0.1 s" in found.detail) == ("failure", True)


# Variables and traps.


def look_at(environ, cluster=None, interfaces=("lo", "eth0")):
    return {
        each.name: each for each in cluster_settings.check_variables(environ, cluster, interfaces)
    }


def test_variables_are_explained():
    found = look_at(
        {
            "NCCL_DEBUG": "INFO",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_NEW_ONE": "2",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "TF_CPP_MIN_LOG_LEVEL": "3",  # The launcher sets it.
            "TF_VAR_password": "hidden",
            "PATH": "/bin",
        }
    )
    assert {name: each.status for name, each in found.items()} == {
        "NCCL_DEBUG": "ok",
        "NCCL_NEW_ONE": "ok",
        "NCCL_P2P_DISABLE": "warning",
        "TF_CPP_MIN_LOG_LEVEL": "ok",
        "TF_FORCE_GPU_ALLOW_GROWTH": "ok",
    }
    assert found["NCCL_DEBUG"].detail.startswith("=INFO: how much NCCL logs")
    assert list(look_at({})) == ["variables"]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("eth", "ok"),
        ("=eth0", "ok"),
        ("ib,eth", "ok"),
        ("^lo", "ok"),
        ("=eth", "failure"),
        ("ib0", "failure"),
        ("^lo,eth", "failure"),
    ],
)
def test_interfaces_of_nccl(value, status):
    assert look_at({"NCCL_SOCKET_IFNAME": value})["NCCL_SOCKET_IFNAME"].status == status


def test_a_proxy_between_workers_warns_and_hides_its_password():
    environ = {"https_proxy": "http://me:secret@proxy:8080"}
    found = look_at(environ, TWO)["https_proxy"]
    assert found.status == "warning"
    assert "no_grpc_proxy=10.0.0.1,10.0.0.2" in found.hint
    assert "secret" not in found.detail
    assert look_at(environ)["https_proxy"].status == "ok"
    for around in ("localhost, 10.0.0.1,10.0.0.2", "10.0.0.0/8"):
        assert look_at({**environ, "no_proxy": around}, TWO)["https_proxy"].status == "ok"
    assert look_at({**environ, "no_proxy": "192.168.0.0/16"}, TWO)["https_proxy"].hint


def trapped(environ, cluster=None, num_gpus=0, **installed):
    found = packages.check_pitfalls(environ, cluster, num_gpus, installed.get)
    return {each.name: each.status for each in found}


def test_traps_of_keras(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trapped({})["backend of Keras"] == "ok"
    assert trapped({"KERAS_BACKEND": "jax"})["backend of Keras"] == "failure"
    (tmp_path / ".keras").mkdir()
    path = tmp_path / ".keras" / "keras.json"
    path.write_text('{"backend": "torch", "floatx": "float16"}')
    found = trapped({})
    assert (found["backend of Keras"], found["keras.json"]) == ("failure", "warning")
    assert trapped({"KERAS_BACKEND": "tensorflow"})["backend of Keras"] == "ok"
    path.write_text('{"floatx": "float32", "epsilon": 1e-07, "backend": "tensorflow"}')
    assert trapped({})["keras.json"] == "ok"
    # KERAS_HOME holds the file itself.
    (tmp_path / "keras.json").write_text("{not json")
    assert trapped({"KERAS_HOME": str(tmp_path)})["keras.json"] == "warning"
    assert trapped({"TF_USE_LEGACY_KERAS": "1"})["Keras 2"] == "failure"
    assert trapped({}, tf_keras="2.21.0")["Keras 2"] == "ok"


def test_workers_of_one_host_must_not_take_the_same_gpus():
    same = Cluster({"worker": ["h:1", "h:2"]}, "worker", 0)
    assert trapped({}, same, 2)["GPUs and workers"] == "failure"
    # Whether the other has the same ones cannot be seen here.
    assert trapped({"CUDA_VISIBLE_DEVICES": "0,1"}, same, 2)["GPUs and workers"] == "unknown"
    by_slurm = Cluster({"worker": ["h:1", "h:2"]}, "worker", 0, "Slurm")
    assert trapped({"CUDA_VISIBLE_DEVICES": "0"}, by_slurm, 2)["GPUs and workers"] == "ok"
    assert trapped({}, TWO, 2)["GPUs and workers"] == "ok"
    assert trapped({}, TWO, 0)["GPUs and workers"] == "unknown"


def test_libraries_before_those_of_the_packages(tmp_path):
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    wheels = {"nvidia-cudnn-cu12": "9.10"}
    assert trapped(environ, **wheels)["LD_LIBRARY_PATH"] == "ok"
    (tmp_path / "libcudnn.so.8").touch()
    assert trapped(environ, **wheels)["LD_LIBRARY_PATH"] == "warning"
    assert trapped(environ)["LD_LIBRARY_PATH"] == "ok"
