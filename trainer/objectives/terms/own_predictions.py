"""Terms about a learner's own predictions: z-loss, and earlier layers that learn from the last."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from configs.rules import Ascending, Range
from configs.section import Refusal
from data_pipeline import MASKED
from model import Capture, ModelShape
from trainer.learner_names import OWN
from trainer.objectives.row_losses import RowLoss, kl_divergence_rows
from trainer.objectives.term import LossInputs, StepSchedule, Term, TermConfig, Weight, register
from trainer.objectives.terms.predictions import Temperature, VocabularyTermConfig
from trainer.objectives.vocabulary import (
    VocabularyTerm,
    project_and_sum,
    projected,
    weigh_positions,
)


@register("z_loss", order=185)
@dataclass
class ZLoss(VocabularyTermConfig):
    """``log(Z)^2`` at masked positions, Z the sum of the exponentials of the logits.

    It keeps the softmax's normaliser near 1, where 16 bits are precise and training is stable
    (PaLM, arXiv 2204.02311, section 5; Chameleon, arXiv 2405.09818).
    """

    regularises: ClassVar[bool] = True

    weight: Weight = 1e-4

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return ZLossTerm(self)


class ZLossTerm(VocabularyTerm):
    denominator = MASKED

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        return RowLoss(squared_log_z, weigh_positions(inputs, MASKED), of_logits=True)


def squared_log_z(logits: Tensor) -> Tensor:
    """``log(sum exp logits)^2`` of each row: [C, V] to [C]."""
    return logits.logsumexp(dim=-1).square()


@register("early_exits", order=190)
@dataclass
class EarlyExits(TermConfig):
    """T^2 KL(softmax(t / T) || softmax(s / T)) at masked positions (arXiv 1905.08094).

    t are the learner's own final predictions, detached; s are those of its masked-LM head from the
    output of an earlier layer. Summed over `layers`. The forward pass can then end at each of them.
    """

    layers: Annotated[
        list[int],
        Range(1, 4096),
        Ascending(),
        "The layers that learn, counted from 1. All of them learn from the last layer, which "
        "is not listed.",
    ] = field(default_factory=list)
    temperature: Temperature = 1.0

    source: ClassVar[str] = OWN
    reads_masked: ClassVar[bool] = True
    reads_states: ClassVar[bool] = False

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if not self.layers:
            yield "layers", "name at least one"

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        if self.layers[-1] >= student.layers:
            why = f"must be below {student.layers}, the last layer, from which they learn"
            yield "layers", why

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return EarlyExitsTerm(self)


class EarlyExitsTerm(Term):
    denominator = MASKED
    reads_logits = True

    def __init__(self, config: EarlyExits) -> None:
        super().__init__(config)
        self.layers = tuple(config.layers)
        self.temperature = StepSchedule.read(config.temperature)

    def student_capture(self, step: int) -> Capture:
        return Capture(exits=self.layers)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        temperature, weights = self.temperature.at(inputs.step), weigh_positions(inputs, MASKED)
        final = self.outputs(inputs).distributions[MASKED]
        row_loss = kl_divergence_rows(final, temperature, weights * temperature**2)
        _, projection = projected(inputs, MASKED)
        losses = [
            project_and_sum(inputs.features.exits[layer], projection, [row_loss])[0]
            for layer in self.layers
        ]
        return torch.stack(losses).sum(), weights.sum()
