"""Workers, replicas and the chief of a strategy."""

import types

import pytest
import tensorflow as tf

import tfmulti
from tfmulti import topology

SPEC = {"chief": ["a:1"], "worker": ["a:2", "b:1"]}


class Workers(tf.distribute.MultiWorkerMirroredStrategy):
    """What the module asks of a worker's strategy, without the other workers."""

    cluster_resolver = extended = None

    def __init__(self, task_type, task_id, num_local):
        spec = tf.train.ClusterSpec(SPEC)
        self.cluster_resolver = types.SimpleNamespace(
            cluster_spec=lambda: spec, task_type=task_type, task_id=task_id
        )
        self.extended = types.SimpleNamespace(worker_devices=["CPU"] * num_local)


@pytest.mark.parametrize(
    ("task", "index", "here"), [(("chief", 0), 0, 2), (("worker", 0), 1, 2), (("worker", 1), 2, 1)]
)
def test_workers_are_counted_from_the_chief(task, index, here):
    strategy = Workers(*task, num_local=2)
    assert topology.num_workers(strategy) == 3
    assert topology.worker_index(strategy) == index
    assert topology.worker_names(strategy) == ("chief 0", "worker 0", "worker 1")
    assert topology.worker_name(strategy) == f"{task[0]} {task[1]}"
    assert topology.num_workers_on_this_host(strategy) == here
    assert topology.first_local_replica(strategy) == 2 * index
    assert topology.local_batch_indices(strategy) == (index, index + 3)


def test_one_process_is_worker_0():
    strategy = tfmulti.create_strategy("mirrored", logical_cpus=3)
    assert topology.num_workers(strategy) == 1
    assert topology.worker_names(strategy) == ("worker 0",)
    assert topology.is_chief(strategy)
    assert topology.local_batch_indices(strategy) == (0, 1, 2)

    def numbers():
        context = tf.distribute.get_replica_context()
        local, batch = topology.local_replica_index(context), topology.replica_batch_index(context)
        assert topology.is_one_of_several_replicas()
        return local, batch, topology.is_first_local_replica()

    local, batch, first = map(strategy.experimental_local_results, strategy.run(numbers))
    assert list(map(int, local)) == list(map(int, batch)) == [0, 1, 2]
    assert list(map(bool, first)) == [True, False, False]
    assert not topology.is_one_of_several_replicas()
