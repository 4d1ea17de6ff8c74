"""Encoding with a cache of words: each distinct word goes through the tokenizer only once.

In 10 MB of text nine of ten words have occurred before, and a lookup is much cheaper than encoding.
The ids equal those of the text encoded whole. The text is cut only before white space, and only for
tokenizers with a known rule for it (`data_pipeline.tokenization.word_rules`). A document whose
tokens a cut could change is left to the caller, to be encoded whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, models

from data_pipeline.text.compiled import compiled
from data_pipeline.text.joined_text import JoinedText, offsets
from data_pipeline.text.sentence_search import find_sentences
from data_pipeline.tokenization.unigram import ordinary_words_of
from data_pipeline.tokenization.word_rules import rule_of
from data_pipeline.tokenization.word_table import WordTable

TABLE_WORDS = 7 << 16  # about 40 MB; an eighth below the size at which the slots double
TABLE_STEPS = 1 << 22  # 32 MB more, for text without spaces
LEARN_BATCH = 1 << 12  # words encoded per call; the tokenizer's results take much memory
# The offset and number of a word's ids, and whether they are the same in any context.
WORD = np.dtype([("start", "<i4"), ("size", "<i4"), ("context_free", "?")])


@dataclass(frozen=True)
class DocumentIds:
    """A tokenized document."""

    tokens: NDArray[np.integer]  # [tokens]
    sentences: NDArray[np.integer]  # [sentences] tokens of each


class WordEncoder:
    """Encodes documents with one tokenizer, and caches words."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, separator: int) -> None:
        """`separator` is the id of a special token that never occurs in text."""
        self._tokenizer, self._separator = tokenizer, separator
        added = tokenizer.get_added_tokens_decoder()
        self._added = [token.content for token in added.values()]
        self._mark = tokenizer.id_to_token(separator) or ""
        self._rule = rule_of(tokenizer) if _is_safe_separator(added, separator) else None
        unigram = isinstance(tokenizer.model, models.Unigram)
        self._ordinary = ordinary_words_of(tokenizer) if self._rule and unigram else None
        self._table = WordTable()
        self._tokens = _WordTokens()

    def __call__(self, documents: Sequence[str]) -> list[DocumentIds | None]:
        """The ids of each document; None if it must be encoded whole.

        No document may begin or end with white space.
        """
        if self._rule is None:
            return [None] * len(documents)
        text = JoinedText.of(documents)
        sentences, before = find_sentences(text)
        if self._rule.line_feeds:
            text = text.with_spaces()
        undivided = self._whole(text, documents, sentences, before)
        starts, stops = self._cut(text, undivided, sentences)
        numbers, new = self._table.numbers(text.windows, starts, stops)
        self._learn(text, numbers[new], starts[new], stops[new])
        ids, sizes, context_free = self._tokens.of(numbers)
        self._evict()
        words = np.searchsorted(starts, sentences)  # [sentences + 1] word offsets
        in_context = np.diff(offsets(~context_free)[words[before]]) > 0
        return _documents(ids, offsets(sizes)[words], before, undivided | in_context)

    def _whole(
        self,
        text: JoinedText,
        documents: Sequence[str],
        sentences: NDArray[np.int64],
        before: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """[documents] True for those that must be encoded whole."""
        assert self._rule is not None
        may_end = self._rule.sentence_may_end(text, sentences)
        may_end[before] = True  # a document boundary is always a safe cut
        undivided = np.diff(offsets(~may_end)[before]) > 0
        marks = [*self._added, *self._rule.forbidden]
        if present := [mark for mark in marks if _holds(text.encoded, mark.encode())]:
            undivided |= [any(mark in document for mark in present) for document in documents]
        return undivided

    def _cut(
        self, text: JoinedText, undivided: NDArray[np.bool_], sentences: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The byte offsets at which words start and stop, in documents that may be cut."""
        assert self._rule is not None
        begins = self._rule.word_starts(text)
        begins[sentences] = True
        starts = np.flatnonzero(begins)  # the last is the end of the text
        words = np.diff(np.searchsorted(starts, text.documents))
        cut = np.repeat(~undivided, words)
        return starts[:-1][cut], starts[1:][cut]

    def _learn(
        self,
        text: JoinedText,
        number: NDArray[np.int32],
        start: NDArray[np.int64],
        stop: NDArray[np.int64],
    ) -> None:
        """Encode new words and add them to the cache."""
        assert self._rule is not None
        if self._ordinary:
            those, ids, sizes = self._ordinary(text.data, start, stop)
            self._tokens.add(number[those], ids, sizes, np.ones(len(sizes), bool))
            number, start, stop = number[~those], start[~those], stop[~those]
        words = [
            text.data[first:last].tobytes().decode()
            for first, last in zip(start.tolist(), stop.tolist(), strict=True)
        ]
        context_free = np.fromiter(map(self._rule.is_context_free, words), bool, len(words))
        if self._rule.keeps_runs:
            context_free &= ~text.white[stop - 1]
        for first in range(0, len(words), LEARN_BATCH):
            part = slice(first, first + LEARN_BATCH)
            self._tokens.add(number[part], *self._encode(words[part]), context_free[part])

    def _encode(self, words: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The concatenated ids of words, and the number of ids per word."""
        assert self._rule is not None
        lead = self._rule.lead
        led = np.array([lead != "" and word[:1] == "\n" for word in words], bool)
        texts = [lead + word if leads else word for word, leads in zip(words, led, strict=True)]
        text = self._mark.join([lead, *texts])
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        is_separator = ids == self._separator
        marks = np.concatenate([[-1], np.flatnonzero(is_separator), [len(ids)]])
        assert len(marks) == len(words) + 2, "a word with a special token in it"
        lead_size, sizes = int(marks[1]), np.diff(marks)[1:] - 1
        keep = ~is_separator
        for start in [0, *(marks[1:-1][led] + 1).tolist()]:
            keep[start : start + lead_size] = False
        return ids[keep], (sizes - lead_size * led).astype(np.int32)

    def _evict(self) -> None:
        """Drop the later half of a full table: it holds the rarer words."""
        if len(self._table) > TABLE_WORDS or self._table.steps > TABLE_STEPS:
            self._table.truncate(len(self._table) // 2)
            self._tokens = self._tokens.first(len(self._table))


class _WordTokens:
    """The ids of words, by word number. The arrays have spare room."""

    def __init__(self) -> None:
        self._words = np.zeros(0, WORD)
        self._ids = np.zeros(0, np.int32)  # [tokens of all words]
        self._count = 0  # ids in use

    def add(
        self,
        numbers: NDArray[np.int32],
        ids: NDArray[np.int32],
        sizes: NDArray[np.int32],
        context_free: NDArray[np.bool_],
    ) -> None:
        """Add words: their concatenated ids, the number of ids per word, and `context_free`."""
        self._words = _grown_to(self._words, numbers.max(initial=-1) + 1)
        self._words["start"][numbers] = self._count + offsets(sizes)[:-1]
        self._words["size"][numbers], self._words["context_free"][numbers] = sizes, context_free
        self._ids = _grown_to(self._ids, self._count + len(ids))
        self._ids[self._count : self._count + len(ids)] = ids
        self._count += len(ids)

    def of(
        self, numbers: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """(concatenated ids, ids per word, context_free) of the given words."""
        return _tokens_of(numbers, self._words, self._ids)

    def first(self, count: int) -> _WordTokens:
        """A copy that holds only the first `count` words."""
        kept = _WordTokens()
        numbers = np.arange(count, dtype=np.int32)
        kept.add(numbers, *self.of(numbers))
        return kept


@compiled
def _tokens_of(
    numbers: NDArray[np.int32], words: NDArray[np.void], ids: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    sizes, context_free = np.empty(len(numbers), np.int32), np.empty(len(numbers), np.bool_)
    for place in range(len(numbers)):
        word = words[numbers[place]]
        sizes[place], context_free[place] = word.size, word.context_free
    joined = np.empty(sizes.sum(), np.int32)
    done = 0
    for place in range(len(numbers)):
        start = words[numbers[place]].start
        for token in range(sizes[place]):
            joined[done] = ids[start + token]
            done += 1
    return joined, sizes, context_free


def _grown_to(array: NDArray, size: int) -> NDArray:
    """The array, zero-padded to at least `size`; it at least doubles when it grows."""
    return array if size <= len(array) else np.pad(array, (0, max(size, 2 * len(array))))


def _documents(
    ids: NDArray[np.int32],
    tokens: NDArray[np.int64],
    sentences: NDArray[np.int64],
    passed_over: NDArray[np.bool_],
) -> list[DocumentIds | None]:
    """Split the ids of a text into documents; None for those in `passed_over`.

    `tokens` [sentences + 1] and `sentences` [documents + 1] are offsets.
    """
    sizes = np.diff(tokens)
    parts = zip(
        itertools.pairwise(sentences.tolist()),
        itertools.pairwise(tokens[sentences].tolist()),
        passed_over.tolist(),
        strict=True,
    )
    return [
        None if is_passed_over else DocumentIds(ids[slice(*place)], sizes[slice(*part)])
        for part, place, is_passed_over in parts
    ]


def _holds(text: bytes, mark: bytes) -> bool:
    """Whether `mark` occurs in `text`; checks its first byte first, which is much faster."""
    return mark[:1] in text and mark in text


def _is_safe_separator(added: dict[int, AddedToken], separator: int) -> bool:
    """Whether the separator is always recognised as a token, and takes no text beside it along."""
    token = added.get(separator)
    if token is None or token.normalized or token.single_word or token.lstrip or token.rstrip:
        return False
    mark = token.content
    others = [other.content for other in added.values() if other.content != mark]
    parts = [mark[:size] for size in range(1, len(mark) + 1)]
    tails = [mark[-size:] for size in range(1, len(mark) + 1)]
    return not any(
        other.endswith(head) or other.startswith(tail)
        for other in others
        for head, tail in zip(parts, tails, strict=True)
    )
