"""Runs the example under a real Slurm on this machine, and checks what comes of it.

    python experiments/slurm/one_host.py

Needs Debian's packages slurm-wlm and munge. Exits with 0 where all holds, 1 where something does
not, 2 where the packages lack.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from slurm_here import SlurmHere, find_missing

from tfmulti import checkpoint

HERE = Path(__file__).resolve().parent
TRAIN = ["-m", "tfmulti.train", "--strategy", "multi_worker"]
# A machine that is busy takes minutes to start two workers.
TIMEOUT_S = 500.0
DIGEST = re.compile(r"worker (\d+): weights_sha256=([0-9a-f]{64})")
RESOLVE = """
import json, os, tfmulti
cluster = tfmulti.resolve_cluster(check_network=False)
print(json.dumps([cluster.source, cluster.worker_index, cluster.spec["worker"]]))
"""


class Report:
    """Prints what was seen, line by line, and remembers whether all held."""

    def __init__(self):
        self.all_hold, self._began = True, time.monotonic()

    def print_fn(self, what: str, holds: bool, seen: object) -> None:
        """Prints one line."""
        self.all_hold &= bool(holds)
        seconds = time.monotonic() - self._began
        print(f"{seconds:4.0f} s  {'ok  ' if holds else 'FAIL'} {what}: {seen}", flush=True)


def main() -> int:
    """Runs all of it; returns the exit code."""
    missing = find_missing()
    if missing:
        print(
            f"error: This experiment needs Slurm and munge. Received: no {', '.join(missing)}. "
            "Install them with: apt-get install slurm-wlm munge",
            file=sys.stderr,
        )
        return 2
    report = Report()
    slurm = SlurmHere()
    with slurm, tempfile.TemporaryDirectory(prefix="slurm-runs-") as runs:
        slurm.environ |= {"PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "3"}
        report.print_fn("Slurm", True, slurm.run(["srun", "--version"]).stdout.strip())
        check_clusters(slurm, report)
        check_without_srun(slurm, report)
        digest = check_training(slurm, report, Path(runs))
        check_servers(slurm, report, Path(runs))
        check_requeue(slurm, report, Path(runs), digest)
        check_cancel(slurm, report, Path(runs))
    report.print_fn("processes left behind", not slurm.left_behind, len(slurm.left_behind))
    return 0 if report.all_hold else 1


def check_clusters(slurm: SlurmHere, report: Report) -> None:
    """All tasks of a step find the same cluster, each its own place in it."""
    for options in (
        ["--nodes=2", "--ntasks=3"],
        ["--nodes=2", "--ntasks=3", "--distribution=cyclic"],
        ["--nodes=1", "--ntasks=3", "--mpi=pmi2"],
        ["--nodes=1", "--ntasks=3", "--resv-ports=3"],
    ):
        # This Slurm can reserve ports, and then does so for every step.
        without = [] if "--resv-ports=3" in options else ["env", "-u", "SLURM_STEP_RESV_PORTS"]
        done = slurm.run(["srun", *options, *without, sys.executable, "-c", RESOLVE])
        found = [json.loads(line) for line in done.stdout.splitlines()]
        clusters = {json.dumps(workers) for _, _, workers in found}
        places = sorted(index for _, index, _ in found)
        alike = len(clusters) == 1 and {source for source, _, _ in found} == {"Slurm"}
        seen = f"workers {places} of {' and '.join(sorted(clusters)) or done.stderr}"
        report.print_fn(f"srun {' '.join(options)}", alike and places == [0, 1, 2], seen)


def check_without_srun(slurm: SlurmHere, report: Report) -> None:
    """The script of a job of several tasks does not train alone; that of one task may."""
    code = f"exec {sys.executable} -c '{RESOLVE}'"
    for number, (before, tasks, words) in enumerate(
        (([], 2, "with srun"), (["srun", "--overlap"], 2, "with srun"), ([], 1, '["Slurm", 0'))
    ):
        output = slurm.folder / f"alone-{number}"
        options = [f"--ntasks={tasks}", "--wait", f"--output={output}"]
        slurm.run([*before, "sbatch", *options, "--wrap", code])
        text = output.read_text().strip().splitlines()[-1]
        what = " ".join([*before, f"sbatch --ntasks={tasks}, without srun in it"])
        report.print_fn(what, words in text, text)
    done = slurm.run(["salloc", "--ntasks=2", sys.executable, "-c", RESOLVE])
    text = next((line for line in done.stderr.splitlines() if "Received" in line), done.stderr)
    report.print_fn("salloc --ntasks=2, without srun", "with srun" in done.stderr, text)


def check_training(slurm: SlurmHere, report: Report, runs: Path) -> str:
    """Two tasks train together; returns the digest of their weights."""
    command = ["srun", "--ntasks=2", sys.executable, *TRAIN, *flags_of(runs / "whole")]
    done = slurm.run(command)
    chosen = [line for line in done.stdout.splitlines() if "names a cluster" in line]
    report.print_fn("srun --ntasks=2", done.returncode == 0, f"exit code {done.returncode}")
    report.print_fn("where the cluster came from", bool(chosen), *(chosen or [done.stderr]))
    digests = dict(DIGEST.findall(done.stdout))
    same = len(digests) == 2 and len(set(digests.values())) == 1
    report.print_fn("weights_sha256 of both workers", same, sorted(set(digests.values())))
    return digests.get("0", "")


def check_servers(slurm: SlurmHere, report: Report, runs: Path) -> None:
    """Four tasks train as a chief, two workers and a parameter server."""
    workdir = runs / "servers"
    flags = ["--strategy=parameter_server", "--num_ps=1", *flags_of(workdir)]
    done = slurm.run(["srun", "--ntasks=4", sys.executable, "-m", "tfmulti.train", *flags])
    report.print_fn("srun --ntasks=4, --num_ps=1", done.returncode == 0, done.returncode)
    if done.returncode:
        print(done.stdout, done.stderr)
        return
    result = json.loads((workdir / "result.json").read_text())
    accuracy = result["metrics"]["val_accuracy"]
    report.print_fn("its workers", result["num_workers"] == 2, result["num_workers"])
    report.print_fn("validation accuracy", accuracy > 0.9, f"{accuracy:.3f}")


def check_requeue(slurm: SlurmHere, report: Report, runs: Path, digest: str) -> None:
    """A job that is told to end saves, is requeued, and comes to the same weights."""
    workdir, log = runs / "requeued", runs / "requeued.log"

    def text():
        return log.read_text() if log.exists() else ""

    job = submit(slurm, report, log, flags_of(workdir))
    # After the first epoch it has something to lose.
    slurm.wait_for(lambda: has_checkpoint(workdir), "the first checkpoint", TIMEOUT_S)
    slurm.run(["scancel", "--signal=TERM", job])
    slurm.wait_for(lambda: "restarts so far: 0" in text(), "the workers to end", TIMEOUT_S)
    [first] = re.findall("exit code ([0-9]+), restarts so far: 0", text())
    report.print_fn("scancel --signal=TERM", first == "143", f"exit code {first}")
    slurm.wait_for(lambda: "restarts so far: 1" in text(), "the second start to end", TIMEOUT_S)
    [second] = re.findall("exit code ([0-9]+), restarts so far: 1", text())
    report.print_fn("scontrol requeue, from the script", second == "0", f"exit code {second}")
    resumed = [line for line in text().splitlines() if "esum" in line or "goes on" in line]
    report.print_fn("it goes on from the checkpoint", bool(resumed), *(resumed[:1] or ["nothing"]))
    if second != "0":
        print(text())
        return
    result = json.loads((workdir / "result.json").read_text())
    report.print_fn("restarts in result.json", result["restarts"] == 1, result["restarts"])
    same = result["weights_sha256"] == digest
    report.print_fn("same weights as uninterrupted", same, result["weights_sha256"])


def check_cancel(slurm: SlurmHere, report: Report, runs: Path) -> None:
    """A job that is cancelled saves before Slurm's KillWait is over."""
    workdir, log = runs / "cancelled", runs / "cancelled.log"
    job = submit(slurm, report, log, ["--epochs=100000", *flags_of(workdir)[1:]])
    slurm.wait_for(lambda: has_checkpoint(workdir), "the first checkpoint", TIMEOUT_S)
    began = time.monotonic()
    slurm.run(["scancel", job])

    def is_over():
        shown = slurm.run(["scontrol", "show", "job", job]).stdout
        return "JobState=CANCELLED" in shown and "COMPLETING" not in shown

    slurm.wait_for(is_over, "the job to end", 100)
    seconds = time.monotonic() - began
    saved = [line for line in log.read_text().splitlines() if "saved step" in line]
    report.print_fn("scancel", saved, f"{' '.join(saved[:1])} after at most {seconds:.0f} s")


def submit(slurm: SlurmHere, report: Report, log: Path, flags: list[str]) -> str:
    """Submits the example with two tasks on one host; returns the job's number."""
    size = ["--nodes=1", "--ntasks-per-node=2", f"--output={log}"]
    script = [str(HERE / "train.sbatch"), *flags]
    submitted = slurm.run(["sbatch", "--parsable", *size, *script], cwd=log.parent)
    job = submitted.stdout.strip()
    report.print_fn("sbatch train.sbatch", job.isdecimal(), job or submitted.stderr)
    return job


def has_checkpoint(workdir: Path) -> bool:
    """Whether the run has saved something."""
    return bool(checkpoint.saved_in(workdir / checkpoint.FOLDER))


def flags_of(workdir: Path) -> list[str]:
    """Returns the flags of a run that takes some seconds."""
    return ["--epochs=20", "--model=mlp", "--workdir", str(workdir)]


if __name__ == "__main__":
    sys.exit(main())
