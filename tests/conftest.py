"""Four logical CPUs (or GPUs) for the whole run, and real workers on loopback."""

import collections
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import replicas

from tfmulti import hardware
from tfmulti.runtime import processes

ROOT = Path(__file__).parents[1]
WORKER_TIMEOUT_S = 600


def pytest_configure(config):
    # A shell that runs the tests in the background has SIGINT ignored, in all that they start too.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before any test module is imported: TensorFlow takes it before its first use only.
    from tfmulti import devices

    if replicas.ON == "GPU":
        replicas.split_gpu(4)
    elif hardware.read_driver().gpus:
        # Plain Keras would train on the GPU, and the replicas on CPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    devices.set_logical_cpus(4)
    if config.option.markexpr == "not slow":
        # A step runs a few times here: optimizing its graph takes longer than it saves. Workers,
        # and `make test-all`, run with TensorFlow's defaults.
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if replicas.ON == "collectives":
        from tfmulti.strategies import factories

        factories._cross_device_ops = lambda devices: None


def pytest_collection_finish(session):
    # The collector would visit TensorFlow's and Keras's objects, and every graph, again and again.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", help="The part of the tests to run: 2/6, say.")


def pytest_report_header(config):
    return f"part of the tests: {config.getoption('--part')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks all but the first cases of a `sampled` test as slow, and leaves one part of all."""
    seen = collections.Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            test = item.nodeid.split("[")[0]
            seen[test] += 1
            if seen[test] > marker.args[0]:
                item.add_marker("slow")
    # Neighbours take alike long: they go to different parts.
    part, parts = map(int, config.getoption("--part").split("/"))
    group_of = {item.nodeid: _group(item.nodeid, config) for item in items}
    mine = set(list(dict.fromkeys(group_of.values()))[part - 1 :: parts])
    config.hook.pytest_deselected(items=[x for x in items if group_of[x.nodeid] not in mine])
    items[:] = [x for x in items if group_of[x.nodeid] in mine]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group(nodeid, config)

    return Groups(config, log)


def _group(nodeid, config):
    """What goes to one process and one part: a test, or all that share fixtures of workers."""
    file, _, _ = nodeid.partition("::")
    if "/multi_worker/" not in file:
        return nodeid
    # Slow tests of a file share a job of workers; those of `make test` share one for the folder.
    return file if config.option.markexpr != "not slow" else "tests/multi_worker"


@pytest.fixture(autouse=True)
def fresh_keras():
    import keras

    # Collecting garbage takes a second of every test.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture(name="free_ports", scope="session")
def free_ports_fixture():
    return processes.free_ports


@pytest.fixture
def all_reduces(monkeypatch):
    """A list to which every all-reduce of a replica adds its arguments."""
    import tensorflow as tf

    seen, original = [], tf.distribute.ReplicaContext.all_reduce

    def all_reduce(self, *args, **kwargs):
        seen.append(args)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", all_reduce)
    return seen


@pytest.fixture(scope="session")
def run_workers():
    """Runs a Python program on several workers: `run_workers(2, ["script.py", "--flag"])`.

    The product's launcher starts them, and leaves no process behind, whatever happens. Gives the
    lines of each worker as the launcher shows them, without its name.
    """

    def run(
        num_workers, arguments, *, env=None, check=True, options=(), timeout_s=WORKER_TIMEOUT_S
    ):
        launch = ["-m", "tfmulti.launch", f"--num_workers={num_workers}", "--all_output", *options]
        command = [sys.executable, *launch, "--", sys.executable, *map(str, arguments)]
        environ = {"PYTHONPATH": str(ROOT), **(env or {})}
        [done] = processes.run_together(command, [environ], timeout_s=timeout_s)
        assert not check or done.returncode == 0, f"{done.how}: {done.stdout}\n{done.stderr}"
        names = [f"[worker {index}] " for index in range(num_workers)]
        lines = done.stdout.splitlines(keepends=True)
        return [
            "".join(line.removeprefix(name) for line in lines if line.startswith(name))
            for name in names
        ]

    return run


@pytest.fixture(scope="session")
def mpiexec():
    """Runs a program as two processes of MPI, `mpiexec("script.py")`; gives what they print."""
    program = Path(sys.executable).parent / "mpiexec"
    if not program.exists():
        pytest.skip("needs mpiexec, which the extra `mpi` installs")

    def run(*arguments):
        environ = {name: text for name, text in os.environ.items() if name != "TF_CONFIG"}
        environ["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [program, "-n", "2", sys.executable, *map(str, arguments)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=WORKER_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
