"""Encoding by a table of words, so that each distinct word goes through the tokenizer once.

In 10 MB of text nineteen of twenty words occurred before, and looking one up is much cheaper than
encoding it. The ids are those of the whole text: the table is used only with tokenizers of which
it is known where text may be cut (`rule_of`), and for documents whose sentences all end there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

TABLE_WORDS = 1 << 18  # about 70 MB
LEARNED_AT_ONCE = 1 << 12  # words; what the tokenizer returns is large
# Unicode's White_Space; Python's \s has four control characters more.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ASCII_PUNCTUATION = r"!-/:-@\[-`{-~"

Ids = Sequence[int]


@dataclass(frozen=True)
class WordRule:
    """Where text may be cut without changing its tokens.

    `words` cuts a sentence wherever that is so; `sentence_end`, matched from a sentence's last
    character on, says whether it is so there.
    """

    words: Callable[[str], list[str]]
    sentence_end: re.Pattern[str]


# BERT's normalizer maps characters one by one, combining marks aside, which neither white space
# nor punctuation takes up; its splitting drops the one and makes each of the other a word.
BERT_RULE = WordRule(
    re.compile(rf"[^ \n{_ASCII_PUNCTUATION}]+|[{_ASCII_PUNCTUATION}]").findall,
    re.compile(r".[ \n]", re.DOTALL),
)
# No match of GPT-2's pattern goes on from other characters to white space, and what it looks ahead
# for is the end of a run of white space, which stays with the word after it.
BYTE_LEVEL_RULE = WordRule(
    re.compile(rf"[{_SPACE}]*[^{_SPACE}]+").findall,
    re.compile(rf"[^{_SPACE}][{_SPACE}]"),
)


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
    return None


class WordEncoder:
    """Encodes documents with one tokenizer, and remembers words."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer, self._rule = tokenizer, rule_of(tokenizer)
        self._added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._table: dict[str, Ids] = {}

    def __call__(
        self, documents: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[Ids] | None]:
        """The ids of each sentence of each document; None for one that must be encoded whole.

        `ends` says where the sentences of each document end, in characters.
        """
        cut = [self._words(text, stops) for text, stops in zip(documents, ends, strict=True)]
        self._learn({word for found in cut if found for words in found for word in words})
        look_up, joined = self._table.__getitem__, itertools.chain.from_iterable
        return [
            None if found is None else [tuple(joined(map(look_up, words))) for words in found]
            for found in cut
        ]

    def _words(self, text: str, ends: Sequence[int]) -> list[list[str]] | None:
        """The words of each sentence; None where the text may not be cut like that."""
        if self._rule is None or any(token in text for token in self._added):
            return None
        words, may_end = self._rule.words, self._rule.sentence_end.match
        if not all(may_end(text, end - 1) for end in ends[:-1]):
            return None
        return [words(text[start:end]) for start, end in itertools.pairwise([0, *ends])]

    def _learn(self, words: set[str]) -> None:
        """Put words into the table. When it is full, the later half, the rarer words, goes."""
        if len(self._table) > TABLE_WORDS:
            self._table = dict(itertools.islice(self._table.items(), TABLE_WORDS // 2))
        fresh = list(words - self._table.keys())
        for first in range(0, len(fresh), LEARNED_AT_ONCE):
            some = fresh[first : first + LEARNED_AT_ONCE]
            encoded = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            # Tuples of numbers, unlike lists, cost the garbage collector nothing.
            self._table.update((w, tuple(e.ids)) for w, e in zip(some, encoded, strict=True))
