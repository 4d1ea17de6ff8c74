"""Encoding with a cache of words: each distinct word goes through the tokenizer only once.

In 10 MB of text nine of ten words have occurred before, and a lookup is much cheaper than encoding.
The ids equal those of the text encoded whole. The text is cut only at spaces, and only for
tokenizers with a known rule for it (`data_pipeline.tokenization.word_rules`). A document whose
tokens a cut could change is left to the caller, to be encoded whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray

from data_pipeline.tokenization.word_rules import SENTENCE, rule_of

CACHED_WORDS = 7 << 16  # about 90 MB
CACHED_CHARACTERS = 1 << 24  # of all words, for text without spaces


@dataclass(frozen=True)
class DocumentIds:
    """A tokenized document."""

    tokens: NDArray[np.integer]  # [tokens]
    sentences: NDArray[np.integer]  # [sentences] tokens of each


class WordEncoder:
    """Encodes documents with one tokenizer, and caches words."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer, self._rule = tokenizer, rule_of(tokenizer)
        self._numbers = _numbering([SENTENCE])
        self._characters = 0  # of all words
        self._sizes = np.zeros(1, np.int64)  # [words] ids of each
        self._in_context = np.zeros(1, bool)  # [words] True where the context decides the ids
        self._ids = np.zeros(0, np.int32)  # [ids of all words]

    def __call__(
        self, documents: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[DocumentIds | None]:
        """The ids of each document; None if it must be encoded whole.

        `ends` are the `sentence_ends` of each document, which may not begin or end with white
        space.
        """
        rule = self._rule
        if rule is None:
            return [None] * len(documents)
        texts = [rule.marked(text, stops) for text, stops in zip(documents, ends, strict=True)]
        numbers = self._look_up(rule.words("".join(filter(None, texts))))
        sizes, starts = self._sizes[numbers], offsets(self._sizes)[numbers]
        bounds = offsets(sizes)
        tokens = self._ids[np.repeat(starts - bounds[:-1], sizes) + np.arange(bounds[-1])]
        marks = np.append(np.flatnonzero(numbers == 0), len(numbers))
        in_context = offsets(self._in_context[numbers])[marks]
        self._evict()
        counts = [
            0 if text is None else len(stops) for text, stops in zip(texts, ends, strict=True)
        ]
        return list(_documents(tokens, bounds[marks], in_context, counts))

    def _look_up(self, words: list[str]) -> NDArray[np.int32]:
        """[words] the number of each word; new words are added to the cache."""
        known = len(self._numbers)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))
        self._learn([*islice(reversed(self._numbers), len(self._numbers) - known)][::-1])
        return numbers

    def _learn(self, words: list[str]) -> None:
        assert self._rule is not None
        texts = [*map(self._rule.text_of, words)]
        encoding = self._tokenizer.encode(texts, is_pretokenized=True, add_special_tokens=False)
        in_context = np.fromiter(map(self._rule.depends_on_context, texts), bool, len(texts))
        sizes = np.bincount(np.array(encoding.word_ids, np.int64), minlength=len(texts))
        self._ids = np.concatenate([self._ids, np.array(encoding.ids, np.int32)])
        self._sizes = np.concatenate([self._sizes, sizes])
        self._in_context = np.concatenate([self._in_context, in_context])
        self._characters += sum(map(len, texts))

    def _evict(self) -> None:
        """Drop the later half of a full cache: it holds the rarer words."""
        if len(self._numbers) > CACHED_WORDS or self._characters > CACHED_CHARACTERS:
            kept = len(self._numbers) // 2
            self._numbers = _numbering(islice(self._numbers, kept))
            self._characters = sum(map(len, self._numbers))
            self._sizes, self._in_context = self._sizes[:kept], self._in_context[:kept]
            self._ids = self._ids[: self._sizes.sum()]


def _numbering(words: Iterable[str]) -> defaultdict[str, int]:
    """The number of each word; one that is asked for first gets the next number."""
    numbers = defaultdict[str, int]()
    numbers.default_factory = numbers.__len__
    for word in words:
        numbers[word]
    return numbers


def _documents(
    tokens: NDArray[np.int32],
    bounds: NDArray[np.int64],
    in_context: NDArray[np.int64],
    counts: Sequence[int],
) -> Iterator[DocumentIds | None]:
    """Split the ids of a text into documents of so many sentences; None for those of none.

    `bounds` [sentences + 1] are offsets into the tokens, and `in_context` [sentences + 1] the words
    before each sentence whose context decides their ids: their documents are None too.
    """
    first = 0
    for count in counts:
        last = first + count
        if count and in_context[first] == in_context[last]:
            sentences = bounds[first : last + 1]
            yield DocumentIds(tokens[sentences[0] : sentences[-1]], np.diff(sentences))
        else:
            yield None
        first = last


def offsets(sizes: ArrayLike) -> NDArray[np.int64]:
    """The offsets of concatenated parts of these sizes, the end included: [parts + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
