"""How well the vectors of texts agree with those of a teacher, whatever their widths."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import NO_LABEL
from trainer.scoring.column import NUMBER, Column
from trainer.scoring.metric import GatheredMetric
from trainer.scoring.scores import ScoreInputs
from trainer.scoring.task_scores import NUMBER_SCORES, require_packages

SPEARMAN = "spearman"
MOST = 1000  # texts, the first ones, of which every pair is compared


class VectorAgreement(GatheredMetric[ScoreInputs]):
    """Spearman's correlation of the cosines between texts with those by the vectors of a teacher.

    The target of the head numbers the texts from 0. Without the teacher's vectors there is no
    score.
    """

    def __init__(self, head: str, compares: str) -> None:
        require_packages([SPEARMAN])
        self.head, self.compares = head, compares
        self.columns = (Column(f"{head}_{SPEARMAN}", SPEARMAN, NUMBER),)

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(0, device=device)  # of no width, which `torch.cat` leaves out

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[texts, 2 + D + D']: number, D, the model's vector and the teacher's, of length 1."""
        theirs = outputs.teachers.get(self.compares or "", {}).get(self.head)
        if theirs is None:
            return self.empty(outputs.batch.input_ids.device)
        numbers, ours = outputs.batch.row_labels(self.head), outputs.features.heads[self.head]
        vectors = [F.normalize(rows.double(), dim=1) for rows in (ours, theirs)]
        widths = torch.full_like(numbers, ours.shape[1])
        rows = torch.cat([torch.stack([numbers, widths], dim=1), *vectors], dim=1)
        return rows[(numbers != NO_LABEL) & (numbers < MOST)]

    def finish(self, total: Tensor) -> dict[str, float]:
        if len(total) < 3:
            return {}
        rows = total[total[:, 0].argsort()]
        width = 2 + int(rows[0, 1])
        above = np.triu_indices(len(rows), k=1)
        ours, theirs = (
            (vectors @ vectors.t()).cpu().numpy()[above]
            for vectors in (rows[:, 2:width], rows[:, width:])
        )
        score = NUMBER_SCORES[SPEARMAN](ours, theirs)
        return {self.columns[0].name: score} if np.isfinite(score) else {}
