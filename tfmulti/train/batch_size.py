"""`--per_replica_batch_size auto`: the largest batch that fits, the same on all workers.

Real training steps are run in a separate process, which may run out of memory: this module as a
program, `python -m tfmulti.train.batch_size REQUEST`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

from tfmulti import checkpoint, devices, hardware, topology
from tfmulti.checkpoint import generations
from tfmulti.checkpoint.on_chief import on_chief
from tfmulti.choices import AUTO
from tfmulti.cluster import environment
from tfmulti.data import distribute_train
from tfmulti.data.datasets import load_dataset
from tfmulti.runtime import command_line, errors, memory, processes
from tfmulti.strategies import coordination, create_strategy
from tfmulti.train import techniques
from tfmulti.train.config import TrainConfig
from tfmulti.train.models import compile_model, create_model, prepare_keras

LARGEST = 8192
_FIRST = 8
# Memory for validation, checkpoints and the first batches of an epoch, besides the steps.
_HEADROOM = 0.9
_ROUNDS = 3
_POLL_S = 0.02
_LAST_LINES = 5
STEPS = 3
MIN_STEPS_PER_EPOCH = 8


@dataclasses.dataclass(frozen=True)
class SizeTrial:
    """The result of a trial of some sizes, or of the whole search.

    Attributes:
        size: The largest number of examples of one replica that fitted; 0 for none.
        peak: The peak memory of a worker, or of its fullest GPU, with that size, in bytes.
        too_large: The smallest size that did not fit; None if all fitted.
        cap: The largest size with which an epoch has enough steps.
    """

    size: int
    peak: int
    too_large: int | None
    cap: int


def search(attempt: Callable[[list[int]], SizeTrial]) -> SizeTrial:
    """Finds the largest size that fits: by powers of two, then by bisection.

    Args:
        attempt: Function that runs sizes in order, in a fresh process, up to the first that does
            not fit.

    Raises:
        RuntimeError: If one example does not fit.

    Example:
    >>> def attempt(sizes):
    ...     fit = [size for size in sizes if size <= 100]
    ...     too_large = next((size for size in sizes if size > 100), None)
    ...     return SizeTrial(fit[-1] if fit else 0, 0, too_large, 900)
    >>> search(attempt).size
    96
    """
    sizes = [_FIRST]
    while sizes[-1] < LARGEST:
        sizes.append(2 * sizes[-1])
    best = attempt(sizes)
    too_large = best.too_large
    while not best.size and too_large > 1:
        best = attempt([too_large // 2])
        too_large = best.too_large or too_large
    if not best.size:
        raise RuntimeError(
            "One example per replica must fit in memory. Received: 1 did not. "
            "Use a larger --memory_limit, a smaller model or another device."
        )
    for _ in range(_ROUNDS):
        middle = _between(best.size, too_large)
        if middle is None:
            break
        tried = attempt([middle])
        if tried.size:
            best = tried
        else:
            too_large = middle
    return dataclasses.replace(best, too_large=too_large)


def _between(fits, too_large) -> int | None:
    """Returns a size in the middle, a multiple of eight if sizes are large, or None."""
    if too_large is None:
        return None
    middle = (fits + too_large) // 2
    if middle > 2 * _FIRST:
        middle -= middle % _FIRST
    return middle if middle > fits else None


def resolve_batch_size(
    config: TrainConfig, strategy: tf.distribute.Strategy, print_fn: Callable[[str], None]
) -> TrainConfig:
    """Returns the configuration with a number instead of `per_replica_batch_size="auto"`.

    Every worker searches on its own devices, and all take the smallest result. A run that resumes
    from a checkpoint keeps its batch size. Call it on every worker, before anything is created in
    the strategy's scope.

    Args:
        config: The run.
        strategy: The strategy of this worker.
        print_fn: Function of one line of text, for the chief.

    Raises:
        RuntimeError: If no size fits, or a step fails for another reason.
        ValueError: On a TPU, or for a model that is divided over workers.
    """
    if config.per_replica_batch_size != AUTO:
        return config
    techniques.check_batch_size(config)
    if isinstance(strategy, tf.distribute.TPUStrategy):
        raise ValueError(
            "`per_replica_batch_size=auto` runs steps in a separate process, which cannot use the "
            "TPU. Received: strategy tpu. Give a number, such as 128."
        )
    print_fn = print_fn if topology.is_chief(strategy) else lambda line: None
    num_replicas = strategy.num_replicas_in_sync
    kept = on_chief(strategy, lambda: _kept_batch_size(config)) or 0
    _, kept = coordination.min_and_max(strategy, kept)
    if kept:
        print_fn(f"per_replica_batch_size=auto: global batch size {kept}, as in the checkpoint")
        return _replace(config, kept)
    found, limit = _find(config, strategy, print_fn)
    size, _ = coordination.min_and_max(strategy, found.size)
    print_fn(f"per_replica_batch_size=auto: {size} ({_explain(size, found, limit)})")
    return _replace(config, size * num_replicas)


def _replace(config, global_batch_size):
    numbers = {"per_replica_batch_size": None, "global_batch_size": global_batch_size}
    return dataclasses.replace(config, memory_limit=None, **numbers)


def _smallest_gpu() -> int | None:
    """Returns the memory in bytes of the GPU that has the least, or None where it is unknown."""
    known = [gpu.memory_mib for gpu in hardware.read_driver().gpus if gpu.memory_mib]
    return min(known) << 20 if known else None


def _find(config, strategy, print_fn) -> tuple[SizeTrial, int | None]:
    limit = find_limit(config, strategy)
    room = "a GPU's memory" if limit is None else memory.show_size(limit)
    print_fn(f"per_replica_batch_size=auto: running real steps; the limit of a worker is {room}")
    num_local = topology.num_local_replicas(strategy)
    most = _smallest_gpu() if limit is None else limit
    allowed = None if most is None else int(most * _HEADROOM)

    def attempt(sizes):
        num_replicas = strategy.num_replicas_in_sync
        tried = try_in_child_process(config, sizes, num_replicas, num_local, allowed)
        fits = f"{tried.size} fits in {memory.show_size(tried.peak)}" if tried.size else ""
        fails = f"{tried.too_large} does not fit" if tried.too_large else ""
        print_fn(f"  {', '.join(filter(None, (fits, fails)))}")
        return tried

    return search(attempt), limit


def find_limit(config: TrainConfig, strategy: tf.distribute.Strategy) -> int | None:
    """Returns the memory limit of a worker in bytes; None for all memory of its GPUs.

    Without a GPU and a `memory_limit` it is half of what this host, or its container, has,
    divided by the workers on this host.
    """
    if config.memory_limit is not None:
        return memory.parse_size(config.memory_limit)
    if devices.has_gpu():
        return None
    return memory.available() // 2 // topology.num_workers_on_this_host(strategy)


def _kept_batch_size(config) -> int:
    """Returns the global batch size of the checkpoint to resume from; 0 without one."""
    if config.workdir is None or not config.resumes():
        return 0
    latest = generations.latest_good(Path(config.workdir) / checkpoint.FOLDER, lambda line: None)
    data = latest.state.get("data") if latest else None
    return data["global_batch_size"] if data else 0


def _explain(size, found, limit) -> str:
    if size < found.size:
        return "as another worker found"
    peak = memory.show_size(found.peak)
    room = peak if limit is None else f"{peak} of {memory.show_size(limit)}"
    if size == found.cap:
        return f"{room}; more would leave fewer than 8 steps in an epoch"
    return f"{room}; {found.too_large} did not fit" if found.too_large else room


def try_in_child_process(
    config: TrainConfig, sizes: list[int], num_replicas: int, num_local: int, limit: int | None
) -> SizeTrial:
    """Trains a few steps at each size in a fresh process, up to the first that does not fit.

    Args:
        config: The run.
        sizes: Examples of one replica, ascending.
        num_replicas: Replicas of the job.
        num_local: Replicas of this worker.
        limit: Memory limit in bytes of the process, or of its fullest GPU; None for the limit of
            the device.

    Raises:
        RuntimeError: If a step fails for another reason than memory.
    """
    request = {"sizes": sizes, "num_replicas": num_replicas, "num_local": num_local}
    settings = dataclasses.asdict(config)
    settings |= {"per_replica_batch_size": None, "memory_limit": None, "tf_config": None}
    # Stages are on devices of the process that tries them, too.
    strategy = config.strategy if config.has_stages_on_devices else "auto"
    request["config"] = {**settings, "strategy": strategy, "communication": "auto"}
    size = peak = cap = 0
    begun = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # GPU memory does not count as memory of the process.
        for message in _messages(request, None if devices.has_gpu() else limit, log):
            if "error" in message:
                raise _error(message["error"])
            begun = message.get("begins", begun)
            if "size" in message:
                cap = message["cap"]
                if limit is not None and message["peak"] > limit:
                    break
                size, peak, begun = message["size"], message["peak"], None
            elif "no_memory" in message:
                begun = begun or sizes[0]
        log.seek(0)
        words = " ".join(log.read().splitlines()[-_LAST_LINES:])
    if begun is None and not size:
        raise _error(words or "the process ended without an error message")
    return SizeTrial(size, peak, begun, cap)


def _messages(request, limit, log) -> Iterator[dict]:
    """Starts the process, and yields its messages; the process has ended when this returns."""
    command = [sys.executable, "-m", "tfmulti.train.batch_size"]
    reading, writing = os.pipe()
    environ = {k: v for k, v in os.environ.items() if k != environment.PROGRESS}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        process = subprocess.Popen(
            [*command, json.dumps({**request, "pipe": writing})],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ,
            pass_fds=[writing],
        )
    finally:
        os.close(writing)
    try:
        yield from _read(reading, process, limit)
    finally:
        os.close(reading)
        process.kill()
        process.stdin.close()
        process.wait()


def _read(reading, process, limit):
    rest = b""
    while True:
        if select.select([reading], [], [], _POLL_S)[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            yield from map(json.loads, lines)
        if limit is not None and memory.peak_of(process.pid) > limit:
            # End it before this host runs out of memory and kills another process.
            yield {"no_memory": "more than the limit"}
            return


def _error(words) -> RuntimeError:
    return RuntimeError(
        "`per_replica_batch_size=auto` runs some training steps, which must not fail. "
        f"Received: {words.rstrip('.')}. Give a number to see the whole error."
    )


def try_sizes(
    config: TrainConfig,
    sizes: list[int],
    num_replicas: int,
    num_local: int,
    report: Callable[..., None],
) -> None:
    """Trains a few steps at each batch size, the smallest first, with one model.

    Args:
        config: The run.
        sizes: Examples of one replica, ascending.
        num_replicas: Replicas of the job, over which the examples of an epoch are split.
        num_local: Replicas of this worker; the trial has as many.
        report: Called with `begins`, a size, and then with `size`, `peak` (peak memory in bytes)
            and `cap`, the largest size with which an epoch has enough steps.
    """
    config = dataclasses.replace(config, steps_per_execution=1)
    cpus = 0 if num_local == 1 or devices.has_gpu() else num_local
    cpus = config.logical_cpus if config.has_stages_on_devices else cpus
    kind = "one_device" if num_local == 1 else "mirrored"
    strategy = create_strategy(kind, logical_cpus=cpus, verify="never")
    prepare_keras(config)
    split, _ = load_dataset(config.dataset)

    def take(size):
        return distribute_train(
            split,
            strategy,
            size * num_local,
            seed=config.seed,
            remainder=config.remainder,
            steps_per_epoch=STEPS,
        )

    train = take(1)
    cap = max(1, train.plan.num_examples // (num_replicas * MIN_STEPS_PER_EPOCH))
    with strategy.scope():
        model = create_model(config.model, split)
        compile_model(model, config, train)
    for size in sizes:
        size = min(size, cap)
        report(begins=size)
        model.fit(take(size), epochs=1, shuffle=False, verbose=0)
        report(size=size, peak=_peak(), cap=cap)
        if size == cap:
            return


def _peak() -> int:
    if not devices.has_gpu():
        return memory.peak_of()
    return max(tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in devices.list_gpus())


def main() -> int:
    """Runs the sizes of the command line, and reports the results through a pipe."""
    processes.end_with_parent()
    request = json.loads(sys.argv[1])
    with os.fdopen(request.pop("pipe"), "w") as pipe:

        def report(**message):
            print(json.dumps(message), file=pipe, flush=True)

        try:
            try_sizes(TrainConfig(**request.pop("config")), report=report, **request)
        except Exception as error:
            if errors.is_out_of_memory(error):
                report(no_memory=errors.short_message(error))
            else:
                place = errors.place_of(error)
                report(error=errors.short_message(error) + (f" (at {place})" if place else ""))
    return 0


if __name__ == "__main__":
    command_line.run_and_exit(main)
