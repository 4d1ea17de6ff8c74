"""Distillation in two stages: intermediate layers first, then predictions.

TinyBERT's task distillation (arXiv 1909.10351, section 4.1): one run for attention and hidden
states, and another, from its weights, for predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from model import READ_OUT
from trainer.objectives.first_stage import FirstStage, FirstStageConfig
from trainer.objectives.transfer import LAYERS, STATES


@dataclass
class IntermediateConfig(FirstStageConfig):
    """Intermediate layers first: all layers learn from the teacher's before predictions do.

    In this first part of a student's steps only the terms about states and attention are on, at a
    constant learning rate, and the heads and the pooler stay as they are. Afterwards only the
    other terms are on, the optimizer has fresh moments, and the schedule begins.
    """

    simplified: ClassVar[str] = "students compare intermediate layers in all steps"

    def build(self, layers: int) -> AllLayersFirst:
        return AllLayersFirst(self)


@dataclass(frozen=True)
class AllLayersFirst(FirstStage):
    """All layers learn from the teacher's."""

    first: ClassVar[tuple[str, ...]] = (STATES, LAYERS)
    needs: ClassVar[str] = "terms about states or attention, and others for afterwards"

    def group(self, parameter: str) -> str:
        return "read out" if parameter.startswith(_READ_OUT) else "all"

    def factor(self, group: str, step: int) -> float:
        return 0.0 if group == "read out" and self.lasts(step) else 1.0


_READ_OUT = tuple(f"model.{name}" for name in READ_OUT)
