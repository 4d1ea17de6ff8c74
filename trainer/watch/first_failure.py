"""Which rank failed first: only its error is shown, since the others' errors follow from it.

When one rank ends, the others lose their connection to it and fail too. Under ``srun`` and torchrun
every rank can write to the terminal. So the first rank to fail creates ``attempts/000002.failure``
exclusively, and only that rank prints its error.
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
FIRST_EXIT_SECONDS = 3.0
# What gloo says in a RuntimeError when the process at the other end is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class FirstFailure:
    """The record, shared by the ranks of one attempt, of the rank that failed first."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._path = attempt.record.with_suffix(".failure")
        self._rank = rank
        self._own = False

    def claim(self, error: BaseException) -> bool:
        """Record `error` as the first failure; False if another rank has failed before."""
        content = {"rank": self._rank, "error": str(error), **Owner.here().record()}
        try:
            with open(self._path, "x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # a full disk, which may be the error itself: better shown twice than never
        self._own = True
        return True

    def wait_for_first(self) -> None:
        """Wait a moment for the first rank that failed, if it is on this machine, to exit.

        A launcher that shows the error of the first rank to exit then shows the right one.
        """
        end = time.monotonic() + FIRST_EXIT_SECONDS
        first = Owner.of(self._path)
        while first and first.is_on_this_machine and first.has_process and time.monotonic() < end:
            time.sleep(0.05)

    def is_elsewhere(self) -> bool:
        """Whether another rank failed first."""
        return not self._own and self._path.exists()


def on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result on every rank. Collective.

    An exception is raised on rank 0 only; the other ranks exit without a message.
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
    """The error itself, or a TrainingError if it only means that another rank has gone."""
    is_loss = isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
    )
    if not is_loss:
        return error
    return TrainingError(
        f"rank {os.environ['RANK']} lost the connection to another rank, which was killed or whose "
        "machine failed; start the job again to resume from its newest checkpoint"
    )
