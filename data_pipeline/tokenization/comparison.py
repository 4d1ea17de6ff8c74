"""How tokenizers read a text: ``tandem tokenizer compare``, and what a normalizer removes.

BERT's rule for uncased text strips every combining mark. That costs English little, and takes the
vowels out of Thai and Hindi. Nothing else in a corpus shows it.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers

from data_pipeline.errors import DataError
from data_pipeline.text.documents import read_documents
from data_pipeline.text.formats import ReadOptions
from data_pipeline.text.sentences import JOINERS, script_of
from data_pipeline.tokenization.tokenizer import load, unknown_id, word_prefix

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


BATCH = 1 << 14  # words encoded per call


@dataclass(frozen=True)
class Comparison:
    """How a tokenizer reads a text. Words are what stands between white space.

    unknown_words: the share of the words of which a part is unknown. loss: what its normalizer
    removes.
    """

    tokenizer: str
    vocab_size: int
    tokens_per_word: float
    characters_per_token: float
    unknown_words: float
    loss: NormalizationLoss


def compare(
    text: str, folders: Sequence[str], reading: ReadOptions | None = None
) -> list[Comparison]:
    """How each of the tokenizers reads the text. Raises DataError for a text without words."""
    loaded = [load(Path(folder)) for folder in folders]
    counters = [LossCounter(tokenizer) for tokenizer, _ in loaded]
    losses = [NormalizationLoss() for _ in loaded]
    words = Counter[str]()
    for document in read_documents([text], reading):
        words.update(document.split())
        for loss, counter in zip(losses, counters, strict=True):
            loss.add(counter([document]))
    if not words:
        raise DataError(f"{text}: holds no words")
    characters = sum(len(word) * count for word, count in words.items())
    comparisons = []
    for folder, (tokenizer, vocabulary), loss in zip(folders, loaded, losses, strict=True):
        tokens = unknown = 0
        unknown_token = unknown_id(tokenizer)
        for count, ids in zip(words.values(), encoded_words(tokenizer, words), strict=True):
            tokens += count * len(ids)
            unknown += count * (unknown_token in ids)
        total = words.total()
        shares = (tokens / total, characters / max(1, tokens), unknown / total)
        comparisons.append(Comparison(folder, vocabulary.vocab_size, *shares, loss))
    return comparisons


def encoded_words(tokenizer: tokenizers.Tokenizer, words: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each word in running text."""
    prefix = word_prefix(tokenizer)
    rest = iter(words)
    while batch := [prefix + word for word in islice(rest, BATCH)]:
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield encoding.ids
