"""Terms over pairs of segments, read from the model's pair head."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from data_pipeline import PAIRS
from data_pipeline.packing.kinds import PACKINGS
from model import Ability, Capture, ModelConfig, ModelShape
from trainer.losses.labels import label_cross_entropy
from trainer.objectives.term import LossInputs, Term, TermConfig


@dataclass
class PairConfig(TermConfig):
    """The YAML section of a pair term: the learner gets a pair head, which needs a pooler."""

    needs: ClassVar[tuple[Ability, ...]] = (Ability.POOL,)
    packings: ClassVar[tuple[str, ...]]  # values of `data.packing` whose pair labels it is about

    @property
    def head(self) -> str | None:
        return PAIRS

    @property
    def reads_all_positions(self) -> bool:
        return True

    def equip(self, model: ModelConfig) -> ModelConfig:
        return model.with_pair_head()

    def refusals(self, packings: Collection[str], masked: bool) -> Iterator[str]:
        wrong = [one for one in packings if PACKINGS[one].pair_labels and one not in self.packings]
        if wrong or not set(packings) & set(self.packings):
            there = ", ".join(wrong or packings)
            yield (f"data.packing {there} has no such pairs; it takes {' or '.join(self.packings)}")

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return PairTerm(self)


class PairTerm(Term):
    """Cross-entropy over two classes; what they mean depends on the packing."""

    denominator = PAIRS

    def student_capture(self, step: int) -> Capture:
        return Capture(last_hidden_state=True)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return label_cross_entropy(inputs.features.heads[PAIRS], inputs.batch.row_labels(PAIRS))
