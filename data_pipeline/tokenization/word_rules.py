"""Where text may be cut into words without changing its tokens, for the tokenizers we know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers

from data_pipeline.text.joined_text import ASCII_SPACE, LINE_FEED, SPACE, JoinedText
from data_pipeline.tokenization.sentencepiece_models import MARK
from data_pipeline.tokenization.unigram import ordinary_characters

# What follows the map of characters in a SentencePiece normalizer; see `vocabularies`.
_EVENED_OUT = [str(normalizers.Replace(Regex(" {2,}"), " ")), str(normalizers.Strip())]


@dataclass(frozen=True)
class WordRule:
    """Where text may be cut before white space without changing its tokens.

    With `keeps_runs`, not inside a run of white space, and a word must not end with any. With
    `line_feeds` these are spaces and are given as such; else they are part of words, and a sentence
    may end before one only after a byte of `before_line_feed`; a word that begins with one is
    encoded after `lead`. Documents with a character of `never` must not be cut at all.
    `stands_alone` says whether the tokens of a word are the same with and without others around it.
    """

    keeps_runs: bool = False
    line_feeds: bool = False
    before_line_feed: bytes = b""
    lead: str = ""
    never: str = "\0"
    stands_alone: Callable[[str], bool] = lambda word: True

    def word_starts(self, text: JoinedText) -> NDArray[np.bool_]:
        """[bytes] where a word begins."""
        starts = text.data == SPACE
        if self.keeps_runs:
            starts[1:] &= ~text.white[:-1]
        return starts

    def sentence_may_end(self, text: JoinedText, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[ends] whether a sentence may end at these bytes."""
        before, after = text.data[ends - 1], text.data[ends]
        if self.keeps_runs:
            return ~text.white[ends - 1] & ASCII_SPACE[after]
        fitting = np.isin(before, np.frombuffer(self.before_line_feed, np.uint8))
        return (after == SPACE) | ((after == LINE_FEED) & fitting)


# BERT's normalizer maps characters one by one, combining marks aside, which white space does not
# take up; its splitting drops white space.
BERT_RULE = WordRule(line_feeds=True)
# No match of GPT-2's pattern goes on from other characters to white space, and what it looks ahead
# for is the end of a run of white space, which must not be cut.
BYTE_LEVEL_RULE = WordRule(keeps_runs=True)


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
    if isinstance(splitter, pre_tokenizers.Metaspace):  # of SentencePiece
        marked = splitter.prepend_scheme == "always" and splitter.split
        return sentencepiece_rule(normalizer, tokenizer.get_vocab()) if marked else None
    return None


def sentencepiece_rule(
    normalizer: normalizers.Normalizer | None, pieces: Mapping[str, int]
) -> WordRule | None:
    """The rule for SentencePiece's normalization, after which one space begins each word.

    It maps clusters of characters, and a combining mark may take up the space before it: of words
    that are not plain it is tried out. A line feed that is not mapped to a space is a character
    that no piece has: whatever is around it is cut alike, and known characters stay apart from it.
    The one cluster that ends with white space is a line feed after a carriage return.
    """
    if not isinstance(normalizer, normalizers.Sequence):
        return None
    steps = [normalizer[number] for number in range(len(normalizer))]
    if steps and isinstance(steps[0], normalizers.Precompiled):
        del steps[0]
    if [str(step) for step in steps] != _EVENED_OUT:
        return None
    normalize = normalizer.normalize_str
    if normalize("a\nb") == "a b":
        return WordRule(line_feeds=True, never="\0\r", stands_alone=_apart(normalize, " \n", ""))
    known = [one for one in map(chr, range(33, 127)) if one in pieces and normalize(one) == one]
    if not known or any("\n" in piece for piece in pieces):
        return None
    return WordRule(
        before_line_feed="".join(known).encode(),
        lead=known[-1],
        never="\0\r",
        stands_alone=_apart(normalize, " ", known[-1]),
    )


def _apart(normalize: Callable[[str], str], spaces: str, lead: str) -> Callable[[str], bool]:
    """Whether a word is normalized alike by itself and between others, whatever the space, and is
    given a mark of its own, which is not put before another."""
    ordinary = ordinary_characters(normalize)

    def stands_alone(word: str) -> bool:
        text = lead + word if word.startswith("\n") else word.removeprefix(" ")
        if ordinary.issuperset(text):
            return True
        alone = normalize(f"x {normalize(text)} x")
        return MARK not in alone and all(
            normalize(f"x{before}{text}{after}x") == alone for before in spaces for after in spaces
        )

    return stands_alone
