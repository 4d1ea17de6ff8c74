"""What the branches of a task's head say: an example may leave after any layer (FastBERT)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from data_pipeline import NO_LABEL
from model.branches import uncertainty
from trainer.scoring.column import Column
from trainer.scoring.metric import GatheredMetric
from trainer.scoring.scores import ScoreInputs


class BranchMetric(GatheredMetric[ScoreInputs]):
    """Gathers whether each branch is right and how uncertain it is, and reports no score."""

    reads_branches: ClassVar[bool] = True
    columns: tuple[Column, ...] = ()

    def __init__(self, head: str) -> None:
        self.head = head

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(0, device=device)  # of no width, which `torch.cat` leaves out

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[examples, 2 * layers]: whether each branch is right, then its uncertainty."""
        features, labels = outputs.features, outputs.batch.row_labels(self.head)
        branches = [*features.branches[self.head], features.heads[self.head]]
        right = [(logits.argmax(dim=-1) == labels).float() for logits in branches]
        rows = torch.stack([*right, *map(uncertainty, branches)], dim=1)
        return rows[labels != NO_LABEL]

    def finish(self, total: Tensor) -> dict[str, float]:
        return {}
