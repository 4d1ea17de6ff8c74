"""One rank of a job: from its config through the training loop to the finished run."""

import logging
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs import runs
from configs.durable import atomic_write
from configs.progress import work
from configs.strict_json import strict_json
from data_pipeline import Corpus
from trainer.checkpoint.attempts import Owner, published
from trainer.config import JobConfig
from trainer.control import RunContext
from trainer.device import fix_order_of_sums, limit_waiting
from trainer.evaluation.export import export_learner
from trainer.evaluation.final_scores import evaluate_run
from trainer.evaluation.finished import SavedLearners
from trainer.job import Job
from trainer.job_data.examples import test_contents
from trainer.learner_names import plain_name
from trainer.learners.engine import join_process_group
from trainer.lifecycle.start import StartedRun, start_run
from trainer.measure import Startup
from trainer.report.page import write_report
from trainer.run_folder.folder import EXPORTED, RunFolder
from trainer.run_folder.run_files import read_evaluation
from trainer.step import train_step
from trainer.watch.ranks import FAILED, SendHeartbeat, explained, on_rank_0, run_on_rank_zero


class Outcome(Enum):
    """How a call of `train` ended; the value is the exit code of the process."""

    FINISHED = 0
    STOPPED = runs.STOPPED  # on request, after saving: start it again


def train(job: Job) -> Outcome:
    """Train `job` from its current step to its end, or to a requested stop. Collective."""
    while not job.is_done:
        job.grow_teacher()
        job.finish_teacher()
        job.admit_students()
        job.saving.return_to_best()
        job.recorder.before(job.state.step)
        result = train_step(
            job.learners.teacher,
            job.learners.active,
            job.batches.take(),
            job.state.step,
            job.context.requests,
            job.seconds,
            job.masker,
            job.learners.others,
        )
        job.advance(result)
        job.context.made_a_step()
        if job.state.step % job.config.watch.replicas_every == 0:
            job.verify_replicas()
        if job.evaluates_now:
            job.evaluate()
        if result.requests.stop:
            job.saving.save(wait=True)
            job.recorder.say(
                f"stopped and saved at step {job.state.step:,}; start it again to resume"
            )
            return Outcome.STOPPED
        if job.saving.is_due(result.requests.save) and not job.is_done:
            job.saving.save()
    job.finish()
    return Outcome.FINISHED


def finalize(
    folder: RunFolder,
    heartbeat: SendHeartbeat = lambda: None,
    corpora: Mapping[str, Corpus] | None = None,
) -> dict[str, Any]:
    """Evaluate and export every learner of the newest checkpoint, and write the report.

    Results that exist are kept, so a run that was killed meanwhile only gets what is missing.
    Returns the content of ``evaluation.json``, which is written after the scores and exports that
    it names. One process, no engines. `heartbeat` is called for every batch that is scored and for
    every export. `corpora` are the job's, if they are open already.
    """
    results = _results_so_far(folder)
    if results is None:
        saved = SavedLearners(folder, corpora)
        results = evaluate_run(saved, heartbeat=heartbeat)
        _export(saved, results, list(results["learners"]), heartbeat)
        atomic_write(folder.evaluation, strict_json(results) + "\n")
    elif missing := folder.missing_exports(results):
        _export(SavedLearners(folder, corpora), results, missing, heartbeat)
    heartbeat()
    if not folder.has_final_report():
        write_report(folder.path)
    return results


def _results_so_far(folder: RunFolder) -> dict[str, Any] | None:
    """The run's results, if they fit its newest checkpoint and its test files."""
    results = read_evaluation(folder.evaluation)
    newest = published(folder.checkpoints)[-1:]
    if results is None or newest not in ([], [results["step"]]):
        return None
    return results if has_scored(results, folder.load_config()) else None


def has_scored(results: Mapping[str, Any], job: JobConfig) -> bool:
    """Whether a run's results are scores on what the test files of its job hold now."""
    return dict(results.get("test", {})) == test_contents(job)


TRANSFORMERS = "loads with transformers"


def _export(
    saved: SavedLearners, results: Mapping[str, Any], names: list[str], heartbeat: SendHeartbeat
) -> None:
    for name in names:
        for weights in [saved, *([saved.averages()] if saved.has_average(name) else [])]:
            heartbeat()
            out = saved.folder.export(name, average=weights.are_averages)
            (out / EXPORTED[-1]).unlink(missing_ok=True)  # without this file it is incomplete
            with work(f"exporting {plain_name(name)}", ticks=True):
                note = export_learner(weights, name, out, results)
            key = "export_of_average" if weights.are_averages else "export"
            results["learners"][name] |= {key: str(out), "export_format": note or TRANSFORMERS}


_log = logging.getLogger(__name__)
Announce = Callable[[RunFolder, dict[str, Any]], None]


def run_job(
    load: Callable[[], JobConfig],
    stop_requested: Callable[[], bool],
    announce: Announce,
    *,
    scheduled_as: str = "",
    restart: int = 0,
    startup: Startup | None = None,
) -> Outcome:
    """Train the job that `load` reads to its end, as one of the ranks the environment describes.

    An interrupted run resumes from its newest intact checkpoint. After training, rank 0 scores and
    exports every learner and passes the results to `announce`. `scheduled_as` is the scheduler's id
    of this job, if there is one; `restart` is how often the job was started before. `startup` comes
    from the launcher if this process is a fork of it.

    An error is raised on the rank that failed first; on the others it is a silent SystemExit.
    """
    startup = startup or Startup()
    device = join_process_group()
    rank = dist.get_rank()
    started = on_rank_0(lambda: start_run(load(), Owner.here(scheduled_as, restart)))
    config = started.config
    limit_waiting(config.watch.hang_timeout_s)
    _log_to_file(RunFolder.of(config).rank_log(rank), rank)
    if config.deterministic:
        fix_order_of_sums()
    startup.mark("meeting the other ranks")
    context = RunContext.of(config, started.attempt, rank, stop_requested, startup)
    try:
        with context.heartbeat:
            outcome = _train_and_finalize(started, device, context, announce)
            if outcome is Outcome.FINISHED and rank == 0:
                context.attempt.finish()
    except Exception as error:
        # The full traceback for the rank's log; the command line shows one rank's error only.
        _log.info("ended by an error: %s", error, exc_info=True)
        cause = explained(error)
        if not context.first_failure.claim(cause):
            context.first_failure.wait_for_first()
            raise SystemExit(FAILED) from None
        raise cause from error
    dist.destroy_process_group()
    return outcome


def _train_and_finalize(
    started: StartedRun, device: torch.device, context: RunContext, announce: Announce
) -> Outcome:
    watch = context.hang_watch
    with watch:
        with Job(started.config, device, context) as job:
            outcome = train(job)

        def give_results(heartbeat: SendHeartbeat) -> None:
            if outcome is Outcome.FINISHED:
                announce(job.folder, finalize(job.folder, heartbeat, job.corpora))
            heartbeat()
            job.recorder.finish(completed=outcome is Outcome.FINISHED)

        run_on_rank_zero(give_results, watch)
    return outcome


def _log_to_file(log: Path, rank: int) -> None:
    """Log everything to the rank's own file, and warnings of rank 0 to the terminal as well."""
    logging.raiseExceptions = False  # checkpoints and metrics report a full disk
    log.parent.mkdir(exist_ok=True)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handlers: list[logging.Handler] = [logging.FileHandler(log, encoding="utf-8")]
    if rank == 0:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(logging.Formatter("%(message)s"))  # as other commands print it
        handlers.append(terminal)
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers, force=True)
