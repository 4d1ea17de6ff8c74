"""Sentence-order prediction: were two segments swapped (ALBERT, arXiv 1909.11942)."""

from dataclasses import dataclass
from typing import ClassVar

from trainer.objectives.labels import PairConfig
from trainer.objectives.term import register


@register("sop", order=30)
@dataclass
class SentenceOrder(PairConfig):
    """Whether two consecutive segments are in order (ALBERT). The mean over labelled pairs."""

    packings: ClassVar[tuple[str, ...]] = ("sop",)
