"""While rank 0 works alone, the other ranks wait for it, as long as it shows that it gets on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.watch.hang_watch import HangWatch

SendHeartbeat = Callable[[], None]


def let_rank_0_work(work: Callable[[SendHeartbeat], object], watch: HangWatch) -> None:
    """Call ``work(heartbeat)`` on rank 0 and return on all ranks when it is done. Collective.

    Each call of `heartbeat` is one of every rank's `watch`: rank 0 may take as long as it
    likes over all of its work, but if it hangs between two heartbeats, every rank's watch goes off,
    its own and those of the ranks that wait (rank 0 may be on a machine that is gone).
    """
    # Launchers take a rank that ends early for one that died, so all wait; how long is the watch's
    # affair, not the collective's.
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    goes_on = torch.ones(1, dtype=torch.int64)

    def heartbeat() -> None:
        watch.heartbeat()
        dist.broadcast(goes_on, 0, group)

    if dist.get_rank() == 0:
        work(heartbeat)
        goes_on.zero_()
        heartbeat()
    else:
        while goes_on:
            heartbeat()
    dist.barrier(group)
