"""An objective: its terms by name, what they read of student and teacher, and their sum."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from model import Capture, EncoderConfig
from trainer.batches import Counts
from trainer.knowledge import union
from trainer.objectives.terms import (
    Attention,
    Cosine,
    Hidden,
    Lesson,
    MaskedLanguageModelling,
    SoftTargets,
    Term,
    TermConfig,
)


@dataclass
class ObjectiveConfig:
    """The terms of a learner's objective; a term that is not named is off."""

    mlm: MaskedLanguageModelling | None = None
    soft: SoftTargets | None = None
    cosine: Cosine | None = None
    hidden: Hidden | None = None
    attention: Attention | None = None

    def terms(self) -> dict[str, TermConfig]:
        """The sections that are on, by name."""
        sections = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: section for name, section in sections.items() if section is not None}

    def needs_teacher(self) -> bool:
        """Whether any term compares with a teacher."""
        return any(section.from_teacher for section in self.terms().values())


class Objective(nn.Module):
    """The terms with their learnable parts (projections), which train with the learner."""

    def __init__(
        self, config: ObjectiveConfig, learner: EncoderConfig, teacher: EncoderConfig, seed: int
    ) -> None:
        """Raise ValueError, naming the term, when one does not fit this pair of models."""
        super().__init__()
        sections = config.terms()
        self.terms = nn.ModuleDict(
            {name: section.build(learner, teacher) for name, section in sections.items()}
        )
        self._initialise(learner.initializer_range, seed)

    @property
    def by_name(self) -> dict[str, Term]:
        """The terms, typed."""
        return {name: cast(Term, term) for name, term in self.terms.items()}

    @property
    def student_capture(self) -> Capture:
        """What the learner's own forward must hand out."""
        return union(term.student_capture for term in self.by_name.values())

    @property
    def teacher_capture(self) -> Capture:
        """What the teacher's forward must hand out."""
        return union(term.teacher_capture for term in self.by_name.values())

    @property
    def needs_teacher_logits(self) -> bool:
        """Whether any term compares distributions over the vocabulary."""
        return any(term.needs_teacher_logits for term in self.by_name.values())

    def forward(self, lesson: Lesson, totals: Counts) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss, and of each term before its weight.

        Shares add up to the global value over micro-batches and ranks. Returns a scalar in the
        graph and a detached [terms] vector, float32.
        """
        terms = self.by_name.values()
        if not terms:  # a frozen teacher's
            return torch.zeros(()), torch.zeros(0)
        shares = torch.stack([term(lesson)[0] / getattr(totals, term.unit) for term in terms])
        weighted = [term.weight * share for term, share in zip(terms, shares, strict=True)]
        return torch.stack(weighted).sum(), shares.detach()

    def _initialise(self, standard_deviation: float, seed: int) -> None:
        """Normal weights and zero biases, a pure function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, standard_deviation, generator=generator)
                else:
                    parameter.zero_()
