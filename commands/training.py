"""The commands that train a job and store predictions: the launcher, and each of its ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click

from commands.ending import ignore_write_errors
from commands.job_configs import changes_since_run, load_job, prepare
from commands.options import NPROC, PATH
from configs.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainer.config import JobConfig
    from trainer.measure import Startup


@click.command()
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@NPROC
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="How often to resume the job by itself after a signal has ended one of its processes, as "
    "happens when the memory runs out.",
)
def train(config: str, overrides: tuple[str, ...], nproc: int | None, max_restarts: int) -> None:
    """Train the job CONFIG, or resume it.

    srun and torchrun start each rank by this command too.
    """
    ignore_write_errors()
    run_if_launched(_train_as_rank, bool(nproc or max_restarts), config, overrides)
    job = load_on_device(config, overrides)
    if not announce_if_finished(job):
        sys.exit(run_ranks(job, [config, *overrides], nproc, max_restarts=max_restarts))


@click.command()
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--steps", type=click.IntRange(min=1), default=60, help="Steps in all.")
@click.option("--nproc", type=click.IntRange(min=1), default=2, help="Processes on this machine.")
def rehearse(config: str, overrides: tuple[str, ...], steps: int, nproc: int) -> None:
    """Run the job CONFIG scaled down, in minutes on a CPU.

    The rehearsal reads the job's own text and runs every phase, change of batch and rate, and
    joining student in its order. Its models have the same depth but are narrow, and its sequences
    and batches are small. The run is NAME-rehearsal; the same command resumes it.
    """
    from trainer.device import choose_device
    from trainer.rehearsal import rehearsal

    ignore_write_errors()
    with one_thread():
        job = rehearsal(load_job(config, overrides), steps)
        choose_device(job.device)
        job = prepare(job)
    if not announce_if_finished(job):
        sys.exit(run_ranks(job, [config, *overrides], nproc))


@click.command()
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@NPROC
def store(config: str, overrides: tuple[str, ...], nproc: int | None) -> None:
    """Store the predictions of the frozen teacher of a job.

    Other jobs can read them. The section teacher.stored says where they are written, and how many
    logits. Repeating the command writes what is missing. srun and torchrun start each rank by this
    command too.
    """
    ignore_write_errors()
    run_if_launched(_store_as_rank, bool(nproc), config, overrides)
    job = load_on_device(config, overrides)  # errors show before ranks start
    as_fork = partial(_store_as_rank, lambda: job)
    sys.exit(launch_ranks(["store", config, *overrides], as_fork, nproc))


def load_on_device(config: str, overrides: tuple[str, ...]) -> JobConfig:
    """Load and prepare a job, and choose its device for this process and the ranks it starts.

    Raises TrainingError, before the data is prepared, for a GPU that cannot be used.
    """
    from trainer.device import choose_device

    with one_thread():
        job = load_job(config, overrides)
        choose_device(job.device)
        return prepare(job)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute only in this thread, while a config or a model is read before ranks are forked.

    If OpenMP threads of a process have worked, a fork of it waits for them for ever.
    `_leave_as_fork` gives each rank its own threads.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_if_launched(
    as_rank: Callable[[Callable[[], JobConfig]], int],
    is_told: bool,
    config: str,
    overrides: tuple[str, ...],
) -> None:
    """Call `as_rank` with a loader of the job, and exit, if srun or torchrun started this process.

    Raises UsageError then where `is_told`: the user has said how to start ranks.
    """
    from cluster.ranks import is_launched

    if is_launched():
        if is_told:
            raise click.UsageError(
                "--nproc, --max-restarts: not under srun or torchrun, which set the ranks"
            )
        _choose_device_of_rank(config, overrides)
        sys.exit(as_rank(lambda: prepare(load_job(config, overrides))))


def _choose_device_of_rank(config: str, overrides: tuple[str, ...]) -> None:
    """Choose the device, which decides how the ranks meet. Rank 0 reports a bad config later.

    Raises TrainingError for a GPU that cannot be used.
    """
    from configs import ConfigError
    from trainer.device import choose_device

    with contextlib.suppress(ConfigError):
        choose_device(load_job(config, overrides).device)


def run_ranks(
    job: JobConfig,
    words: Sequence[str],
    nproc: int | None,
    one_of_several: bool = False,
    max_restarts: int = 0,
) -> int:
    """Train a prepared job as ranks on this machine; returns the exit code, in the launcher only.

    A run that was refused before it began leaves no folder, unless another process has begun it.
    words: the name of the config and the overrides, for ranks that are no forks of this process.
    """
    from trainer.checkpoint.attempts import live_owner
    from trainer.measure import Startup
    from trainer.run_folder.folder import RunFolder

    folder = RunFolder.of(job)
    is_new = not folder.path.exists()

    def train_as_fork(startup: Startup) -> int:
        startup.mark("starting the ranks")
        return _train_as_rank(lambda: job, startup)

    startup = Startup()
    code = launch_ranks(
        ["train", *words],
        partial(train_as_fork, startup),
        nproc,
        one_of_several=one_of_several,
        restarts=max_restarts,
        before_restart=startup.begin,
    )
    if code and is_new and not folder.config.exists() and live_owner(folder.path) is None:
        shutil.rmtree(folder.path, ignore_errors=True)
    return code


def launch_ranks(
    words: list[str],
    as_fork: Callable[[], int],
    nproc: int | None,
    one_of_several: bool = False,
    restarts: int = 0,
    before_restart: Callable[[], None] = lambda: None,
) -> int:
    """Run ``tandem WORDS`` as ranks on this machine. In the launcher, returns its exit code.

    The options are those of `cluster.local.launch`. Without GPUs a rank is a fork of this process,
    which calls `as_fork`. Raises OptionError if there are fewer GPUs than ranks, since NCCL refuses
    two ranks on one GPU.
    """
    from cluster.local import becoming, launch

    gpus = _gpus()
    if gpus and nproc and nproc > gpus:
        raise OptionError(
            f"--nproc {nproc}: a rank needs a GPU of its own, and this machine shows {gpus}; leave "
            "--nproc out, or set device=cpu"
        )
    if gpus:
        rank = becoming([sys.executable, "-m", "tandem", *words])
    else:
        import trainer.run  # noqa: F401  imported once: the ranks are forks of this process
        from trainer.learners.engine import import_for_engines

        import_for_engines()
        rank = partial(_leave_as_fork, as_fork)
    return launch(
        rank,
        nproc or max(1, gpus),
        one_of_several=one_of_several,
        restarts=restarts,
        before_restart=before_restart,
    )


def _leave_as_fork(rank: Callable[[], int]) -> NoReturn:
    import torch

    from cluster.local import leave

    threads = os.environ["OMP_NUM_THREADS"]  # read by torch's libraries before the launcher set it
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
    leave(rank())


def _train_as_rank(load: Callable[[], JobConfig], startup: Startup | None = None) -> int:
    from cluster.ranks import StopRequest, derive, export, incarnation, reported

    with StopRequest() as stop:
        export(derive())
        from trainer.run import run_job

        gc.freeze()  # no collection looks at what is imported, which stays
        gc.set_threshold(700, 10)  # as usual again
        job, restart = incarnation()
        ended = run_job(
            load,
            lambda: stop.requested,
            _announce,
            scheduled_as=job,
            restart=restart,
            startup=startup,
        )
        return reported(ended.value)


def _announce(folder: Any, results: dict[str, Any]) -> None:
    from trainer.report.table import student_table

    click.echo(student_table(results))
    click.echo(f"\nReport: {folder.report}")


def final_results(job: JobConfig) -> dict[str, Any] | None:
    """The results of the job's run; None if it has not reached its end.

    A run whose test file has changed has not reached its end: the new file must be scored.
    """
    from configs.runs import has_ended
    from trainer.run import has_scored
    from trainer.run_folder.folder import RunFolder
    from trainer.run_folder.run_files import read_evaluation

    results = read_evaluation(RunFolder.of(job).evaluation)
    ended = results is not None and has_ended(results, job.steps, job.hours)
    return results if results and ended and has_scored(results, job) else None


def announce_if_finished(job: JobConfig) -> bool:
    """If the run is finished, complete its exports and report, and say where they are.

    Raises CheckpointError where another process is completing them.
    """
    from trainer.run_folder.folder import RunFolder

    folder, results = RunFolder.of(job), final_results(job)
    if results is None:
        return False
    click.echo(f"{folder.path} is finished.\n")
    if changed := [str(change) for change in changes_since_run(job)]:
        changed[3:] = [f"and {len(changed) - 3} more"] if len(changed) > 3 else []
        way_out = "for another run, set another name"
        click.echo(f"changed since, without effect: {'; '.join(changed)}; {way_out}", err=True)
    if folder.missing_exports(results) or not folder.has_final_report():
        from trainer.checkpoint.attempts import Attempt
        from trainer.run import finalize

        attempt = Attempt.begin(folder.path)  # two that write one export would mix their files
        results = finalize(folder)
        attempt.finish()
        attempt.end()
    _announce(folder, results)
    return True


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _store_as_rank(load: Callable[[], JobConfig]) -> int:
    from cluster.ranks import StopRequest, derive, export, reported

    with StopRequest() as stop:
        export(derive())
        from trainer.storing import store

        outcome = store(load, lambda: stop.requested, click.echo)
        return reported(outcome.value)
