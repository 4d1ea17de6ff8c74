"""A process that is the only rank of its job, as `tandem train` without a launcher is."""

from __future__ import annotations

import torch

from cluster.ranks import derive, export
from trainer.learners.engine import join_process_group


def join_alone() -> torch.device:
    """Join a process group of this process alone; returns its device."""
    export(derive({}))
    return join_process_group()
