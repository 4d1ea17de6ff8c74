"""One rank of a job, from its config to the finished run or a requested stop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import Owner
from trainer.config import JobConfig
from trainer.control.run_context import RunContext
from trainer.device import fix_order_of_sums
from trainer.job import Job
from trainer.learners.engine import join_process_group
from trainer.lifecycle.finalize import finalize
from trainer.lifecycle.start import StartedRun, start_run
from trainer.loop import Outcome, train
from trainer.measure.process import Startup
from trainer.process_group import limit_waiting
from trainer.run_folder.folder import RunFolder
from trainer.watch.ranks import FAILED, SendHeartbeat, explained, on_rank_0, run_on_rank_zero

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
        if not context.first_failure.claim(error):
            context.first_failure.wait_for_first()
            raise SystemExit(FAILED) from None
        raise explained(error) from error
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
    handlers: list[logging.Handler] = [logging.FileHandler(log)]
    if rank == 0:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.WARNING)
        handlers.append(terminal)
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers, force=True)
