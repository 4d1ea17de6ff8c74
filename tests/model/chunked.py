"""The chunked cross-entropy by itself, as the term `mlm` has it."""

from __future__ import annotations

from torch import Tensor

from data_pipeline import NO_LABEL
from trainer.objectives.row_losses import cross_entropy_rows
from trainer.objectives.vocabulary import project_and_sum


def chunked_cross_entropy(
    vocabulary_input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``vocabulary_input @ weight' + bias`` with `labels`: (sum, count), float32.

    vocabulary_input [P, E], weight [V, E], bias [V], labels int64 [P] with -100 where there is
    nothing to predict.
    """
    total, _ = project_and_sum(vocabulary_input, (weight, bias), [cross_entropy_rows(labels)])
    return total, (labels != NO_LABEL).float().sum()
