"""Two jobs of two workers, in which short cases of several programs run one after the other."""

import functools
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))

import cases

# What each worker reads before it is refused is its own: such cases come last.
OVER_THE_RING = (
    "behaviour_worker:functional/distributed",
    "callback_worker:files",
    "callback_worker:early_stopping",
    "callback_worker:not_a_number",
    "callback_worker:one_stops",
    "callback_worker:unequal",
    "callback_worker:backup",
    "local_steps_worker:adam 4",
    "sharded_state_worker:adamw",
    "sharded_parameters_worker:adamw",
    "verification_worker:own step",
    "verification_worker:wrong state",
)
OVER_MPI = ("pipeline_worker:dense", "tensor_worker:both")
# Of slow tests alone.
MORE_OVER_THE_RING = (
    "callback_worker:random_states",
    "local_steps_worker:refusals",
    "replicated_worker:decides",
    "verification_worker:unlike parts",
    "sharded_parameters_worker:refusals",
    "sharded_state_worker:refusals",
)
MORE_OVER_MPI = ("pipeline_worker:refusals",)
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def run_cases(request, run_workers):
    """Runs cases of the module's program: `run_cases(folder, names)`; see `cases.run`."""
    return functools.partial(cases.run, run_workers, HERE / f"{request.module.PROGRAM}.py")


@pytest.fixture(scope="module")
def run_over_mpi(run_cases, mpiexec):
    """Does the same over MPI."""
    return functools.partial(run_cases, options=["--mpi"])


def run_in_one_job(request, folder, names, slow, **settings):
    """Runs the cases whose tests are collected; gives a function of a program's name.

    Its result is the folder of the program's files, and what each worker saw of each case.
    """
    uses = [x for x in request.session.items if request.fixturename in x.fixturenames]
    programs = {item.module.PROGRAM for item in uses}
    if request.config.option.markexpr != "not slow":
        names += slow
    names = [name for name in names if name.partition(":")[0] in programs]
    run_workers = request.getfixturevalue("run_workers")
    program = HERE / "in_one_job.py"
    seen = cases.run(run_workers, program, folder, names, timeout_s=TIMEOUT_S, **settings)

    def of_program(program):
        start = f"{program}:"
        own = [{k.removeprefix(start): x[k] for k in x if k.startswith(start)} for x in seen]
        return folder / program, own

    return of_program


@pytest.fixture(scope="session")
def over_the_ring(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ring")
    return run_in_one_job(request, folder, OVER_THE_RING, MORE_OVER_THE_RING)


@pytest.fixture(scope="session")
def over_mpi(request, mpiexec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpi")
    return run_in_one_job(request, folder, OVER_MPI, MORE_OVER_MPI, options=["--mpi"])
