"""Clusters without TF_CONFIG: Slurm, Kubernetes, SageMaker, and who comes first."""

import copy
import json
import os
import pickle
import socket
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
from absl import logging
from hypothesis import strategies as st

from tfmulti import cluster as cluster_lib
from tfmulti.cluster import (
    Cluster,
    ClusterError,
    environment,
    from_tf_config,
    gpus,
    mpi,
    resolve_cluster,
    schedulers,
    slurm,
)

MANIFESTS = Path(__file__).resolve().parents[1] / "experiments" / "kubernetes"


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras, which takes longer than most tests here."""


# As Slurm 22.05.8 sets them for the first task of `srun --nodes=2 --ntasks=3`.
STEP = {
    "SLURMD_NODENAME": "node1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# As it sets them for the script of `sbatch --nodes=2 --ntasks=4`.
SCRIPT = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}
# And besides STEP with `srun --mpi=pmi2`.
PMI2 = {"PMI_FD": "13", "PMI_JOBID": "1.0", "PMI_RANK": "0", "PMI_SIZE": "3"}
# As the ENVIRONMENT_VARIABLES.md of sagemaker-training-toolkit gives them.
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "1",
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"],'
    '"network_interface_name":"ethwe"}',
}
# As https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/ tells.
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-1",
    "TFMULTI_NUM_WORKERS": "2",
    "TFMULTI_SERVICE": "workers",
}


def steps(hosts, nodelist, tasks_per_node, counts, **more):
    """The environments of all tasks of a step, host by host."""
    total = sum(counts)
    for host, count in enumerate(counts):
        for place in range(count):
            yield {
                **STEP,
                "SLURM_STEP_NODELIST": nodelist,
                "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
                "SLURM_NTASKS": str(total),
                "SLURM_STEP_NUM_TASKS": str(total),
                "SLURM_NODEID": str(host),
                "SLURM_LOCALID": str(place),
                **more,
            }


def resolve(environ, **kwargs):
    return resolve_cluster(environ=environ, check_network=False, **kwargs)


def message_of(environ, **kwargs):
    with pytest.raises(ClusterError) as caught:
        resolve(environ, **kwargs)
    message = str(caught.value)
    assert ". Received: " in message
    return message


def test_a_step_of_slurm():
    cluster = resolve(STEP)
    assert cluster.spec["worker"] == ("node1:12032", "node1:12033", "node2:12032")
    assert (cluster.source, cluster.worker_index, cluster.is_chief) == ("Slurm", 0, True)
    assert not cluster.names_come_late and cluster.visible_gpus is None


@pytest.mark.parametrize(
    ("nodelist", "tasks_per_node", "hosts", "counts"),
    [
        ("a", "4", ["a"], [4]),
        ("a,b", "2(x2)", ["a", "b"], [2, 2]),
        ("n[01-03],big", "2(x3),1", ["n01", "n02", "n03", "big"], [2, 2, 2, 1]),
        (
            "rack[1-2]n[1-2]",
            "1,2(x3)",
            ["rack1n1", "rack1n2", "rack2n1", "rack2n2"],
            [1, 2, 2, 2],
        ),
        # Slurm keeps the order of --nodelist with --distribution=arbitrary.
        ("n[3,1]", "1,2", ["n3", "n1"], [1, 2]),
        # Two components of a heterogeneous job on one host.
        ("a,b,a", "2,1,1", ["a", "b", "a"], [2, 1, 1]),
    ],
)
def test_all_tasks_of_a_step_find_the_same_cluster(nodelist, tasks_per_node, hosts, counts):
    clusters = [resolve(each) for each in steps(hosts, nodelist, tasks_per_node, counts)]
    assert len({cluster.spec["worker"] for cluster in clusters}) == 1
    assert [cluster.worker_index for cluster in clusters] == list(range(sum(counts)))
    workers = clusters[0].spec["worker"]
    assert len(set(workers)) == len(workers)
    found = Counter(address.split(":")[0] for address in workers)
    if len(set(hosts)) == 1:
        assert set(found) == {"127.0.0.1"}
    else:
        expected = Counter(host for host, count in zip(hosts, counts) for _ in range(count))
        assert found == expected
    # What reads TF_CONFIG reads the same.
    again = [from_tf_config(cluster.to_json()) for cluster in clusters]
    assert again == clusters


@hypothesis.given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_tasks_per_node_are_read_as_slurm_writes_them(counts):
    runs = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in runs)
    assert slurm.read_tasks_per_node(text) == counts


def test_the_index_goes_by_host_and_not_by_the_distribution():
    cyclic = {"SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}
    assert resolve({**STEP, **cyclic}).worker_index == 1


def test_ports_differ_between_jobs_and_steps():
    def first(job, step):
        return slurm.first_port({"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}, ["a"], [8])

    jobs = {first(str(job), "0") for job in range(1000, 1600)}
    assert len(jobs) == 600
    assert max(jobs) < 32768 - 32 and min(jobs) >= 12000
    assert len({first("7", str(step)) for step in range(100)}) == 100


def test_ports_that_are_given_come_first():
    reserved = {**STEP, "SLURM_STEP_RESV_PORTS": "13000-13001"}
    assert resolve(reserved).address == "node1:13000"
    assert resolve({**STEP, "SLURM_STEP_RESV_PORTS": "13000-13000"}).address == "node1:12032"
    assert resolve({**reserved, "TFMULTI_BASE_PORT": "20000"}).address == "node1:20000"


def test_a_port_that_is_taken_names_the_variable():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        environ = {
            **STEP,
            "SLURM_STEP_NODELIST": "node1",
            "SLURM_STEP_TASKS_PER_NODE": "3",
            "TFMULTI_BASE_PORT": str(port),
        }
        with pytest.raises(ClusterError) as caught:
            resolve_cluster(environ=environ)
    message = str(caught.value)
    assert message.startswith("`worker 0` must have a port on which this process can listen")
    assert "set TFMULTI_BASE_PORT to another port" in message
    assert "(from Slurm)" in message and "TF_CONFIG" not in message


def test_a_host_without_an_address_is_named():
    def resolve_host(host):
        if host == "node2":
            raise OSError("no such name")

    environ = {**STEP, "SLURM_JOB_ID": "77"}
    with pytest.raises(ClusterError, match="`worker 2` must name a host .*node2:.*from Slurm"):
        resolve_cluster(environ=environ, resolve_host=resolve_host)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "`SLURM_STEP_NODELIST` must name a host for each"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,2"}, "SLURM_NTASKS=3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, "`SLURM_STEP_TASKS_PER_NODE` must have numbers"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, "must have brackets in pairs"),
        ({"SLURM_NODEID": "2"}, "`SLURM_NODEID` and SLURM_LOCALID must name a task"),
        ({"SLURM_LOCALID": "2"}, "SLURM_NODEID=0, SLURM_LOCALID=2"),
        ({"SLURM_LOCALID": ""}, "`SLURM_LOCALID` must be an integer from 0 up"),
        ({"SLURM_JOB_ID": "x"}, "`SLURM_JOB_ID` must be an integer"),
        ({"TFMULTI_BASE_PORT": "0"}, "`TFMULTI_BASE_PORT` must be an integer from 1 up"),
        ({"TFMULTI_BASE_PORT": "65535"}, "must leave a port below 65535"),
    ],
)
def test_variables_that_contradict_one_another_are_named(changes, words):
    assert words in message_of({**STEP, **changes})


def test_a_list_with_brackets_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "hostlist", None)
    assert "pip install 'tfmulti[slurm]'" in message_of(STEP)
    plain = {"SLURM_STEP_NODELIST": "node1,node2"}
    assert resolve({**STEP, **plain}).num_workers == 3


@pytest.mark.parametrize(
    "environ",
    [
        SCRIPT,
        # The shell of salloc, on the first host (LaunchParameters=use_interactive_step).
        {**SCRIPT, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        # A script that was submitted from within a step of one task.
        {**STEP, **SCRIPT, "SLURM_STEP_NUM_TASKS": "1"},
        # Without --ntasks srun would start one task a host.
        {name: value for name, value in SCRIPT.items() if name != "SLURM_NTASKS"},
    ],
    ids=["sbatch", "salloc", "sbatch in a step", "two hosts"],
)
def test_nobody_trains_alone_in_a_job_for_several(environ):
    message = message_of(environ)
    assert "with srun" in message and "--strategy mirrored or one_device" in message


@pytest.mark.parametrize(
    "environ",
    [
        {**SCRIPT, "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "3", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODELIST": "node1"},
        next(steps(["node1"], "node1", "1", [1])),
        {**POD, "TFMULTI_NUM_WORKERS": "1"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    ],
    ids=["a script", "no --ntasks", "a step", "a pod", "a host"],
)
def test_one_task_is_a_cluster_of_one_worker(environ):
    cluster = resolve_cluster(environ=environ)
    assert (cluster.num_workers, cluster.is_chief) == (1, True)
    assert cluster.address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # --gres=gpu:4, --gpus-per-node=4: both tasks see all.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, ["0,1", "2,3"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6", "SLURM_GPUS_PER_NODE": "3"}, ["4", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, ["GPU-a", "GPU-b"]),
        # --gpu-bind=none takes back what --gpus-per-task binds.
        (
            {
                "CUDA_VISIBLE_DEVICES": "0,1",
                "SLURM_GPUS_PER_TASK": "1",
                "SLURM_GPU_BIND": "none",
            },
            ["0", "1"],
        ),
        # Whole hosts, without GRES: the device files tell.
        ({}, ["0,1", "2,3"]),
        # Each has its own already.
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TRES_PER_TASK": "gres:gpu:2"}, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPU_BIND": "closest"}, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "2"}, [None, None]),
        # A script around the program has divided them.
        ({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "4"}, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, [None, None]),
        # None at all.
        ({"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, [None, None]),
    ],
)
def test_tasks_of_a_host_share_its_gpus(environ, expected):
    assert [gpus.share_gpus(environ, place, 2, lambda: 4) for place in range(2)] == expected
    assert gpus.share_gpus(environ, 0, 1, lambda: 4) is None


def roles_of(tasks, **more):
    """The task that each process of a scheduler's job is, and the cluster that all see."""
    clusters = [resolve(each, servers=True, **more) for each in tasks]
    [spec] = {json.dumps(dict(cluster.spec)) for cluster in clusters}
    return [(cluster.task_type, cluster.task_index) for cluster in clusters], json.loads(spec)


def test_the_last_tasks_of_a_step_are_parameter_servers():
    tasks = list(steps(["a", "b"], "a,b", "2,3", [2, 3], TFMULTI_NUM_PS="2"))
    roles, spec = roles_of(tasks)
    assert roles == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    assert spec == {
        "chief": ["a:12032"],
        "worker": ["a:12033", "b:12032"],
        "ps": ["b:12033", "b:12034"],
    }
    # What is passed comes before the variable.
    assert roles_of(tasks, num_ps=1)[0][-2:] == [("worker", 2), ("ps", 0)]


def test_the_chief_and_the_servers_of_a_step_take_no_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2", "TFMULTI_NUM_PS": "1"}
    tasks = steps(["a"], "a", "4", [4], **environ)
    assert [resolve(each, servers=True).visible_gpus for each in tasks] == ["-1", "0", "1", "-1"]


def test_the_last_pods_of_a_job_and_the_last_host_of_sagemaker_are_parameter_servers():
    pod = {**POD, "TFMULTI_NUM_WORKERS": "4", "TFMULTI_NUM_PS": "1"}
    tasks = [{**pod, "JOB_COMPLETION_INDEX": str(i), "HOSTNAME": f"train-{i}"} for i in range(4)]
    roles, spec = roles_of(tasks)
    assert roles == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    assert spec["ps"] == ["train-3.workers:2222"] and spec["chief"] == ["train-0.workers:2222"]
    assert resolve(tasks[3], servers=True).names_come_late
    hosts = ["algo-1", "algo-2", "algo-3"]
    job = {"SM_HOSTS": json.dumps(hosts), "TFMULTI_NUM_PS": "1"}
    roles, _ = roles_of([{**job, "SM_CURRENT_HOST": host} for host in hosts])
    assert roles == [("chief", 0), ("worker", 0), ("ps", 0)]


@pytest.mark.parametrize(
    ("environ", "settings", "words"),
    [
        (STEP, {"num_ps": 2}, "`TFMULTI_NUM_PS` must leave a task for the chief"),
        ({**SCRIPT, "SLURM_NTASKS": "1"}, {"num_ps": 1}, "Received: 1 servers, and 1 tasks"),
        ({**STEP, "TFMULTI_NUM_PS": "one"}, {}, "`TFMULTI_NUM_PS` must be an integer from 0"),
        ({"PMI_SIZE": "4", "TFMULTI_NUM_PS": "1"}, {}, None),
        ({**STEP, "TFMULTI_NUM_PS": "1"}, {"servers": False}, "trains without parameter servers"),
    ],
)
def test_servers_that_a_job_cannot_have_are_told(environ, settings, words):
    settings = {"servers": True, **settings}
    if words is None:
        # A given environment starts no MPI.
        assert resolve(environ, **settings) is None
    else:
        assert words in message_of(environ, **settings)


def test_an_mpi_that_the_launcher_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr(mpi, "world", lambda: types.SimpleNamespace(size=1))
    monkeypatch.setattr(mpi, "_library", lambda: "Open MPI v4.1.6")
    with pytest.raises(RuntimeError, match="job of size 1, 2 workers, Open MPI v4.1.6. Start"):
        mpi.communicator(2, 0)


def test_a_job_that_another_mpi_has_started_is_refused_in_each_of_its_processes(monkeypatch):
    """mpi4py's own MPI does not know of the job: each process would train a model alone."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    alone = types.SimpleNamespace(size=1, rank=0, allgather=lambda value: [value])
    monkeypatch.setattr(mpi, "world", lambda: alone)
    monkeypatch.setattr(mpi, "_library", lambda: "Intel(R) MPI Library 2021.13")
    with pytest.raises(RuntimeError, match="job of size 1, 4 workers, Intel.* Start the job with"):
        mpi.find_in_mpi.__wrapped__()


def test_one_process_of_mpi_alone_needs_no_mpi4py(monkeypatch):
    monkeypatch.setattr(mpi, "find_in_mpi", None)
    cluster = schedulers.find_cluster({"PMI_SIZE": "1"}, may_start_mpi=True)
    assert (len(cluster.spec["worker"]), cluster.source) == (1, "MPI")


def test_the_processes_of_mpi_have_no_roles():
    with pytest.raises(ClusterError, match="not of MPI.*Received: 1 servers, 4 processes"):
        schedulers.find_cluster({"PMI_SIZE": "4", "TFMULTI_NUM_PS": "1"}, may_start_mpi=True)


def test_a_tf_config_has_as_many_servers_as_were_asked_for():
    environ = {"TF_CONFIG": tfjob("ps", chief=1, worker=2, ps=1), "TFMULTI_NUM_PS": "2"}
    cluster = resolve(environ, servers=True)
    assert (cluster.task_type, cluster.task_index, cluster.names_come_late) == ("ps", 0, True)
    assert resolve(environ, servers=True, num_ps=1) == cluster
    assert "Received: num_ps=2, 1 servers" in message_of(environ, servers=True, num_ps=2)


def test_a_job_whose_servers_nobody_has_numbered_is_told(monkeypatch):
    import tfmulti

    for name, value in next(steps(["node1"], "node1", "4", [4])).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="`num_ps` must say .* 4 tasks of Slurm, and no TFMULTI"):
        tfmulti.create_strategy("parameter_server")
    with pytest.raises(ValueError, match="`num_ps` can be used with parameter_server and auto"):
        tfmulti.create_strategy("mirrored", num_ps=1)
    with pytest.raises(ValueError, match="`num_ps` must be None or a whole number"):
        tfmulti.create_strategy("parameter_server", num_ps=0)


def test_two_workers_cannot_share_a_gpu():
    environ = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}
    with pytest.raises(ClusterError, match="must have a GPU for each task of the host"):
        gpus.share_gpus(environ, 0, 2)


def test_the_gpus_of_a_step_are_divided_once():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}
    tasks = list(steps(["a", "b"], "a,b", "2,1", [2, 1], **environ))
    assert [resolve(each).visible_gpus for each in tasks] == ["0,1", "2,3", None]
    again = {**tasks[1], "CUDA_VISIBLE_DEVICES": "2,3"}
    assert resolve({**again, "SLURM_GPU_BIND": "map_gpu:2,3"}).visible_gpus is None


def test_gpus_are_counted_by_their_files(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus.count_gpus(str(tmp_path)) == 2


def test_gpus_are_made_visible_before_tensorflow_looks():
    from tfmulti import devices

    environ = {}
    devices.see_gpus("2,3", environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "2,3"}


@pytest.mark.parametrize("number", ["1.0", "1"], ids=["of the step", "Cray's, of the job"])
def test_srun_sets_variables_of_mpi_without_mpi(number):
    environ = {**STEP, **PMI2, "PMI_JOBID": number}
    assert mpi.size_in_environment(environ) == 0
    assert resolve(environ).source == "Slurm"


@pytest.mark.parametrize(
    "nearer",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "4"},
        {"PMI_SIZE": "4", "PMI_RANK": "2"},
    ],
)
def test_mpiexec_within_a_task_of_srun_comes_before_the_task(nearer):
    """As in `srun --pty bash`: what it starts has PMI_JOBID and PMI_FD from srun."""
    shell = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    environ = {**STEP, **shell, **PMI2, "PMI_SIZE": "1"}
    assert mpi.size_in_environment(environ) == 0
    assert mpi.size_in_environment({**environ, **nearer}) == 4


@pytest.mark.parametrize("nearer", [{"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "2"}])
def test_mpiexec_within_a_job_comes_before_the_job(nearer):
    # A given environment starts no MPI, and leaves its processes to it.
    assert resolve({**SCRIPT, **nearer}) is None


def test_pods_of_an_indexed_job():
    cluster = resolve(POD)
    assert cluster.spec["worker"] == ("train-0.workers:2222", "train-1.workers:2222")
    assert (cluster.source, cluster.worker_index) == ("Kubernetes", 1)
    assert resolve({**POD, "TFMULTI_BASE_PORT": "5000"}).address == "train-1.workers:5000"


def test_pods_of_a_jobset():
    # https://jobset.sigs.k8s.io: <jobSet>-<replicatedJob>-<job-index>-<pod-index>.<subdomain>
    environ = {
        "JOB_COMPLETION_INDEX": "0",
        "HOSTNAME": "my-set-workers-0-0",
        "JOBSET_NAME": "my-set",
        "TFMULTI_NUM_WORKERS": "2",
    }
    assert resolve(environ).spec["worker"][1] == "my-set-workers-0-1.my-set:2222"
    assert "`replicas: 1`" in message_of({**environ, "HOSTNAME": "my-set-workers-1-0"})


def test_names_of_pods_are_not_looked_up_before_the_pods_are_there():
    def resolve_host(host):
        raise OSError(f"{host} is not there yet")

    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    environ = {**POD, "TFMULTI_BASE_PORT": str(free)}
    assert resolve_cluster(environ=environ, resolve_host=resolve_host).num_workers == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TFMULTI_NUM_WORKERS": None}, "`TFMULTI_NUM_WORKERS` must be set in the pods"),
        ({"TFMULTI_NUM_WORKERS": "0"}, "must be an integer from 1 up"),
        ({"JOB_COMPLETION_INDEX": "2"}, "must be the Job's `completions`"),
        ({"JOB_COMPLETION_INDEX": ""}, "`JOB_COMPLETION_INDEX` must be an integer"),
        ({"TFMULTI_SERVICE": None}, "`TFMULTI_SERVICE` must name the headless Service"),
        ({"HOSTNAME": "train"}, "`HOSTNAME` must be the pod's name"),
        ({"HOSTNAME": "train-0"}, "HOSTNAME=train-0, JOB_COMPLETION_INDEX=1"),
    ],
)
def test_a_manifest_that_lacks_something_is_told(changes, words):
    environ = {name: value for name, value in {**POD, **changes}.items() if value is not None}
    assert words in message_of(environ)


@pytest.mark.parametrize("lacking", [[], ["SM_HOSTS", "SM_CURRENT_HOST"], ["SM_RESOURCE_CONFIG"]])
def test_hosts_of_sagemaker(lacking):
    environ = {name: value for name, value in SAGEMAKER.items() if name not in lacking}
    cluster = resolve(environ)
    assert cluster.spec["worker"] == ("algo-1:2222", "algo-2:2222")
    assert (cluster.source, cluster.worker_index) == ("SageMaker", 1)
    assert cluster.names_come_late


def test_hosts_of_sagemaker_in_a_container_without_its_toolkit(tmp_path, monkeypatch):
    path, job = tmp_path / "resourceconfig.json", {"TRAINING_JOB_NAME": "train"}
    monkeypatch.setattr(schedulers, "_RESOURCES", path)
    assert resolve(job) is None
    path.write_text(SAGEMAKER["SM_RESOURCE_CONFIG"])
    assert resolve({}) is None
    cluster = resolve(job)
    assert cluster.spec["worker"] == ("algo-1:2222", "algo-2:2222")
    assert (cluster.source, cluster.worker_index) == ("SageMaker", 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"SM_HOSTS": "algo-1"},
        {"SM_HOSTS": '{"algo-1": 1}'},
        {"SM_HOSTS": "[1, 2]"},
        {"SM_CURRENT_HOST": "algo-3"},
        {"SM_HOSTS": "", "SM_RESOURCE_CONFIG": "[]"},
    ],
)
def test_hosts_of_sagemaker_that_cannot_be_read(changes):
    assert "must list all hosts as JSON" in message_of({**SAGEMAKER, **changes})


# As genTFConfigJSONStr of Kubeflow's training operator (pkg/controller.v1/tensorflow) writes it.
def tfjob(task_type="worker", index=0, **cluster):
    names = {
        kind: [f"train-{kind}-{each}.default.svc:2222" for each in range(count)]
        for kind, count in (cluster or {"worker": 2}).items()
    }
    task = {"type": task_type, "index": index}
    return json.dumps({"cluster": names, "task": task, "environment": "cloud"})


def test_the_tf_config_of_kubeflow():
    def resolve_host(host):
        raise OSError(f"{host} is not there yet")

    cluster = resolve_cluster(environ={"TF_CONFIG": tfjob()}, resolve_host=resolve_host)
    assert cluster.address == "train-worker-0.default.svc:2222"
    assert (cluster.source, cluster.num_workers) == ("TF_CONFIG", 2)
    assert resolve({"TF_CONFIG": tfjob(chief=1, worker=2)}).num_workers == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (tfjob(ps=1, worker=2), "multi_worker trains without parameter servers"),
        (tfjob("evaluator", worker=2), 'must be "chief" or "worker": MultiWorkerMirrored'),
        (
            '{"sparseCluster":{"worker":{"0":"train-worker-0.default.svc:2222"},"ps":[]},'
            '"task":{"type":"worker","index":0}}',
            'Write "enableDynamicWorker: false"',
        ),
    ],
)
def test_a_tfjob_that_does_not_train_so_is_told(text, words):
    assert words in message_of({"TF_CONFIG": text})


def test_who_started_this_process_last_decides():
    everything = {**SAGEMAKER, **POD, **STEP}
    given = json.dumps(
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    )
    assert resolve({**everything, "TF_CONFIG": given}).address == "b:1"
    assert resolve(everything).source == "Slurm"
    assert resolve({**SAGEMAKER, **POD}).source == "Kubernetes"
    assert resolve(SAGEMAKER).source == "SageMaker"
    assert resolve({"SLURM_CONF": "/etc/slurm.conf", "HOSTNAME": "a"}) is None


def test_an_empty_tf_config_is_an_error_in_a_job_too():
    assert "must not be empty" in message_of({**STEP, "TF_CONFIG": ""})


def test_a_cluster_keeps_its_source_when_it_travels():
    cluster = resolve({**POD})
    for copied in (copy.deepcopy(cluster), pickle.loads(pickle.dumps(cluster))):
        assert (copied.source, copied.names_come_late) == ("Kubernetes", True)
    same = Cluster(dict(cluster.spec), "worker", 1)
    assert (cluster, hash(cluster)) == (same, hash(same))


def test_the_host_of_a_launcher():
    assert schedulers.find_host_index({**STEP, "SLURM_NODEID": "1"}) == ("SLURM_NODEID", "1")
    assert schedulers.find_host_index({**POD}) == ("JOB_COMPLETION_INDEX", "1")
    assert schedulers.find_host_index({}) is None


def tf_config(*kinds, mine=None):
    """The text of a TF_CONFIG with a task of each kind, seen from the first one or an evaluator."""
    spec = {}
    for port, kind in enumerate((*kinds, "evaluator"), 20000):
        spec.setdefault(kind, []).append(f"127.0.0.1:{port}")
    return json.dumps({"cluster": spec, "task": {"type": mine or kinds[0], "index": 0}})


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        (STEP, True),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, True),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, False),
        ({"TF_CONFIG": tf_config("worker", "worker")}, True),
        ({"TF_CONFIG": tf_config("chief", "worker", "ps")}, True),
        ({"TF_CONFIG": tf_config("worker")}, False),
        # An evaluator works alone; what is not valid is told where it is used.
        ({"TF_CONFIG": tf_config("worker", "worker", mine="evaluator")}, False),
        ({"TF_CONFIG": "{}"}, False),
        ({}, False),
    ],
)
def test_processes_that_train_alone_side_by_side_are_warned(environ, warned, monkeypatch):
    lines = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    schedulers.warn_of_others(environ, "mirrored")
    assert bool(lines) == warned
    assert all("under 'mirrored' each of them trains a separate model" in line for line in lines)


def test_a_cluster_that_the_strategy_leaves_aside_is_warned_of(monkeypatch):
    import tfmulti

    lines = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    config = json.loads(tf_config("worker", "worker"))
    tfmulti.create_strategy("auto", devices=["CPU:0"], tf_config=config)
    [line] = lines
    assert "one of 2 processes, but under 'one_device' each of" in line


def test_auto_warns_of_a_cluster_beside_a_tpu(monkeypatch):
    import tfmulti
    from tfmulti import devices

    lines = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(devices, "has_tpu", lambda: True)
    config = json.loads(tf_config("worker", "worker"))
    with pytest.raises(RuntimeError, match="`tpu` needs a TPU"):
        tfmulti.create_strategy("auto", tf_config=config)
    [line] = lines
    assert "one of 2 processes, but under 'tpu' each of" in line


def test_restarts_of_slurm_are_counted():
    assert environment.count_restarts({"SLURM_RESTART_COUNT": "1", "TFMULTI_RESTARTS": "2"}) == 3
    assert environment.count_restarts({"TFMULTI_RESTARTS": ""}) == 0
    with pytest.raises(ValueError, match="Received: TFMULTI_RESTARTS='once'. Unset it"):
        environment.count_restarts({"TFMULTI_RESTARTS": "once"})


SRUN = """#!/bin/bash
echo "output of a task"
echo "error of a task" >&2
for code in $TASK_CODES; do
    if ((code)); then echo "srun: error: n1: task 0: Exited with exit code $code" >&2; fi
    most=$((code > most ? code : most))
done
exit $most
"""


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        ("0 0", 0, False),
        ("143 143", 143, True),
        ("144 137", 144, True),
        ("1 144 144", 144, False),
        ("144 2", 144, False),
        ("1", 1, False),
    ],
)
def test_the_script_requeues_a_job_only_where_no_program_has_failed(
    tmp_path, codes, code, requeued
):
    """As srun does, which ends with the highest exit code of its tasks, and tells each."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/bash\necho "scontrol $*"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "TASK_CODES": codes}
    script = MANIFESTS.parent / "slurm" / "train.sbatch"
    done = subprocess.run(["bash", script], env=environ, capture_output=True, text=True)
    assert (done.returncode, "scontrol requeue 7" in done.stdout) == (code, requeued)
    assert "output of a task\n" in done.stdout and "error of a task\n" in done.stderr
    assert ("Not requeued" in done.stdout) == ("1" in codes.split() or "2" in codes.split())
    environ["SLURM_RESTART_COUNT"] = "20"
    done = subprocess.run(["bash", script], env=environ, capture_output=True, text=True)
    assert "scontrol requeue 7\n" not in done.stdout
    assert ("Not requeued after 20 restarts" in done.stdout) == requeued


def test_auto_trains_one_task_as_the_devices_allow(monkeypatch):
    import tfmulti

    for name, value in {**SCRIPT, "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert type(tfmulti.create_strategy("auto")).__name__ == "OneDeviceStrategy"
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(cluster_lib.ClusterError, match="with srun"):
        tfmulti.create_strategy("auto")


def documents(name):
    import yaml

    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def pods(name):
    """The templates of a manifest's pods."""
    for document in documents(name):
        if document["kind"] == "Job":
            yield document["spec"]["template"]
        elif document["kind"] == "JobSet":
            for job in document["spec"]["replicatedJobs"]:
                yield job["template"]["spec"]["template"]
        elif document["kind"] == "TFJob":
            for replica in document["spec"]["tfReplicaSpecs"].values():
                yield replica["template"]


def validate(document):
    import kubernetes_validate

    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["indexed-job.yaml", "network-policy.yaml"])
def test_manifests_pass_the_schemas_of_kubernetes(name):
    import kubernetes_validate

    for document in documents(name):
        validate(document)
    spoilt = copy.deepcopy(document)
    spoilt["spec"]["podSelektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(spoilt)


@pytest.mark.parametrize("name", ["jobset.yaml", "tfjob.yaml", "tfjob-servers.yaml"])
def test_pods_of_the_operators_pass_the_schemas_of_kubernetes(name):
    templates = list(pods(name))
    assert templates
    for template in templates:
        validate({"apiVersion": "v1", "kind": "PodTemplate", "template": template})


def test_the_jobset_passes_the_models_of_its_api():
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    [document] = documents("jobset.yaml")
    # What the models do not know they leave out.
    assert JobsetV1alpha2JobSet.from_dict(copy.deepcopy(document)).to_dict() == document
    [job] = document["spec"]["replicatedJobs"]
    validate({"apiVersion": "batch/v1", "kind": "Job", **job["template"]})


@pytest.mark.parametrize(
    ("name", "roles"),
    [("tfjob.yaml", {"Worker": 2}), ("tfjob-servers.yaml", {"Chief": 1, "Worker": 2, "PS": 1})],
)
def test_the_tfjob_has_the_fields_of_its_api(name, roles):
    """By hand: of `kubeflow.org/v1` there are no schemas in a package that is small enough."""
    [document] = documents(name)
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v1", "TFJob")
    spec = document["spec"]
    assert set(spec) <= {"runPolicy", "successPolicy", "tfReplicaSpecs", "enableDynamicWorker"}
    assert spec["successPolicy"] in ("", "AllWorkers")
    assert set(spec["runPolicy"]) <= {"backoffLimit", "cleanPodPolicy", "ttlSecondsAfterFinished"}
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    replicas = spec["tfReplicaSpecs"]
    assert {role: each["replicas"] for role, each in replicas.items()} == roles
    for each in replicas.values():
        assert set(each) == {"replicas", "restartPolicy", "template"}
        assert each["restartPolicy"] == "ExitCode"
        [container] = each["template"]["spec"]["containers"]
        [port] = container["ports"]
        # The operator finds the container and the port by these names.
        assert (container["name"], port["name"]) == ("tensorflow", "tfjob-port")
    counts = {role.lower(): count for role, count in roles.items()}
    for kind, count in counts.items():
        for index in range(count):
            environ = {"TF_CONFIG": tfjob(kind, index, **counts)}
            cluster = resolve(environ, servers="ps" in counts)
            assert (cluster.task_type, cluster.task_index) == (kind, index)


@pytest.mark.parametrize(
    ("name", "host", "others"),
    [
        ("indexed-job.yaml", "train", {}),
        ("jobset.yaml", "train-workers-0", {"JOBSET_NAME": "train"}),
    ],
)
def test_the_variables_of_a_manifest_make_its_cluster(name, host, others):
    *_, document = documents(name)
    job = document["spec"]
    if document["kind"] == "JobSet":
        job = job["replicatedJobs"][0]["template"]["spec"]
    [template] = pods(name)
    [container] = template["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    clusters = [
        resolve({**given, **others, "JOB_COMPLETION_INDEX": str(i), "HOSTNAME": f"{host}-{i}"})
        for i in range(job["completions"])
    ]
    assert len({cluster.spec["worker"] for cluster in clusters}) == 1
    assert clusters[0].num_workers == job["parallelism"] == job["completions"]
    service = template["spec"].get("subdomain", "train")
    [port] = container["ports"]
    assert clusters[1].address == f"{host}-1.{service}:{port['containerPort']}"
    assert schedulers.KUBERNETES == clusters[1].source


@pytest.mark.parametrize(
    "name", ["indexed-job.yaml", "jobset.yaml", "tfjob.yaml", "tfjob-servers.yaml"]
)
def test_the_network_policy_is_for_the_pods_of_every_manifest(name):
    [policy] = documents("network-policy.yaml")
    labels = policy["spec"]["podSelector"]["matchLabels"]
    for template in pods(name):
        assert labels.items() <= template["metadata"]["labels"].items()
