"""Questions to SLURM: its queue, its accounting, and when it would start a job."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config import without_own
from cluster.errors import LaunchError

ANSWER_SECONDS = 20.0  # timeout: an estimate is not worth a longer wait
ACCOUNTING_SECONDS = 20.0  # timeout: its database may be slow or down, and only adds details
JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")

# Reasons for which a job stays pending forever, and the option at fault.
NEVER_PASSES = {
    "PartitionTimeLimit": "--time is more than its partition allows",
    "PartitionNodeLimit": "--nodes is not a number that its partition allows",
    "BadConstraints": "no node meets its constraints",
    "QOSMaxWallDurationPerJobLimit": "--time is more than its QOS allows",
    "QOSMaxNodePerJobLimit": "--nodes is more than its QOS allows",
    "AssocMaxWallDurationPerJobLimit": "--time is more than its account allows",
    "AssocMaxNodePerJobLimit": "--nodes is more than its account allows",
    "InvalidAccount": "--account is not one of this user's",
    "InvalidQOS": "--qos is not one of this account's",
    "DependencyNeverSatisfied": "the job that it depends on did not end as required",
}


@dataclass(frozen=True)
class QueuedJob:
    """A job in SLURM's queue."""

    id: str  # as scancel takes it; ID_INDEX for a task of an array
    number: str  # SLURM_JOB_ID, which is unique to a task of an array
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # why it is pending
    script: str = ""  # its path

    @property
    def array(self) -> str:
        """The id of the whole job array; for any other job, its id."""
        return self.id.partition("_")[0]

    @property
    def index(self) -> str:
        """The index of an array task; for pending tasks, a list in brackets."""
        return self.id.partition("_")[2]


def job_ids(run: Path) -> list[str]:
    """The ids of all jobs ever submitted for a run, oldest first."""
    return [job_id for file in sorted(run.glob("submissions/*/jobs")) for job_id in words(file)]


def words(file: Path) -> list[str]:
    """The words of a small file; of one that is damaged, some may be strange or missing."""
    return file.read_text(encoding="utf-8", errors="replace").split()


def queued_jobs() -> list[QueuedJob] | None:
    """This user's jobs that are pending or running; None where there is no SLURM.

    Raises LaunchError with SLURM's own words when the queue cannot be read.
    """
    if not shutil.which("squeue"):
        return None
    form = "%i|%A|%T|%r|%o"
    lines = slurm_command("squeue", "-h", "-u", str(os.getuid()), "-o", form).splitlines()
    rows = (line.split("|", 4) for line in lines)
    return [QueuedJob(*row) for row in rows if len(row) == 5]  # a command may have several lines


def of_run(jobs: Iterable[QueuedJob], run: Path) -> list[QueuedJob]:
    """The jobs that were submitted for this run."""
    ids, scripts = set(job_ids(run)), f"{run.resolve()}/submissions/"
    return [job for job in jobs if job.array in ids or job.script.startswith(scripts)]


def recorded_ends(ids: Sequence[str]) -> dict[str, str]:
    """Final states from SLURM's accounting, by SLURM_JOB_ID: OUT_OF_MEMORY, NODE_FAIL, CANCELLED.

    A job counts as out of memory where any of its steps was. Empty without accounting.
    """
    known = [job_id for job_id in ids if JOB_ID.fullmatch(job_id)]  # not what a damaged file holds
    if not known or not shutil.which("sacct"):
        return {}
    try:
        form = ("-n", "-P", "-o", "JobIDRaw,State")
        lines = slurm_command("sacct", "-j", ",".join(known), *form, seconds=ACCOUNTING_SECONDS)
    except LaunchError:
        return {}
    ends: dict[str, str] = {}
    for line in lines.splitlines():
        number, _, state = line.partition("|")
        job = number.partition(".")[0]
        word = state.partition(" ")[0]  # of "CANCELLED by 1000"
        if job not in ends or word == "OUT_OF_MEMORY":
            ends[job] = word
    return ends


def expected_start(script: str) -> str | None:
    """When SLURM would start this script, such as 2026-05-01T12:00:00; None where it does not say.

    None does not mean that the job would be refused: its nodes may only be down for an hour.
    Raises LaunchError for an option that sbatch does not know.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--test-only"],
            input=script,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if unknown := re.search(r"^sbatch: unrecognized option .*", done.stderr, re.M):
        raise LaunchError(unknown[0])
    match = re.search(r" to start at (\S+) ", done.stderr)
    return match[1] if match else None


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs, or tasks of arrays. Raises LaunchError."""
    slurm_command("scancel", *ids)


def slurm_command(*argv: str, seconds: float | None = None) -> str:
    """The output of a SLURM command. Raises LaunchError with its error messages, on one line."""
    env = without_own(os.environ)
    try:
        result = subprocess.run(
            argv,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",  # another job's script may have any name
            check=False,
            timeout=seconds,
        )
    except FileNotFoundError:
        raise LaunchError(f"{argv[0]} is not installed here: submit from a login node") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{argv[0]}: no answer for {seconds:.0f} s") from None
    if result.returncode:
        prefix = re.compile(rf"{argv[0]}: (error: |fatal: )?")
        lines = result.stderr.splitlines()
        fatal = [line for line in lines if line.startswith(f"{argv[0]}: fatal: ")]
        words = [prefix.sub("", line, count=1) for line in fatal or lines]
        raise LaunchError(f"{argv[0]}: {'; '.join(filter(None, words))}")
    return result.stdout
