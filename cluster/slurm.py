"""Submitting a job to SLURM.

A submission is a folder in the run folder, made once and never changed: the script, the resolved
config and a copy of the code. Editing the checkout or the YAML leaves a queued job as it was.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.scheduler import of_run, queued_jobs, slurm_command
from cluster.script import Job, build

SOURCE = Path(__file__).parent.parent  # a checkout, or site-packages
PACKAGES = ("cluster", "commands", "configs", "data_pipeline", "model", "trainer", "tandem.py")


def plan_job(
    name: str,
    run: Path,
    cluster: ClusterConfig,
    seeds: Sequence[int] = (),
    chained: bool = False,
) -> Job:
    """The job that submitting from this working directory would make; touches nothing."""
    taken = [int(path.name) for path in run.glob("submissions/*") if path.name.isdigit()]
    return Job(
        name=name,
        run=run.resolve(),
        submission=run.resolve() / "submissions" / f"{max(taken, default=0) + 1:03d}",
        directory=Path.cwd(),
        python=cluster.python or ("python" if cluster.has_own_python else sys.executable),
        seeds=tuple(seeds),
        chained=chained,
    )


def submit(
    job: Job, cluster: ClusterConfig, config: str, length: int = 1, source: Path = SOURCE
) -> list[str]:
    """Write the submission's folder, hand it to sbatch, and return the ids of the jobs.

    `config` is the text of the resolved job config. A chain has `length` jobs, each of which starts
    when the one before has ended, however it ended. Raises LaunchError with SLURM's own words where
    it refuses, and where a job of this run is still queued.
    """
    text = build(job, cluster)
    _refuse_second(job)
    _write_submission(job, text, config, source)
    ids: list[str] = []
    try:
        for _ in range(length):
            after = [f"--dependency=afterany:{ids[-1]}"] if ids else []
            script = str(job.submission / "job.sbatch")
            ids.append(slurm_command("sbatch", "--parsable", *after, script).strip().split(";")[0])
    except LaunchError:
        if not ids:
            shutil.rmtree(job.submission)
        raise
    finally:
        if ids:
            (job.submission / "jobs").write_text("".join(f"{one}\n" for one in ids))
    return ids


def _refuse_second(job: Job) -> None:
    for other in of_run(queued_jobs() or [], job.run):
        raise LaunchError(
            f"{job.name}: job {other.id} of this run is {other.state.lower()}; "
            f"wait for it, or end it with: scancel {other.array}"
        )


def _write_submission(job: Job, text: str, config: str, source: Path) -> None:
    try:
        (job.run / "logs").mkdir(parents=True, exist_ok=True)  # SLURM does not make it
        job.submission.mkdir(parents=True)
        code = job.submission / "code"
        code.mkdir()
        for name in PACKAGES:
            _copy(source / name, code / name)
        (code / "REVISION").write_text(_revision(source))
        (job.submission / "config.yaml").write_text(config)
        (job.submission / "job.sbatch").write_text(text)
        if job.seeds:
            (job.submission / "seeds").write_text("".join(f"{seed}\n" for seed in job.seeds))
    except FileExistsError as error:
        raise LaunchError(f"{job.submission}: made by another submission; try again") from error
    except OSError as error:
        raise LaunchError(f"{error.filename}: {error.strerror}") from error


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    elif source.exists():
        shutil.copyfile(source, target)


def _revision(source: Path) -> str:
    """The git revision of the snapshot, or nothing where it is not a checkout."""
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40"]
    if not (source / ".git").exists() or not shutil.which("git"):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
