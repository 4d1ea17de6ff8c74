"""Rank 0 of any number of ranks, in one process: torch's fake process group sends nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed import run_distributed


def run_as_rank_zero(fn: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Call ``fn(*args)`` in a new process, as rank 0 of a job with this many ranks.

    Collectives return at once and leave their tensors unchanged, so results are meaningless. The
    calls, their number and their bytes are those of the job.
    """
    return run_distributed(_as_rank_zero, 1, fn, world_size, args)[0]


def _as_rank_zero(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> Any:
    dist.destroy_process_group()
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE="1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return fn(*args)
