"""Distillation in two stages: intermediate layers first, then predictions.

TinyBERT's task distillation (arXiv 1909.10351, section 4.1): one run for attention and hidden
states, and another, from its weights, for predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from configs.rules import COUNT, Doc, Range, Unit, positive
from configs.section import Refusal, Section
from model import READ_OUT
from trainer.objectives.transfer import LAYERS, STATES, Transfer


@dataclass
class IntermediateConfig(Section):
    """Intermediate layers first: all layers learn from the teacher's before predictions do.

    In this first part of a student's steps only the terms about states and attention are on, at a
    constant learning rate, and the heads and the pooler stay as they are. Afterwards only the
    other terms are on, the optimizer has fresh moments, and the schedule begins.
    """

    steps: Annotated[int | None, COUNT, Unit("steps"), Doc("How long it takes.")] = None
    fraction: Annotated[
        float | None, Range(1e-6, 0.999999), Doc("Or as a fraction of the job's steps.")
    ] = None
    learning_rate: Annotated[
        float | None, positive(1e2), Doc("Its constant rate; null: the peak of the optimizer.")
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if (self.steps is None) == (self.fraction is None):
            yield "fraction", "set either this or steps"

    def in_steps(self, steps: int) -> IntermediateConfig:
        """The same, without a fraction, in a job of so many steps."""
        if self.fraction is None:
            return self
        return replace(self, steps=max(1, round(self.fraction * steps)), fraction=None)


@dataclass(frozen=True)
class AllLayersFirst(Transfer):
    """The first of the two stages."""

    config: IntermediateConfig
    first: ClassVar[tuple[str, ...]] = (STATES, LAYERS)

    @property
    def steps(self) -> int:
        assert self.config.steps is not None, "a fraction is resolved by `in_steps`"
        return self.config.steps

    def begins_phase(self, step: int) -> bool:
        return step == self.steps

    def group(self, parameter: str) -> str:
        return "read out" if parameter.startswith(_READ_OUT) else "all"

    def factor(self, group: str, step: int) -> float:
        return 0.0 if group == "read out" and self.lasts(step) else 1.0

    def rate(self, peak: float) -> float:
        return self.config.learning_rate or peak


_READ_OUT = tuple(f"model.{name}" for name in READ_OUT)
