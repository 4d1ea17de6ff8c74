"""Next-sentence prediction: does the second segment follow the first (BERT, arXiv 1810.04805)."""

from dataclasses import dataclass
from typing import ClassVar

from trainer.objectives.labels import PairConfig
from trainer.objectives.term import register


@register("nsp", order=20)
@dataclass
class NextSentence(PairConfig):
    """Whether the second segment follows the first (BERT). The mean over labelled pairs."""

    packings: ClassVar[tuple[str, ...]] = ("segment_pair", "sentence_pair")
