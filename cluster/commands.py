"""One plain function per cluster command; `commands/` calls them."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import configs
from cluster.config import ClusterConfig, with_options
from cluster.errors import LaunchError
from cluster.run_files import trains
from cluster.scheduler import QueuedJob, cancel, expected_start, of_run, queued_jobs
from cluster.script import TRAINING, Work, build
from cluster.slurm import plan_job, refuse_never_granted
from cluster.slurm import submit as submit_job
from cluster.status import is_array, read_array, read_one, read_runs, table, to_json
from configs.errors import OptionError
from configs.runs import is_run


def submit(
    name: str,
    run: Path,
    config: str,
    cluster: str | None = None,
    options: Sequence[str] = (),
    seeds: Sequence[int] = (),
    chain: int = 1,
    dry_run: bool = False,
    batches: Sequence[int] = (),
    work: Work = TRAINING,
) -> None:
    """``tandem submit``: submit a job to SLURM, or with `dry_run` print its script.

    Args:
        run: the run folder.
        config: the text of the resolved config of a job or suite.
        cluster: a name or file of ``configs/cluster``.
        options: the rest of the command line (``--nodes 4 --time 24:00:00``).
        seeds: each gets a run of its own, NAME-seedSEED.
        batches: global batch sizes; each must divide evenly over the ranks.
        work: the stages of the job.

    Raises LaunchError and ConfigError.
    """
    if seeds and chain > 1:
        raise OptionError("--chain: cannot be combined with --seeds; submit one chain per seed")
    site = _site(cluster, options)
    _require_equal_shares(batches, site)
    if "evaluate" in work.stages and site.node_counts[-1] > 1:
        raise LaunchError(f"nodes: {site.nodes}: an evaluation runs on one node; add --nodes 1")
    job = plan_job(name, run, site, seeds, chained=chain > 1, work=work)
    script = build(job, site)
    start = expected_start(script)  # an option that sbatch does not know is refused here
    if dry_run:
        print(script, end="")
        return
    ids = submit_job(job, site, config, chain)
    follow = f"tandem status {shlex.quote(str(run))}"
    print(f"Submitted {name} as job {', '.join(ids)}. To follow it: {follow}")
    if start:
        print(f"SLURM expects it to start at {start.replace('T', ' ')}")
    logs = f"{job.run}-seedN/logs" if seeds else job.run / "logs"
    print(f"Logs will be in {logs}; the script is {job.submission / 'job.sbatch'}")


def refuse_options(cluster: str | None, options: Sequence[str]) -> None:
    """Raise the error of options that no job could be submitted with, whatever it trains.

    Called before a job's data is prepared, which may take hours. Arguments and errors are those
    of `submit`.
    """
    site = _site(cluster, options)
    expected_start(build(plan_job("job", Path("job"), site), site))
    refuse_never_granted(site)


def _site(cluster: str | None, options: Sequence[str]) -> ClusterConfig:
    site = configs.load(cluster, ClusterConfig, "cluster") if cluster else ClusterConfig()
    site = with_options(site, options)
    refuse_broken(site)
    return site


def _require_equal_shares(batches: Sequence[int], site: ClusterConfig) -> None:
    """Check before submitting, so that a job does not fail after its wait in the queue."""
    for size in batches:
        for nodes in site.node_counts:  # ends soon: of a long range, some number fits no batch
            if size % (nodes * site.ranks):
                raise LaunchError(
                    f"batch: {size} sequences do not divide over {nodes} x {site.ranks} ranks; "
                    f"choose a multiple of {nodes * site.ranks}, or change nodes ({site.nodes})"
                )


def cancel_waiting(run: Path, is_live: bool) -> tuple[list[str], bool]:
    """``tandem stop``, for jobs of SLURM that read no request: the rest of a chain, or a start.

    is_live: whether a process of the run can be asked to stop. Without one, a job that SLURM has
    started is before its training, or between two starts.
    Returns lines that say what was done, and whether a job of the run has or may have started.
    An unreadable queue becomes one of the lines, so that a live run can still be stopped.
    Raises LaunchError where SLURM refuses to cancel.
    """
    if not (run / "submissions").exists():
        return [], False
    try:
        jobs = of_run(queued_jobs() or [], run)
    except LaunchError as error:
        return [
            f"{run}: queued jobs are not cancelled, SLURM's queue cannot be read: {error}"
        ], True
    waiting = [job.id for job in jobs if job.state == "PENDING"]
    started = [job.id for job in jobs if job.state != "PENDING"]
    lines = []
    if waiting:
        cancel(waiting)
        lines = [f"{run}: cancelled before it started: job {', '.join(waiting)}"]
    if started and not (trains(run) and (is_live or is_array(run) or _is_finished(run, jobs))):
        cancel(started)
        lines += [f"{run}: cancelled job {', '.join(started)}; what it has done stays"]
        started = []
    if started and is_array(run):
        lines += [f"{run}: job {', '.join(started)} keeps running; stop each run: {run}-seedN"]
    return lines, bool(started) and not is_array(run)


def _is_finished(run: Path, jobs: Sequence[QueuedJob]) -> bool:
    """Whether only commands of `at_end` are left of a run."""
    return read_one(run, jobs).state == "finished"


def status(run: str | None, as_json: bool, root: Path = Path("runs")) -> None:
    """``tandem status``: one run (a folder, or a name under `root`), or all of them.

    The name of a seed array selects the runs of all its seeds.
    """
    jobs, remark = None, ""
    try:
        jobs = queued_jobs()
    except LaunchError as error:
        remark = f"SLURM's queue cannot be read: {error}"
    if run is None:
        runs = read_runs(root, jobs)
    else:
        folder = next(filter(is_run, (Path(run), root / run)), None)
        if folder is None:
            raise LaunchError(f"{run}: not a run: no job has begun in {run} or {root / run}")
        runs = read_array(folder, jobs) if is_array(folder) else [read_one(folder, jobs)]
    if as_json:
        print(to_json(runs))
        return
    console = Console()
    console.soft_wrap = not console.is_terminal  # a pipe has no width: a broken path is no path
    console.print(table(runs) if runs else f"no runs in {root}")
    if remark and list(root.glob("*/submissions")):
        console.print(Text(remark, style="dim"))


def refuse_broken(cluster: ClusterConfig) -> None:
    """Raise LaunchError for a command in `before`, `after` or `at_end` that bash cannot parse."""
    for key in ("before", "after", "at_end"):
        for number, line in enumerate(getattr(cluster, key), start=1):
            if words := _complaint(line):
                raise LaunchError(f"{key}[{number - 1}]: {line!r}: {words}")


def _complaint(line: str) -> str:
    """Bash's syntax error for a line; empty where there is none, or no bash."""
    if not shutil.which("bash"):
        return ""
    read = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
    told = read.stderr.strip().splitlines()[:1]
    return "".join(told).removeprefix("bash: ").removeprefix("-c: ")
