"""Work that rank 0 does alone: the other ranks wait as long as rank 0 keeps sending heartbeats."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer.process_group import background_group
from trainer.watch.hang_watch import HangWatch

SendHeartbeat = Callable[[], None]


def run_on_rank_zero(work: Callable[[SendHeartbeat], object], watch: HangWatch) -> None:
    """Call ``work(heartbeat)`` on rank 0, and return on all ranks when it is done. Collective.

    Each call of `heartbeat` resets the `watch` of every rank. The whole work may take any time.
    If rank 0 hangs between two heartbeats, or its machine is gone, the watch of every rank fires.
    """
    # All ranks wait, since a launcher takes a rank that exits early for one that died.
    group = background_group()
    working = torch.ones(1, dtype=torch.int64)

    def heartbeat() -> None:
        watch.heartbeat()
        dist.broadcast(working, 0, group)

    if dist.get_rank() == 0:
        work(heartbeat)
        working.zero_()
        heartbeat()
    else:
        while working:
            heartbeat()
    dist.barrier(group)
