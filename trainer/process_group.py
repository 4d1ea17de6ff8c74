"""The process groups of a job: one for training, and another one on the CPU for everything else.

Each gloo group costs a rank one socket per other rank; each NCCL group costs GPU memory.
"""

from __future__ import annotations

import resource
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.errors import TrainingError

GLOO_GROUPS = 2  # on the CPU; on GPUs the training's group is NCCL's
FILES = 512  # open files of a rank besides its sockets: shards, logs, libraries
GRACE_SECONDS = 60.0  # time for a hanging rank to write its stacks before collectives time out
ENDLESS = timedelta(days=365)


def allow_open_files(ranks: int) -> None:
    """Raise this process's limit on open files to what a job of this many ranks needs.

    Raises TrainingError where the hard limit is lower.
    """
    needed = GLOO_GROUPS * (ranks + 3) + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        raise TrainingError(
            f"{ranks} ranks need {needed} open files each, and the limit is {hard}: raise it "
            "(ulimit -Hn, or LimitNOFILE of slurmd)"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def limit_waiting(hang_timeout_s: float) -> None:
    """Make the timeout of training's collectives longer than the hang watch's.

    By default NCCL ends a process after 10 minutes, before the hang watch has written its stacks.
    """
    limit = timedelta(seconds=hang_timeout_s + GRACE_SECONDS)
    distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


def background_group() -> dist.ProcessGroup:
    """The gloo group for work beside training. Its first call is collective.

    The thread that writes checkpoints uses it and, after the last checkpoint, ranks that wait for
    rank 0. Two threads must not use one group at the same time: they would deadlock. Its
    collectives have no timeout, since a slow disk is not a failure, and the hang watch ends a rank
    that waits in vain.
    """
    assert dist.group.WORLD is not None
    return _beside(dist.group.WORLD)


@lru_cache(maxsize=1)
def _beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=ENDLESS)
    assert isinstance(group, dist.ProcessGroup)
    return group
