"""The data augmentation of Tang et al. (arXiv 1903.12136, section 3.3): texts without sense.

In each copy a word is masked with one probability, and with another it is replaced by a word with
its part of speech, drawn by frequency. Then, with a third probability, only an n-gram of one to
five words is kept. Of an example of two texts, the copies vary the second, the first, and both in
turn. Copies that come out alike are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.hashing import PerturbationDraw, array_keys, scalar_key
from data_pipeline.task_files.conll import LAST, read_conll
from data_pipeline.task_files.contents import UTF_8

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

FEATURES = 2**18  # of the hash of what a word looks like
EDGE = ""  # the neighbour of a first or last word


class Tagger:
    """A linear classifier of each word by its form and its neighbours'."""

    def __init__(self, model: Pipeline) -> None:
        self._model = model

    @classmethod
    def learn(cls, path: Path, tag: int = LAST, encoding: str = UTF_8) -> Tagger:
        """Learn from a file of CoNLL's columns: words in the first one, tags in that of `tag`.

        Raises DataError for a file that cannot be read, or has one tag only, and where
        scikit-learn is missing.
        """
        try:
            from sklearn.feature_extraction import FeatureHasher
            from sklearn.linear_model import SGDClassifier
            from sklearn.pipeline import make_pipeline
        except ImportError:
            raise DataError(
                "scikit-learn: is missing, and --tagged needs it: pip install "
                "'tandem-distill[tasks]'"
            ) from None
        sentences = list(read_conll(str(path), tag=tag, encoding=encoding))
        tags = [entry for sentence in sentences for entry in sentence.tags]
        if len(set(tags)) < 2:
            raise DataError(
                f"{path}: all words have the tag {tags[0]}; choose another --tag-column"
            )
        model = make_pipeline(
            FeatureHasher(FEATURES, input_type="string"),
            SGDClassifier(max_iter=5, tol=None, random_state=0),
        )
        seen = [entry for sentence in sentences for entry in _features(sentence.words)]
        return cls(model.fit(seen, tags))

    def tags(self, texts: Sequence[str]) -> list[list[str]]:
        """The tags of the words of each text, which stand between white space."""
        words = [text.split() for text in texts]
        seen = [features for text in words for features in _features(text)]
        predicted = iter(self._model.predict(seen).tolist() if seen else ())
        return [[next(predicted) for _ in text] for text in words]


def _features(words: Sequence[str]) -> Iterator[list[str]]:
    """The features of each word, for the classifier."""
    around = [EDGE, *(word.lower() for word in words), EDGE]
    for number, word in enumerate(words):
        before, this, after = around[number : number + 3]
        shape = f"{word[0].isupper()}{any(map(str.isdigit, word))}{word.isalpha()}"
        yield [
            "bias", f"is={this}", f"before={before}", f"after={after}", f"shape={shape}",
            *(f"end={this[-size:]}" for size in (1, 2, 3)), f"start={this[:2]}",
            f"before end={before[-2:]}", f"after end={after[-2:]}",
        ]  # fmt: skip


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
