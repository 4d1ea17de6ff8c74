"""`tandem stop` and `tandem checkpoint`: send a request to a live run, and wait for its answer."""

from __future__ import annotations

import time

from trainer.checkpoint import live_owner, owner_has_ended
from trainer.control.requests import STOP, answer_to, ask
from trainer.errors import TrainingError
from trainer.run_folder.folder import RunFolder

POLL_SECONDS = 0.2
UNSEEN_SECONDS = 60.0  # for which NFS may not show here what another machine has written


def ask_and_wait(run: RunFolder, kind: str, seconds: float) -> str:
    """Request a stop or a checkpoint; returns the run's answer in one line.

    Raises TrainingError if the run is not live, if the save failed, or if there is no answer within
    `seconds`. In the last case the run still acts on the request as soon as it sees it.
    """
    owner = live_owner(run.path)
    if owner is None:
        raise TrainingError(f"{run.path}: no job is at work in it, so there is nothing to {kind}")
    request = ask(run.requests, kind)
    end = ended_at = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        is_gone = owner.is_on_this_machine and not owner.has_process
        has_ended = is_gone or owner_has_ended(run.path)
        answer = answer_to(run.requests, kind, request)  # read after: it may end right behind it
        if answer is None:
            ended_at = min(now, ended_at) if has_ended else end
            if is_gone or now > ended_at + UNSEEN_SECONDS:
                raise TrainingError(f"{run.path}: the job ended before it could {kind}")
        elif answer["error"] is not None:
            raise TrainingError(f"{run.path}: not saved: {answer['error']}")
        elif kind != STOP:
            return f"{run.path}: saved at step {answer['step']:,}"
        elif has_ended or live_owner(run.path) is None:
            return f"{run.path}: saved at step {answer['step']:,} and ended"
        time.sleep(POLL_SECONDS)
    raise TrainingError(
        f"{run.path}: its job ({owner}) has not answered for {seconds:.0f} s; the request "
        "stays, and the job follows it after its current step"
    )
