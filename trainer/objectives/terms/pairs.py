"""Terms over pairs of segments, read from the model's pair head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from data_pipeline import PAIRS
from model import Capture, ModelShape
from trainer.losses.states import pair_cross_entropy
from trainer.objectives.term import LossInputs, Term, TermConfig


@dataclass
class PairConfig(TermConfig):
    """The YAML section of a pair term: the learner gets a pair head, which needs a pooler."""

    packings: ClassVar[tuple[str, ...]]  # `data.packing` whose pair labels mean this

    @property
    def source(self) -> str | None:
        """See `TermConfig.source`."""
        return None

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        """See `TermConfig.build`."""
        return PairTerm(self)


@dataclass
class NextSentence(PairConfig):
    """Whether the second segment follows the first (BERT): mean over labelled pairs."""

    packings: ClassVar[tuple[str, ...]] = ("segment_pair", "sentence_pair")


@dataclass
class SentenceOrder(PairConfig):
    """Whether two consecutive segments are in order (ALBERT): mean over labelled pairs."""

    packings: ClassVar[tuple[str, ...]] = ("sop",)


class PairTerm(Term):
    """See `NextSentence` and `SentenceOrder`: the packing says what the labels mean."""

    denominator = PAIRS

    def student_capture(self, step: int) -> Capture:
        """See `Term.student_capture`."""
        return Capture(last_hidden_state=True)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """See `Term.forward`."""
        return pair_cross_entropy(inputs.features.heads[PAIRS], inputs.batch.row_labels(PAIRS))
