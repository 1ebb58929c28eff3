"""Four logical CPUs for the whole run, and real workers on loopback."""

import collections
import contextlib
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

from tfmulti.runtime import processes

WORKER_TIMEOUT_S = 240


def pytest_configure(config):
    # Before any test module is imported: TensorFlow takes it before its first use only.
    from tfmulti import devices

    devices.set_logical_cpus(4)


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
    config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i % parts != part - 1])
    items[:] = items[part - 1 :: parts]


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
def run_workers():
    """Runs one command on several workers; see `runner_of_workers`."""
    with runner_of_workers() as run:
        yield run


@pytest.fixture(scope="module")
def run_workers_of_module():
    """As `run_workers`, for a fixture that serves a whole module."""
    with runner_of_workers() as run:
        yield run


@contextlib.contextmanager
def runner_of_workers():
    """Runs one command on several workers: `run_workers(2, ["script.py", "--flag"])`.

    Gives the finished processes, each with `returncode`, `stdout` and `stderr`. No process is
    left behind, whatever happens.
    """
    started = []
    files = contextlib.ExitStack()

    def run(num_workers, arguments, *, env=None, check=True, configs=None):
        workers = []
        for config in configs or processes.tf_configs(num_workers):
            # Files, not pipes: a worker must never wait for somebody to read what it writes.
            texts = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env={**os.environ, **(env or {}), "TF_CONFIG": config},
                stdout=texts[0],
                stderr=texts[1],
            )
            started.append(process)
            workers.append((process, texts))
        finished = []
        for process, texts in workers:
            code = process.wait(timeout=WORKER_TIMEOUT_S)
            for text in texts:
                text.seek(0)
            stdout, stderr = (text.read() for text in texts)
            finished.append(subprocess.CompletedProcess(arguments, code, stdout, stderr))
        if check:
            for index, done in enumerate(finished):
                assert done.returncode == 0, f"worker {index}: {done.stdout}\n{done.stderr}"
        return finished

    with files:
        try:
            yield run
        finally:
            for worker in started:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
