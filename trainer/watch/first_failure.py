"""Which rank failed first: its error is shown, the others' are echoes of it.

When a rank ends, the others lose their connection to it and fail as well, and under ``srun`` or
torchrun every one of them can write to the terminal. So the first to fail says so in the run
folder, by exclusive creation of ``attempts/000002.failure``, and only it speaks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trainer.checkpoint import Attempt, Owner
from trainer.errors import TrainingError

T = TypeVar("T")
FAILED = 1
SPEAK_SECONDS = 3.0
# What gloo says in a plain RuntimeError when the process at the other end is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class FirstFailure:
    """The place where the ranks of one attempt note who failed first."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._path = attempt.record.with_suffix(".failure")
        self._rank = rank
        self._own = False

    def claim(self, error: BaseException) -> bool:
        """Whether this rank, which ends with `error`, is the first to fail."""
        content = {"rank": self._rank, "error": str(error), **Owner.here().record()}
        try:
            with open(self._path, "x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # a full disk, which may be the error itself: better said twice than never
        self._own = True
        return True

    def let_it_speak(self) -> None:
        """Wait a moment for the rank that failed first, if it is on this machine, to end.

        A launcher here that shows the words of the first rank to end thus shows the right ones.
        """
        end = time.monotonic() + SPEAK_SECONDS
        first = Owner.of(self._path)
        while first and first.is_on_this_machine and first.has_process and time.monotonic() < end:
            time.sleep(0.05)

    def is_elsewhere(self) -> bool:
        """Whether another rank has failed."""
        return not self._own and self._path.exists()


def on_rank_0(action: Callable[[], T]) -> T:
    """Let rank 0 alone do something, and give its result to every rank. Collective.

    What it raises is raised on rank 0; the others end without a word.
    """
    outcome: list[Any] = [False, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [True, action()]
        except Exception as error:
            failure = error
    dist.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if not outcome[0]:
        raise SystemExit(FAILED)
    return outcome[1]


def explained(error: Exception) -> Exception:
    """The error itself, or, where it only says that another rank is gone, one that says so."""
    is_loss = isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
    )
    if not is_loss:
        return error
    return TrainingError(
        f"rank {os.environ['RANK']} lost the connection to another rank, which was killed or whose "
        "machine failed; start the job again to go on from its newest checkpoint"
    )
