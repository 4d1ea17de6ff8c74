"""The data augmentation of Tang et al. (arXiv 1903.12136, section 3.3): texts without sense.

In each copy a word is masked with one probability, and with another it is replaced by a word with
its part of speech, drawn by frequency. Then, with a third probability, only an n-gram of one to
five words is kept. Of an example of two texts, the copies vary the second, the first, and both in
turn. Copies that come out alike are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import PerturbationDraw, array_keys, scalar_key

Tags = Sequence[str]


class Lexicon:
    """The words of each tag, to be drawn by their frequency."""

    def __init__(self, words: Iterable[tuple[str, str]]) -> None:
        """Count (word, tag) pairs."""
        by_tag: dict[str, Counter[str]] = {}
        for word, tag in words:
            by_tag.setdefault(tag, Counter())[word] += 1
        self._words = {tag: sorted(counts) for tag, counts in by_tag.items()}
        self._sums = {
            tag: np.cumsum([by_tag[tag][word] for word in words])
            for tag, words in self._words.items()
        }

    def word(self, tag: str, place: float) -> str:
        """The word of a tag at a `place` from 0 to 1 of all its occurrences."""
        sums = self._sums[tag]
        return self._words[tag][int(np.searchsorted(sums, place * sums[-1], side="right"))]


@dataclass(frozen=True)
class Perturbation:
    """How many copies are made, and the probabilities of what happens to them.

    copies: None is 20 of an example of one text, and 10 of a pair.
    """

    copies: int | None = None
    mask: float = 0.1
    replace: float = 0.1
    ngram: float = 0.25
    longest: int = 5  # words of an n-gram
    seed: int = 1
    mask_token: str = "[MASK]"

    def copies_of(
        self, texts: Sequence[str], tags: Sequence[Tags], lexicon: Lexicon, example: int
    ) -> list[tuple[str, ...]]:
        """Different forms of an example's texts, whose words have these tags.

        Words are what stands between white space. A pure function of the arguments; `example` is
        the number of the example.
        """
        copies = {tuple(texts): None}  # in order
        times = (20 if len(texts) == 1 else 10) if self.copies is None else self.copies
        for copy in range(times):
            varied = {place for place in range(len(texts)) if len(texts) == 1 or copy % 3 != place}
            copies[
                tuple(
                    self._varied(text.split(), tags[place], lexicon, (example, copy, place))
                    if place in varied
                    else text
                    for place, text in enumerate(texts)
                )
            ] = None
        return list(copies)[1:]

    def _varied(
        self, words: Sequence[str], tags: Tags, lexicon: Lexicon, place: tuple[int, ...]
    ) -> str:
        decisions = PerturbationDraw.CHANGED, PerturbationDraw.CHOSEN
        changed, chosen = (self._draws(len(words), *place, tag) for tag in decisions)
        made = [
            self.mask_token
            if change < self.mask
            else lexicon.word(tag, choice)
            if change < self.mask + self.replace
            else word
            for word, tag, change, choice in zip(words, tags, changed, chosen, strict=True)
        ]
        cut, length, start = self._draws(3, *place, PerturbationDraw.CUT)
        if cut >= self.ngram:
            return " ".join(made)
        size = min(1 + int(length * self.longest), len(made))
        first = int(start * (len(made) - size + 1))
        return " ".join(made[first : first + size])

    def _draws(self, count: int, *place: int) -> NDArray[np.float64]:
        """Numbers from 0 to 1."""
        keys = array_keys(scalar_key(self.seed, *place), np.arange(count))
        return (keys >> np.uint64(11)) / 2.0**53


def tagged(texts: Iterable[str], tags: Iterable[Tags]) -> Iterable[tuple[str, str]]:
    """The words of the texts, each with its tag."""
    for text, of_text in zip(texts, tags, strict=True):
        yield from zip(text.split(), of_text, strict=True)


def untagged(texts: Iterable[str]) -> list[Tags]:
    """The tags of texts whose words are never replaced: all the same."""
    return [[""] * len(text.split()) for text in texts]
