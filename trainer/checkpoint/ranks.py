"""Collectives of the writing thread: all ranks succeed, or all fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from trainer.checkpoint.errors import CheckpointError, StaleAttempt
from trainer.process_group import background_group

T = TypeVar("T")


class Ranks:
    """All ranks, over the gloo group beside that of training. Creating it is collective."""

    def __init__(self) -> None:
        self.group = background_group()
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def agree(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank and return this rank's result; collective.

        Raises:
            StaleAttempt: on every rank, if any rank's action raised it.
            CheckpointError: on every rank, if any rank's action failed; says where and why.
        """
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = _portable(error, self.rank)
        failures: list[Exception | None] = [None] * self.size
        dist.all_gather_object(failures, failure, group=self.group)
        raised = [each for each in failures if each is not None]
        if raised:
            raise min(raised, key=lambda each: not isinstance(each, StaleAttempt))
        return result

    def collect(self, value: T) -> list[T]:
        """Every rank's value on rank 0; an empty list elsewhere; collective."""
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []


def _portable(error: Exception, rank: int) -> Exception:
    """The error in a form that can be pickled, with a one-line message that names the rank."""
    if isinstance(error, StaleAttempt):
        return StaleAttempt(str(error))
    if isinstance(error, OSError):
        return CheckpointError(f"{error.filename or 'checkpoint'}: {error.strerror} (rank {rank})")
    if isinstance(error, CheckpointError):
        return CheckpointError(str(error))
    return CheckpointError(f"{type(error).__name__}: {error} (rank {rank})")
