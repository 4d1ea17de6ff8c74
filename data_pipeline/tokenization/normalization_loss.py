"""The characters of a text that a tokenizer's normalizer removes, by script.

BERT's rule for uncased text strips every combining mark. That costs English little, and takes the
vowels out of Thai and Hindi. Nothing else in a corpus shows it.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import tokenizers

from data_pipeline.text.scripts import JOINERS, script_of

WARN_ABOVE = 0.001  # of all characters


@dataclass
class NormalizationLoss:
    """How many characters of each script a text has, and how many of them lose something.

    White space, control characters and differences of case do not count.
    """

    characters: dict[str, int] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)

    def add(self, other: NormalizationLoss) -> None:
        """Add the counts of more text."""
        for mine, theirs in ((self.characters, other.characters), (self.removed, other.removed)):
            for script, count in theirs.items():
                mine[script] = mine.get(script, 0) + count

    @property
    def share(self) -> float:
        """The share of all characters that lose something."""
        return sum(self.removed.values()) / max(1, sum(self.characters.values()))

    def by_script(self) -> str:
        """The share of each script's characters that lose something, the most frequent first."""
        scripts = sorted(self.removed, key=lambda script: -self.removed[script])
        return ", ".join(
            f"{self.removed[script] / self.characters[script]:.2%} of {script}"
            for script in scripts
        )

    def lines(self) -> list[str]:
        """The loss in words: a line, and a warning if it is too much to be overlooked."""
        if not self.removed:
            return ["the tokenizer's normalizer removes no character"]
        what = "of the characters lose accents, vowel signs or all"
        lost = f"{self.share:.3%} {what}: {self.by_script()}"
        if self.share <= WARN_ABOVE:
            return [f"the tokenizer's normalizer: {lost}"]
        advice = "train a tokenizer without --strip-accents, or with --kind bpe, which keeps all"
        return [f"warning: the tokenizer's normalizer: {lost}; unless that is meant, {advice}"]


class LossCounter:
    """Counts what the normalizer of one tokenizer removes from texts."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._normalizer = tokenizer.normalizer
        self._known: dict[int, tuple[str, bool]] = {}

    def __call__(self, texts: Iterable[str]) -> NormalizationLoss:
        """The counts of these texts. Each character is normalized by itself."""
        points = np.frombuffer("".join(texts).encode("utf-32-le", "replace"), np.uint32)
        counts = np.bincount(points)
        loss = NormalizationLoss()
        for point in np.flatnonzero(counts).tolist():
            if point not in self._known:
                self._known[point] = self._judge(chr(point))
            script, is_removed = self._known[point]
            if script:
                single = {script: int(counts[point])}
                loss.add(NormalizationLoss(single, single if is_removed else {}))
        return loss

    def _judge(self, character: str) -> tuple[str, bool]:
        """The script of a character, empty for what is no text, and whether it loses something."""
        script = script_of(character)
        if not script or self._normalizer is None:
            return script, False
        before, after = (
            _parts(text) for text in (character, self._normalizer.normalize_str(character))
        )
        return script, bool(before - after)


def _parts(text: str) -> Counter[str]:
    """The letters and marks of a text, decomposed and without case."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return Counter(part for part in folded if part in JOINERS or script_of(part))
