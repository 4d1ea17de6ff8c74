"""Encoding by a table of words, so that each distinct word goes through the tokenizer once.

In 10 MB of text nine of ten words occurred before, and looking one up is much cheaper than
encoding it. The ids are those of the whole text: it is cut only where white space begins, with
tokenizers of which it is known what that changes (`data_pipeline.tokenization.word_rules`), and a
document whose tokens it could change is left to be encoded whole.
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
from data_pipeline.text.joined_text import JoinedText, edges
from data_pipeline.text.sentence_search import find_sentences
from data_pipeline.tokenization.unigram import ordinary_words_of
from data_pipeline.tokenization.word_rules import rule_of
from data_pipeline.tokenization.word_table import WordTable

TABLE_WORDS = 7 << 16  # about 40 MB; an eighth less than would double the table of slots
TABLE_STEPS = 1 << 22  # 32 MB more, for text without spaces
LEARNED_AT_ONCE = 1 << 12  # words; what the tokenizer returns is large
# Where the ids of a word start, how many they are, and whether they are these wherever it stands.
WORD = np.dtype([("start", "<i4"), ("size", "<i4"), ("alone", "?")])


@dataclass(frozen=True)
class DocumentIds:
    """A tokenized document."""

    tokens: NDArray[np.integer]  # [tokens]
    sentences: NDArray[np.integer]  # [sentences] tokens of each


class WordEncoder:
    """Encodes documents with one tokenizer, and remembers words."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, separator: int) -> None:
        """`separator` is the id of a special token."""
        self._tokenizer, self._separator = tokenizer, separator
        added = tokenizer.get_added_tokens_decoder()
        self._added = [token.content for token in added.values()]
        self._mark = tokenizer.id_to_token(separator) or ""
        self._rule = rule_of(tokenizer) if _separates(added, separator) else None
        unigram = isinstance(tokenizer.model, models.Unigram)
        self._ordinary = ordinary_words_of(tokenizer) if self._rule and unigram else None
        self._table = WordTable()
        self._tokens = _WordTokens()

    def __call__(self, documents: Sequence[str]) -> list[DocumentIds | None]:
        """The ids of each document; None for one that must be encoded whole.

        No document may begin or end with white space.
        """
        if self._rule is None:
            return [None] * len(documents)
        text = JoinedText.of(documents)
        sentences, before = find_sentences(text)
        if self._rule.line_feeds:
            text = text.with_spaces()
        whole = self._whole(text, documents, sentences, before)
        starts, stops = self._cut(text, whole, sentences)
        numbers, new = self._table.numbers(text.windows, starts, stops)
        self._learn(text, numbers[new], starts[new], stops[new])
        ids, sizes, alone = self._tokens.of(numbers)
        self._forget()
        words = np.searchsorted(starts, sentences)  # before each sentence, and of all
        in_context = np.diff(edges(~alone)[words[before]]) > 0
        return _documents(ids, edges(sizes)[words], before, whole | in_context)

    def _whole(
        self,
        text: JoinedText,
        documents: Sequence[str],
        sentences: NDArray[np.int64],
        before: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """[documents] which of them must not be cut."""
        assert self._rule is not None
        may_end = self._rule.sentence_may_end(text, sentences)
        may_end[before] = True  # as a document does
        whole = np.diff(edges(~may_end)[before]) > 0
        marks = [*self._added, *self._rule.never]
        if found := [mark for mark in marks if _holds(text.encoded, mark.encode())]:
            whole |= [any(mark in one for mark in found) for one in documents]
        return whole

    def _cut(
        self, text: JoinedText, whole: NDArray[np.bool_], sentences: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the words of documents that may be cut start and end."""
        assert self._rule is not None
        begins = self._rule.word_starts(text)
        begins[sentences] = True
        starts = np.flatnonzero(begins)  # and the end of the text
        words = np.diff(np.searchsorted(starts, text.documents))
        cut = np.repeat(~whole, words)
        return starts[:-1][cut], starts[1:][cut]

    def _learn(
        self,
        text: JoinedText,
        number: NDArray[np.int32],
        start: NDArray[np.int64],
        stop: NDArray[np.int64],
    ) -> None:
        """Encode new words."""
        assert self._rule is not None
        if self._ordinary:
            those, ids, sizes = self._ordinary(text.data, start, stop)
            self._tokens.add(number[those], ids, sizes, np.ones(len(sizes), bool))
            number, start, stop = number[~those], start[~those], stop[~those]
        words = [
            text.data[first:last].tobytes().decode()
            for first, last in zip(start.tolist(), stop.tolist(), strict=True)
        ]
        alone = np.fromiter(map(self._rule.stands_alone, words), bool, len(words))
        if self._rule.keeps_runs:
            alone &= ~text.white[stop - 1]
        for first in range(0, len(words), LEARNED_AT_ONCE):
            part = slice(first, first + LEARNED_AT_ONCE)
            self._tokens.add(number[part], *self._encode(words[part]), alone[part])

    def _encode(self, words: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids of words, end to end, and how many each has."""
        assert self._rule is not None
        lead = self._rule.lead
        led = np.array([lead != "" and word[:1] == "\n" for word in words], bool)
        texts = [lead + word if leads else word for word, leads in zip(words, led, strict=True)]
        text = self._mark.join([lead, *texts])
        (one,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = np.array(one.ids, np.int32)
        is_separator = ids == self._separator
        marks = np.concatenate([[-1], np.flatnonzero(is_separator), [len(ids)]])
        assert len(marks) == len(words) + 2, "a word with a special token in it"
        lead_size, sizes = int(marks[1]), np.diff(marks)[1:] - 1
        keep = ~is_separator
        for start in [0, *(marks[1:-1][led] + 1).tolist()]:
            keep[start : start + lead_size] = False
        return ids[keep], (sizes - lead_size * led).astype(np.int32)

    def _forget(self) -> None:
        """Of a full table the later half, the rarer words, goes."""
        if len(self._table) > TABLE_WORDS or self._table.steps > TABLE_STEPS:
            self._table.forget_after(len(self._table) // 2)
            self._tokens = self._tokens.first(len(self._table))


class _WordTokens:
    """The tokens of words, by number. Arrays have room for more."""

    def __init__(self) -> None:
        self._words = np.zeros(0, WORD)
        self._ids = np.zeros(0, np.int32)  # [tokens of all words]
        self._count = 0  # of those

    def add(
        self,
        numbers: NDArray[np.int32],
        ids: NDArray[np.int32],
        sizes: NDArray[np.int32],
        alone: NDArray[np.bool_],
    ) -> None:
        """Take up words: their ids end to end, how many each has, whether it stands alone."""
        self._words = _with_room(self._words, numbers.max(initial=-1) + 1)
        self._words["start"][numbers] = self._count + edges(sizes)[:-1]
        self._words["size"][numbers], self._words["alone"][numbers] = sizes, alone
        self._ids = _with_room(self._ids, self._count + len(ids))
        self._ids[self._count : self._count + len(ids)] = ids
        self._count += len(ids)

    def of(
        self, numbers: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """What was taken up for words."""
        return _tokens_of(numbers, self._words, self._ids)

    def first(self, count: int) -> _WordTokens:
        """Those of the first `count` words."""
        kept = _WordTokens()
        numbers = np.arange(count, dtype=np.int32)
        kept.add(numbers, *self.of(numbers))
        return kept


@compiled
def _tokens_of(
    numbers: NDArray[np.int32], words: NDArray[np.void], ids: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    sizes, alone = np.empty(len(numbers), np.int32), np.empty(len(numbers), np.bool_)
    for place in range(len(numbers)):
        word = words[numbers[place]]
        sizes[place], alone[place] = word.size, word.alone
    joined = np.empty(sizes.sum(), np.int32)
    done = 0
    for place in range(len(numbers)):
        start = words[numbers[place]].start
        for token in range(sizes[place]):
            joined[done] = ids[start + token]
            done += 1
    return joined, sizes, alone


def _with_room(array: NDArray, size: int) -> NDArray:
    """The array, or twice as much and zeros where it lacks room."""
    return array if size <= len(array) else np.pad(array, (0, max(size, 2 * len(array))))


def _documents(
    ids: NDArray[np.int32],
    tokens: NDArray[np.int64],
    sentences: NDArray[np.int64],
    passed_over: NDArray[np.bool_],
) -> list[DocumentIds | None]:
    """Documents of a text with these ids: so many `tokens` are before each of its sentences, so
    many `sentences` before each of its documents."""
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
    """Whether a mark occurs; its first byte alone is found much more quickly."""
    return mark[:1] in text and mark in text


def _separates(added: dict[int, AddedToken], separator: int) -> bool:
    """Whether an added token is cut out of any text, and nothing but itself."""
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
