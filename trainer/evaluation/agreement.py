"""Agreement: how often a student predicts what its teacher does, right or wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline import DEFAULT_VIEW, MASKED
from model import Model
from trainer.batches import MicroBatch, to_micro_batches
from trainer.evaluation.held_out import ValidationSet
from trainer.objectives.vocabulary import chunked_kl_divergence
from trainer.scoring.scores import predictions
from trainer.teacher_outputs import OutputProjection


@dataclass(frozen=True)
class Agreement:
    """Means over masked positions."""

    top_1: float  # fraction of positions at which both rank the same token first
    kl: float  # KL(teacher || student) over the vocabulary, nats


@torch.inference_mode()
def agreement(
    student: Model,
    teacher: Model,
    validation: ValidationSet,
    micro_batch: int,
    device: torch.device,
    views: tuple[str, str] = (DEFAULT_VIEW, DEFAULT_VIEW),
) -> Agreement | None:
    """Compare two models, each on its own of the `views`, on all of `validation`, in this process.

    Returns None where their padded vocabularies differ in size, or no token of `validation` is
    to be predicted: labelled examples have none, whatever the heads of the models.
    """
    if student.config.vocab_size != teacher.config.vocab_size:
        return None
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for corpus in validation.corpora.values():
        for batch in corpus.batches():
            for micro in to_micro_batches(batch, micro_batch, device):
                student_batch, teacher_batch = map(micro.view, views)
                if MASKED in student_batch.targets:
                    sums += _compare(student, teacher, student_batch, teacher_batch)
    same, divergence, positions = sums.tolist()
    return Agreement(same / positions, divergence / positions) if positions else None


def _compare(
    student: Model, teacher: Model, student_batch: MicroBatch, teacher_batch: MicroBatch
) -> Tensor:
    """[3] float64: positions with the same first choice, summed KL divergence, all positions.

    Each model reads the same examples in its own form.
    """
    labelled = student_batch.targets[MASKED].labels >= 0  # [P]
    ours, theirs = (
        _vocabulary_input(student, student_batch),
        _vocabulary_input(teacher, teacher_batch),
    )
    projection, other = student.output_projection(), teacher.output_projection()
    weight, bias = projection
    assert weight is not None, "the projection of a model that is trained"
    divergence, positions = chunked_kl_divergence(
        ours, (weight, bias), theirs, other, weights=labelled.float()
    )
    choices = predictions(ours, OutputProjection(*projection))
    same = (choices == predictions(theirs, OutputProjection(*other))) & labelled
    return torch.stack([same.sum().double(), divergence.double(), positions.double()])


def _vocabulary_input(model: Model, batch: MicroBatch) -> Tensor:
    vocabulary_input = model.features(
        batch.input_ids, batch.segment_ids, batch.visible, batch.masked_positions
    ).vocabulary_input
    assert vocabulary_input is not None
    return vocabulary_input
