"""Workers that are unlike one another are told: other layers, losses, learning rates, weights."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "unlike_worker.py"
SAME_MODEL = "All workers must train the same model"
SAME_START = "All workers must begin with the same weights and states of layers"
SAME_WEIGHTS = "All workers must have the same weights and learning rates"


def assert_places(told, who, alone, others):
    """Asserts that an error names what one worker does alone, and what the other does."""
    here, there = (others, alone) if who == "chief" else (alone, others)
    assert f"on worker 1 {here}" in told and f"on the first worker {there}" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, rule, received",
    [
        ("slope", SAME_MODEL, "worker 1 differs from the first worker in layer 5 (LeakyReLU)"),
        ("order", SAME_MODEL, "in layer 2 (Dense), layer 3 (Dense)"),
        ("words", SAME_MODEL, "from the first worker in layer 2 (StringLookup)"),
        ("statistics", SAME_START, "on worker 1: normalization/mean, normalization/variance"),
        ("frozen weights", SAME_START, "on worker 1: sequential/dense_1/kernel"),
        ("rows of a table", SAME_START, "on worker 1: sequential/dense_2/kernel"),
        ("statistics, sharded", SAME_START, "on worker 1: normalization/mean, normalization/var"),
        ("rows of a table, sharded", SAME_START, "on worker 1: sequential/dense_2/kernel"),
        ("weights, sharded", SAME_WEIGHTS, "in its weights, after epoch 1"),
        ("loss", SAME_MODEL, "from the first worker in loss"),
        ("rate", SAME_WEIGHTS, "learning rates ([0.5] here), after epoch 1"),
        ("weights", SAME_WEIGHTS, "in its weights, after epoch 1"),
    ],
)
def test_what_one_worker_has_otherwise_is_told(run_workers, case, rule, received):
    told = "".join(run_workers(2, [PROGRAM, case], check=False))
    assert rule in told and received in told
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, received",
    [
        ("rows", "in `x` the arrays on worker 1 differ in shape or values from those on the first"),
        ("own rows", "in `x` the arrays on worker 1 differ"),
        ("own stream", "in `x` the arrays on worker 1 differ"),
        ("fewer", "(12, 4) here, (16, 4) there"),
        ("labels", "in `y` the arrays on worker 1 differ in shape or values from those on the"),
        ("validated labels", "in `validation_data` the arrays on worker 1 differ"),
    ],
)
def test_other_data_on_one_worker_are_told(run_workers, case, received):
    told = "".join(run_workers(2, [PROGRAM, case], check=False))
    assert "Every worker must be given the whole data" in told and received in told
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, rule, received",
    [
        ("plain without a seed", "same order on every worker", "a shuffle without a seed"),
        ("plain seeds", "the same dataset of all rows", "in `x` the dataset on worker 1 is made"),
        ("plain shards", "the same dataset of all rows", "in `x` the dataset on worker 1 is made"),
        ("plain evaluated shards", "the same dataset of all rows", "on worker 1 is made of other"),
        ("plain predicted seeds", "the same dataset of all rows", "on worker 1 is made of other"),
        ("python", "batches of a `PyDataset` in the same order", "another state on worker 1"),
    ],
)
def test_another_order_of_plain_data_on_one_worker_is_told(run_workers, case, rule, received):
    told = "".join(run_workers(2, [PROGRAM, case], check=False))
    assert rule in told and received in told
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize("case, place", [("own order", 1), ("later order", 3)])
def test_another_order_of_batches_from_python_is_told(run_workers, case, place):
    told = "".join(run_workers(2, [PROGRAM, f"python unshuffled {case}"], check=False))
    assert "All workers must read the same batches" in told
    assert f"in batch {place} of this pass the labels on worker" in told
    assert "trained" not in told


@pytest.mark.slow
def test_other_inputs_with_the_same_labels_are_warned_of(run_workers):
    for each in run_workers(2, [PROGRAM, "python unshuffled own inputs"]):
        assert "Workers read different inputs: in batch 1 of this pass" in each
        assert "trained" in each


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("plain", "python alike", "python unshuffled", "same words", "same state"),
        "same state, sharded",
    ],
)
def test_plain_data_of_one_order_are_trained_on(run_workers, case):
    assert all("trained" in each for each in run_workers(2, [PROGRAM, case]))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["chief", "other"])
def test_a_checkpoint_on_one_worker_alone_is_told_before_it_trains(run_workers, who):
    told = "".join(run_workers(2, [PROGRAM, f"{who} saves"], check=False))
    assert "All workers must build the same model" in told
    assert "callbacks=[Checkpoint, ...])" in told
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize("case", ["epochs", "validation"])
def test_other_settings_of_fit_on_one_worker_are_told_before_it_trains(run_workers, case):
    told = "".join(run_workers(2, [PROGRAM, case], check=False))
    here, there = {
        "epochs": ("fit(batch_size=16, epochs=3)", "fit(batch_size=16, epochs=2)"),
        "validation": ("fit(batch_size=16, epochs=2)", ", validation_data=...)"),
    }[case]
    assert f"worker 1 a call of {here}" in told and there in told
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["stop", "stop and save", "batches", "evaluated batches", "predicted batches"]
)
def test_a_worker_that_ends_a_pass_alone_is_told(run_workers, case):
    told = "".join(run_workers(2, [PROGRAM, case], check=False))
    assert "All workers must reach the end of a pass over the data together" in told
    assert "worker 1 reached it, but worker 0 did not within " in told
    assert "waiting for worker 0 to reach the end of a pass over the data" in told
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize("who", ["chief", "other"])
@pytest.mark.parametrize("when", ["after an epoch", "amid an epoch", "at the end"])
def test_a_call_in_a_callback_of_one_worker_alone_is_told(run_workers, who, when):
    told = "".join(run_workers(2, [PROGRAM, f"{who} {when}"], check=False))
    call, other = "a call of evaluate(", "the end of"
    if when == "amid an epoch":
        assert "All workers must reach a call of predict() together" in told
    else:
        assert_places(told, who, call, other)
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize("who", ["chief", "other"])
def test_one_worker_that_predicts_a_batch_alone_by_weights_of_others_is_told(run_workers, who):
    told = "".join(run_workers(2, [PROGRAM, f"{who} by shards"], check=False))
    call, other = "a call of predict_on_batch()", "a call of fit("
    assert_places(told, who, call, other)
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize("who", ["chief", "other"])
@pytest.mark.parametrize("when", ["after an epoch", "amid an epoch"])
def test_a_metric_that_one_worker_alone_reads_is_told(run_workers, who, when):
    told = "".join(run_workers(2, [PROGRAM, f"{who} reads a metric {when}"], check=False))
    read = "a read of a metric's result outside of a step"
    if when == "amid an epoch":
        assert f"All workers must reach {read} together" in told
    else:
        assert_places(told, who, read, "the end of")
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize("who", ["chief", "other"])
def test_a_callback_that_reads_weights_of_others_on_one_worker_alone_is_told(run_workers, who):
    told = "".join(run_workers(2, [PROGRAM, f"{who} keeps the best"], check=False))
    read = "EarlyStopping.on_epoch_end, which reads state of all workers"
    assert_places(told, who, read, "the end of")
    assert "trained" not in told


@pytest.mark.slow
@pytest.mark.parametrize("case, steps", [("stop together", 1), ("stop at the end", 2)])
def test_workers_that_stop_together_do_as_one_device(run_workers, case, steps):
    seen = run_workers(2, [PROGRAM, case])
    assert all(f"trained {steps} steps" in each for each in seen)


@pytest.mark.slow
def test_names_and_seeds_are_no_difference(run_workers):
    assert all("trained" in each for each in run_workers(2, [PROGRAM, "alike"]))


@pytest.mark.slow
def test_sums_in_another_order_over_mpi_are_told(run_workers, mpiexec):
    """MPI itself would wait for ever."""
    told = "".join(run_workers(2, [PROGRAM, "gradients"], check=False, options=("--mpi",)))
    assert "must call MPI's collectives in the same order" in told
    assert "all-reduce of shape (4, 2048) on worker 0" in told
    assert "all-reduce of shape (2048,) on worker 1" in told
    assert "trained" not in told
