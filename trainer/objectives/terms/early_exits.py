"""The term by which earlier layers learn from the learner's own last layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from configs.rules import Ascending, Doc, Range
from configs.section import Refusal
from data_pipeline import MASKED
from model import Capture, ModelShape
from trainer.learner_names import OWN
from trainer.objectives.row_losses import (
    kl_divergence_rows,
)
from trainer.objectives.term import (
    LossInputs,
    StepSchedule,
    Term,
    TermConfig,
    register,
)
from trainer.objectives.terms.predictions import Temperature
from trainer.objectives.vocabulary import (
    project_and_sum,
    projected,
    weigh_positions,
)


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
        Doc(
            "The layers that learn, counted from 1. All of them learn from the last layer, which "
            "is not listed."
        ),
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
