"""Submitting a job to SLURM, after a comparison with its partition's limits.

A submission is a folder in the run folder, written once and never changed: the script, the resolved
config, and copies of the code and of the job's plugins. Later edits of the checkout, the YAML or a
plugin do not affect a queued job.

SLURM accepts a job that exceeds its partition's limits, and leaves it pending forever. A QOS may
override its partition's limits: where the job names a QOS, SLURM decides.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.run_files import STAGES
from cluster.scheduler import NEVER_PASSES, cancel, of_run, queued_jobs, slurm_command
from cluster.script import TRAINING, Job, Work, build

UNLIMITED = ("UNLIMITED", "INFINITE")

Partition = dict[str, str]  # as scontrol shows it: PartitionName, MaxTime, MaxNodes, ...


def refuse_never_granted(cluster: ClusterConfig) -> None:
    """Raise LaunchError where the time or nodes exceed the limits of every requested partition.

    Also raises it where every partition gives less time than the ranks need to save.
    """
    partitions = _asked_for(cluster, _partitions())
    for refuse in (_refusal, _refusal_of_warning):
        refusals = [refuse(cluster, partition) for partition in partitions or [{}]]
        if all(refusals):
            raise LaunchError(str(refusals[0]))


def seconds(text: str) -> int | None:
    """Parse a time as sbatch does ("30", "2:00:00", "1-12") into seconds; None for no limit ("0").

    Raises ValueError for any other text.
    """
    if text.upper() in UNLIMITED:
        return None
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text, re.ASCII):
        raise ValueError(f"{text!r} is no time")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = [*parts, 0, 0][:3]
    elif len(parts) < 3:
        hours, minutes, secs = [0, *parts, 0][:3]
    else:
        hours, minutes, secs = parts
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs or None


def _partitions() -> list[Partition]:
    try:
        lines = slurm_command("scontrol", "-o", "show", "partition").splitlines()
    except LaunchError:
        return []  # sbatch reports this better
    return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]


def _asked_for(cluster: ClusterConfig, partitions: Sequence[Partition]) -> list[Partition]:
    """The partitions that the job may run in; for sbatch, the environment overrides the script."""
    names = os.environ.get("SBATCH_PARTITION") or cluster.sbatch.get("partition")
    if names is None:
        return [partition for partition in partitions if partition.get("Default") == "YES"]
    return [
        partition for partition in partitions if partition.get("PartitionName") in names.split(",")
    ]


def _refusal(cluster: ClusterConfig, partition: Partition) -> str | None:
    """Why the partition would never start this job; None where it may."""
    if not partition:
        return None
    name = partition["PartitionName"]
    least, most = cluster.node_counts[0], cluster.node_counts[-1]
    available = int(partition["TotalNodes"])
    if least > available:
        return f"nodes: {cluster.nodes} requested, but partition {name} has {available}"
    if "qos" in cluster.sbatch or "SBATCH_QOS" in os.environ:
        return None
    if partition["MaxNodes"].isdigit() and least > int(partition["MaxNodes"]):
        granted = partition["MaxNodes"]
        return f"nodes: {cluster.nodes} requested, but partition {name} allows at most {granted}"
    if partition["MinNodes"].isdigit() and most < int(partition["MinNodes"]):
        granted = partition["MinNodes"]
        return f"nodes: {cluster.nodes} requested, but partition {name} requires at least {granted}"
    return _time_refusal(cluster, partition)


def _time_asked(cluster: ClusterConfig) -> str | None:
    return os.environ.get("SBATCH_TIMELIMIT") or cluster.sbatch.get("time")


def _refusal_of_warning(cluster: ClusterConfig, partition: Partition) -> str | None:
    """Why each start would be told to save before it has trained; None where it has time."""
    asked = cluster.sbatch.get("time-min") or _time_asked(cluster)
    default = partition.get("DefaultTime", "NONE")
    limit = asked or (partition.get("MaxTime") if default == "NONE" else default) or "UNLIMITED"
    try:
        granted = seconds(limit)
    except ValueError:
        return None  # sbatch reports this better
    if granted is None or granted > cluster.warning_seconds:
        return None
    source = "sbatch.time" if asked else f"partition {partition['PartitionName']}"
    return (
        f"warning_seconds: the ranks would save {cluster.warning_seconds} s before the time limit "
        f"of {limit} ({source}), before they have trained; set it lower, or ask for more time"
    )


def _time_refusal(cluster: ClusterConfig, partition: Partition) -> str | None:
    asked = _time_asked(cluster)
    if asked is None or "time-min" in cluster.sbatch:
        return None
    try:
        wanted, granted = seconds(asked), seconds(partition["MaxTime"])
    except ValueError:
        return None  # sbatch reports this better
    if granted is None or (wanted is not None and wanted <= granted):
        return None
    name, most = partition["PartitionName"], partition["MaxTime"]
    return f"sbatch.time: {asked} requested, but partition {name} allows at most {most}"


SOURCE = Path(__file__).parent.parent  # a checkout, or site-packages
PACKAGES = ("cluster", "commands", "configs", "data_pipeline", "model", "trainer", "tandem.py")

# When sbatch's answer is lost: how often the queue is read, and the pause before each read.
QUEUE_READS, PAUSE_SECONDS = 5, 3.0


class AnswerLost(LaunchError):
    """It is unknown whether SLURM accepted a job, so its submission folder stays."""


def plan_job(
    name: str,
    run: Path,
    cluster: ClusterConfig,
    seeds: Sequence[int] = (),
    chained: bool = False,
    work: Work = TRAINING,
) -> Job:
    """The job that a submission from this working directory would create; writes nothing."""
    taken = [int(path.name) for path in run.glob("submissions/*") if path.name.isdigit()]
    return Job(
        name=name,
        run=run.resolve(),
        submission=run.resolve() / "submissions" / f"{max(taken, default=0) + 1:03d}",
        directory=Path.cwd(),
        python=cluster.python or ("python" if cluster.has_own_python else sys.executable),
        seeds=tuple(seeds),
        chained=chained,
        work=work,
    )


def submit(
    job: Job, cluster: ClusterConfig, config: str, length: int = 1, source: Path = SOURCE
) -> list[str]:
    """Write the submission's folder, pass it to sbatch, and return the ids of the jobs.

    `config` is the text of the resolved job config. A chain has `length` jobs; each starts when
    the one before has ended, in whatever state. Raises LaunchError where SLURM refuses the job,
    would never start it, or still has a job of this run in its queue; nothing is left behind then.
    """
    text = build(job, cluster)
    _refuse_second(job)
    refuse_never_granted(cluster)
    made = _claim(job)
    ids: list[str] = []
    try:
        _write_submission(job, text, config, source)
        for _ in range(length):
            ids.append(_hand_over(job, ids))
            (job.submission / "jobs").write_text("".join(f"{job_id}\n" for job_id in ids))
        _refuse_endless_wait(ids)
    except AnswerLost:
        raise
    except LaunchError:
        _take_back(job, ids, made)
        raise
    except OSError as error:
        _take_back(job, ids, made)
        raise _unwritable(job, error) from error
    return ids


def _hand_over(job: Job, before: Sequence[str]) -> str:
    """The id of the next job of this submission."""
    after = [f"--dependency=afterany:{before[-1]}"] if before else []
    script = str(job.submission / "job.sbatch")
    try:
        answer = slurm_command("sbatch", "--parsable", *after, script)
    except LaunchError as error:
        if "timed out" not in str(error).lower():
            raise
        return _accepted_all_the_same(job, script, before, error)
    return answer.strip().split(";")[0]


def _accepted_all_the_same(job: Job, script: str, before: Sequence[str], error: LaunchError) -> str:
    """Look in the queue for a job that SLURM accepted although sbatch timed out; returns its id.

    The job is recognised by its script's path, which is unique. Raises `error` where there is none.
    """
    answered = False
    for _ in range(QUEUE_READS):
        time.sleep(PAUSE_SECONDS)
        try:
            queue = queued_jobs() or []
        except LaunchError:
            continue
        answered = True
        for queued in queue:
            if queued.script == script and queued.array not in before:
                return queued.array
    if answered:
        raise error
    raise AnswerLost(
        f"{error}; squeue does not answer either, so the job may have been accepted. Before you "
        f"submit it again, check with: squeue --name {shlex.quote(job.name)}"
    ) from error


def _refuse_endless_wait(ids: Sequence[str]) -> None:
    """Raise LaunchError for a job that SLURM accepted but will never start."""
    for queued in queued_jobs() or []:
        if queued.array in ids and queued.reason in NEVER_PASSES:
            raise LaunchError(
                f"job {queued.array} would never start: {NEVER_PASSES[queued.reason]} "
                f"({queued.reason}); it was cancelled"
            )


def _claim(job: Job) -> list[Path]:
    """Create the submission's folder and the log folder; returns the new ones, innermost first.

    Raises LaunchError where that fails, or where another submission has just taken the number.
    """
    logs = job.run / "logs"  # SLURM does not create it
    folders = [job.submission, logs, *job.submission.parents]
    made = [folder for folder in folders if not folder.exists()]
    try:
        job.submission.mkdir(parents=True)
        logs.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise LaunchError(
            f"{job.submission}: another submission took this number; try again"
        ) from error
    except OSError as error:
        raise _unwritable(job, error) from error
    return made


def _unwritable(job: Job, error: OSError) -> LaunchError:
    return LaunchError(f"{error.filename or job.submission}: {error.strerror or error}")


def _take_back(job: Job, ids: Sequence[str], made: Sequence[Path]) -> None:
    """Undo a submission: cancel its jobs, and remove the folders it made that are empty again."""
    if ids:
        cancel(ids)
    shutil.rmtree(job.submission, ignore_errors=True)
    for folder in made[1:]:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _refuse_second(job: Job) -> None:
    for other in of_run(queued_jobs() or [], job.run):
        raise LaunchError(
            f"{job.name}: job {other.id} of this run is {other.state.lower()}; "
            f"wait for it, or cancel it with: scancel {other.array}"
        )


def _write_submission(job: Job, text: str, config: str, source: Path) -> None:
    code = job.submission / "code"
    code.mkdir()
    for name in PACKAGES:
        _copy(source / name, code / name)
    (code / "REVISION").write_text(_revision(source))
    config = _with_own_plugins(config, job.submission)
    (job.submission / job.work.config).write_text(config, encoding="utf-8")
    (job.submission / "job.sbatch").write_text(text, encoding="utf-8")
    if not job.work.trains:
        (job.submission / STAGES).write_text("".join(f"{stage}\n" for stage in job.work.stages))
    if job.seeds:
        (job.submission / "seeds").write_text("".join(f"{seed}\n" for seed in job.seeds))


def _with_own_plugins(config: str, submission: Path) -> str:
    """The config with the paths of copies of its plugins, each in a folder of its own.

    They keep their names, which messages about them have. The rest of the text stays as it is: only
    the schema knows whether ``1e-4`` is a number or the name of a run.
    """
    root = yaml.compose(config)
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    lists = [value for key, value in entries if key.value == "plugins"]
    if not lists or not lists[0].value:
        return config
    copies = []
    for number, path in enumerate((item.value for item in lists[0].value), 1):
        copy = submission / "plugins" / str(number) / Path(path).name
        copy.parent.mkdir(parents=True)
        shutil.copyfile(path, copy)
        copies.append(str(copy))
    first, last = lists[0].start_mark.index, lists[0].end_mark.index
    return f"{config[:first]} {json.dumps(copies, ensure_ascii=False)}\n{config[last:]}"


def _copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder without caches; the copies follow the umask, not the originals."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    elif source.is_dir() and source.name != "__pycache__":
        for path in source.iterdir():
            _copy(path, target / path.name)


def _revision(source: Path) -> str:
    """The git revision of the snapshot; empty outside a checkout."""
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40"]
    if not (source / ".git").exists() or not shutil.which("git"):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
