"""Encoding by a table of words, so that each distinct word goes through the tokenizer once.

In 10 MB of text nine of ten words occurred before, and looking one up is much cheaper than
encoding it. The ids are those of the whole text: it is cut only where white space begins, with
tokenizers of which it is known what that changes (`rule_of`), and a document whose tokens it could
change is left to be encoded whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

TABLE_WORDS = 1 << 18  # about 40 MB
LEARNED_AT_ONCE = 1 << 12  # words; what the tokenizer returns is large
# Unicode's White_Space; Python's \s has four control characters more.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# What follows the map of characters in a SentencePiece normalizer; see `vocabularies`.
_EVENED_OUT = [str(normalizers.Replace(Regex(" {2,}"), " ")), str(normalizers.Strip())]


@dataclass(frozen=True)
class WordRule:
    """Where text may be cut before white space without changing its tokens.

    `sentence_end`, matched from a sentence's last character on, says whether it may be cut there;
    `stands_alone` whether a word's tokens are the same with and without the words around it. Where
    white space comes in runs that must not be cut, `runs` finds the words, each after its own.
    Where line feeds are no white space, what begins with one is encoded after `lead`.
    """

    sentence_end: re.Pattern[str]
    stands_alone: Callable[[str], bool] = lambda word: True
    runs: re.Pattern[str] | None = None
    lead: str = ""


@dataclass(frozen=True)
class DocumentIds:
    """A tokenized document."""

    tokens: NDArray[np.integer]  # [tokens]
    sentences: NDArray[np.integer]  # [sentences] tokens of each


def rule_of(tokenizer: tokenizers.Tokenizer) -> WordRule | None:
    """Where text without added tokens may be cut for a tokenizer, None where that is not known."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder().values()
    if normalizer is not None and any(token.normalized for token in added):
        return None  # they may occur in normalized text only
    kinds = (type(tokenizer.model), type(normalizer), type(splitter))
    if kinds == (models.WordPiece, normalizers.BertNormalizer, pre_tokenizers.BertPreTokenizer):
        return BERT_RULE
    if kinds[0] is models.BPE and isinstance(splitter, pre_tokenizers.ByteLevel):
        known = kinds[1] in (type(None), normalizers.Lowercase)
        plain = splitter.use_regex and not splitter.add_prefix_space
        return BYTE_LEVEL_RULE if known and plain else None
    if kinds[0] is models.Unigram and isinstance(splitter, pre_tokenizers.Metaspace):
        marked = splitter.prepend_scheme == "always" and splitter.split
        return unigram_rule(normalizer, tokenizer.get_vocab()) if marked else None
    return None


# BERT's normalizer maps characters one by one, combining marks aside, which white space does not
# take up; its splitting drops white space.
BERT_RULE = WordRule(re.compile(r".[ \n]", re.DOTALL))
# No match of GPT-2's pattern goes on from other characters to white space, and what it looks ahead
# for is the end of a run of white space, which must not be cut.
BYTE_LEVEL_RULE = WordRule(
    re.compile(rf"[^{_SPACE}][{_SPACE}]"),
    lambda word: word != "" and not word[-1].isspace(),
    re.compile(rf"[{_SPACE}]*[^{_SPACE}]+"),
)


def unigram_rule(
    normalizer: normalizers.Normalizer | None, pieces: Mapping[str, int]
) -> WordRule | None:
    """The rule for SentencePiece's normalization, after which one space begins each word.

    It maps clusters of characters, and a combining mark may take up the space before it: of words
    that are not plain it is tried out. A line feed that is not mapped to a space is a character
    that no piece has: whatever is around it is cut alike, and known characters stay apart from it.
    """
    if not isinstance(normalizer, normalizers.Sequence):
        return None
    steps = [normalizer[number] for number in range(len(normalizer))]
    if steps and isinstance(steps[0], normalizers.Precompiled):
        del steps[0]
    if [str(step) for step in steps] != _EVENED_OUT:
        return None
    normalize = normalizer.normalize_str
    # The one cluster with white space at its end is a line feed after a carriage return.
    ends, lead = r"[^\r][ \n]", ""
    if normalize("a\nb") != "a b":
        known = [one for one in map(chr, range(33, 127)) if one in pieces and normalize(one) == one]
        if not known or any("\n" in piece for piece in pieces):
            return None
        ends, lead = rf".[ ]|[{re.escape(''.join(known))}]\n", known[-1]

    def stands_alone(word: str) -> bool:
        text = lead + word[1:] if word[:2] == " \n" else word
        plain = text.isascii() and text.isprintable()
        return plain or normalize(f"x {text} x") == normalize(f"x {normalize(text)} x")

    return WordRule(re.compile(ends, re.DOTALL), stands_alone, lead=lead)


class WordEncoder:
    """Encodes documents with one tokenizer, and remembers words."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, separator: int) -> None:
        """`separator` is the id of a special token."""
        self._tokenizer, self._separator = tokenizer, separator
        added = tokenizer.get_added_tokens_decoder()
        self._added = [token.content for token in added.values()]
        self._mark = tokenizer.id_to_token(separator) or ""
        self._rule = rule_of(tokenizer) if _separates(added, separator) else None
        self._table = _Table({})
        self._words = _Words.none()

    def __call__(
        self, documents: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[DocumentIds | None]:
        """The ids of each document; None for one that must be encoded whole.

        `ends` says where the sentences of each document end, in characters.
        """
        may_cut = [self._may_cut(text, stops) for text, stops in zip(documents, ends, strict=True)]
        words: list[str] = []
        counts: list[int] = []  # words of each sentence
        for text, stops, may in zip(documents, ends, may_cut, strict=True):
            for start, end in itertools.pairwise([0, *stops]) if may else ():
                found = self._cut(text[start:end])
                counts.append(len(found))
                words += found
        sentences = [len(stops) for stops, may in zip(ends, may_cut, strict=True) if may]
        numbers = self._numbers(words)
        encoded = self._words.documents(numbers, counts, sentences)
        return [next(encoded) if may else None for may in may_cut]

    def _may_cut(self, text: str, ends: Sequence[int]) -> bool:
        if self._rule is None or any(token in text for token in self._added):
            return False
        may_end = self._rule.sentence_end.match
        return all(may_end(text, end - 1) for end in ends[:-1])

    def _cut(self, sentence: str) -> list[str]:
        """The words of a sentence, without the space that was before each.

        Where it was none, or more, this stands before the word, and a space to tell it by.
        """
        assert self._rule is not None
        if self._rule.runs and ("  " in sentence or "\n " in sentence):
            return [" " + word for word in self._rule.runs.findall(sentence)]
        words = sentence.split(" ")
        if sentence[0] == " ":
            del words[0]  # what was before that space
        else:
            words[0] = " " + words[0]
        return words

    def _numbers(self, words: list[str]) -> NDArray[np.int32]:
        """The number in the table of each word; new ones are learnt."""
        if len(self._table) > TABLE_WORDS:  # the later half, the rarer words, goes
            self._table = _Table(itertools.islice(self._table.items(), TABLE_WORDS // 2))
            self._words = self._words.first(len(self._table))
        numbers = np.fromiter(map(self._table.__getitem__, words), np.int32, len(words))
        fresh = [*itertools.islice(self._table, len(self._words.sizes), None)]
        parts = [
            self._learn(fresh[first : first + LEARNED_AT_ONCE])
            for first in range(0, len(fresh), LEARNED_AT_ONCE)
        ]
        self._words = self._words.joined(parts)
        return numbers

    def _learn(self, words: list[str]) -> _Words:
        """Words of the table, encoded."""
        assert self._rule is not None
        lead = self._rule.lead
        led = np.array([lead != "" and word[:2] == " \n" for word in words], bool)
        text = self._mark.join([lead, *map(self._text_of, words)])
        (one,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = np.array(one.ids, np.int32)
        is_separator = ids == self._separator
        edges = np.concatenate([[-1], np.flatnonzero(is_separator), [len(ids)]])
        assert len(edges) == len(words) + 2, "a word with a special token in it"
        lead_size, sizes = int(edges[1]), np.diff(edges)[1:] - 1
        keep = ~is_separator
        for start in [0, *(edges[1:-1][led] + 1).tolist()]:
            keep[start : start + lead_size] = False
        alone = np.fromiter(map(self._rule.stands_alone, words), bool, len(words))
        return _Words(ids[keep], sizes - lead_size * led, alone)

    def _text_of(self, word: str) -> str:
        """What is encoded for a word of the table."""
        assert self._rule is not None
        if word[:1] != " ":
            return " " + word
        return self._rule.lead + word[1:] if word[1:2] == "\n" else word[1:]


class _Table(dict[str, int]):
    """The number of each word; a new one takes the next number."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


@dataclass(frozen=True)
class _Words:
    """The tokens of words, by number."""

    ids: NDArray[np.int32]  # [tokens of all words]
    sizes: NDArray[np.int64]  # [words] tokens of each
    alone: NDArray[np.bool_]  # [words] whether these are its tokens wherever it stands

    @classmethod
    def none(cls) -> _Words:
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, bool))

    def first(self, count: int) -> _Words:
        sizes = self.sizes[:count]
        return _Words(self.ids[: sizes.sum()], sizes, self.alone[:count])

    def joined(self, others: Sequence[_Words]) -> _Words:
        every = [self, *others]
        return _Words(
            np.concatenate([one.ids for one in every]),
            np.concatenate([one.sizes for one in every]),
            np.concatenate([one.alone for one in every]),
        )

    def documents(
        self, numbers: NDArray[np.int32], words: Sequence[int], sentences: Sequence[int]
    ) -> Iterator[DocumentIds | None]:
        """Documents out of the numbers of their words, so many `words` in each sentence and so many
        `sentences` in each document; None for one that must be encoded whole."""
        sizes = self.sizes[numbers]
        token_edges = _edges(sizes)
        starts = (np.cumsum(self.sizes) - self.sizes)[numbers]
        tokens = self.ids[np.repeat(starts - token_edges[:-1], sizes) + np.arange(token_edges[-1])]
        word_edges = _edges(words)
        sentence_sizes = np.diff(token_edges[word_edges])
        bad = _edges(~self.alone[numbers])
        for first, last in itertools.pairwise(_edges(sentences).tolist()):
            start, end = word_edges[first], word_edges[last]
            if bad[start] < bad[end]:
                yield None
            else:
                part = slice(token_edges[start], token_edges[end])
                yield DocumentIds(tokens[part], sentence_sizes[first:last])


def _edges(sizes: ArrayLike) -> NDArray[np.int64]:
    """Where parts of these sizes, end to end, begin and end: [parts + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


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
