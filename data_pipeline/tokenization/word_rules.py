"""Rules that say where text can be cut into words without changing its tokens."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers

from data_pipeline.text.joined_text import ASCII_SPACE, LINE_FEED, SPACE, JoinedText
from data_pipeline.tokenization.sentencepiece_models import MARK
from data_pipeline.tokenization.unigram import ordinary_characters
from data_pipeline.tokenization.vocabularies import byte_level_words

# The steps after the character map in a normalizer made by `sentencepiece_models`.
_SPACE_NORMALIZATION = [str(normalizers.Replace(Regex(" {2,}"), " ")), str(normalizers.Strip())]


@dataclass(frozen=True)
class WordRule:
    """Where text can be cut before white space without changing its tokens.

    keeps_runs: a run of white space must not be cut, and a word must not end with white space.
    line_feeds: a line feed is equivalent to a space and is replaced by one. Without it, line feeds
        are part of words.
    before_line_feed: a sentence may end before a line feed only after one of these bytes.
    lead: the character put before a word that begins with a line feed when it is encoded.
    forbidden: a document with one of these characters must not be cut at all.
    is_context_free: whether the tokens of a word do not depend on its neighbours.
    """

    keeps_runs: bool = False
    line_feeds: bool = False
    before_line_feed: bytes = b""
    lead: str = ""
    forbidden: str = "\0"
    is_context_free: Callable[[str], bool] = lambda word: True

    def word_starts(self, text: JoinedText) -> NDArray[np.bool_]:
        """[bytes] True where a word begins."""
        starts = text.data == SPACE
        if self.keeps_runs:
            starts[1:] &= ~text.white[:-1]
        return starts

    def sentence_may_end(self, text: JoinedText, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[ends] True where a sentence may end at the byte offset in `ends`."""
        before, after = text.data[ends - 1], text.data[ends]
        if self.keeps_runs:
            return ~text.white[ends - 1] & ASCII_SPACE[after]
        fitting = np.isin(before, np.frombuffer(self.before_line_feed, np.uint8))
        return (after == SPACE) | ((after == LINE_FEED) & fitting)


# BERT's normalizer maps characters one by one, combining marks aside. White space does not absorb
# combining marks, and the word splitting drops white space.
BERT_RULE = WordRule(line_feeds=True)
# No match of GPT-2's pattern, with marks or without, extends from other characters into white
# space. Its lookahead finds the end of a run of white space, so such a run must not be cut.
BYTE_LEVEL_RULE = WordRule(keeps_runs=True)


def rule_of(tokenizer: tokenizers.Tokenizer) -> WordRule | None:
    """The rule for a tokenizer and text without added tokens; None if no rule is known."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder().values()
    if normalizer is not None and any(token.normalized for token in added):
        return None  # an added token may appear only after normalization
    kinds = (type(tokenizer.model), type(normalizer), type(splitter))
    if kinds == (models.WordPiece, normalizers.BertNormalizer, pre_tokenizers.BertPreTokenizer):
        return BERT_RULE
    if kinds[0] is models.BPE and _is_byte_level(splitter):
        return BYTE_LEVEL_RULE if kinds[1] in (type(None), normalizers.Lowercase) else None
    if isinstance(splitter, pre_tokenizers.Metaspace):  # of SentencePiece
        marked = splitter.prepend_scheme == "always" and splitter.split
        return sentencepiece_rule(normalizer, tokenizer.get_vocab()) if marked else None
    return None


def _is_byte_level(splitter: pre_tokenizers.PreTokenizer) -> bool:
    """Whether it splits as GPT-2 does, perhaps with marks as parts of words."""
    if isinstance(splitter, pre_tokenizers.ByteLevel):
        return splitter.use_regex and not splitter.add_prefix_space
    return pickle.dumps(splitter) == pickle.dumps(byte_level_words())


def sentencepiece_rule(
    normalizer: normalizers.Normalizer | None, pieces: Mapping[str, int]
) -> WordRule | None:
    """The rule for SentencePiece's normalization, after which one space begins each word.

    The normalization maps clusters of characters, and a combining mark may absorb the space before
    it. So words that are not plain are tested one by one. A line feed may not be mapped to a space:
    then no piece contains it, and the text on both sides of it is segmented independently. The only
    cluster that ends with white space is a carriage return with a line feed.
    """
    if not isinstance(normalizer, normalizers.Sequence):
        return None
    steps = [normalizer[number] for number in range(len(normalizer))]
    if steps and isinstance(steps[0], normalizers.Precompiled):
        del steps[0]
    if [str(step) for step in steps] != _SPACE_NORMALIZATION:
        return None
    normalize = normalizer.normalize_str
    if normalize("a\nb") == "a b":
        return WordRule(
            line_feeds=True,
            forbidden="\0\r",
            is_context_free=_context_free_test(normalize, " \n", ""),
        )
    known = [
        character
        for character in map(chr, range(33, 127))
        if character in pieces and normalize(character) == character
    ]
    if not known or any("\n" in piece for piece in pieces):
        return None
    return WordRule(
        before_line_feed="".join(known).encode(),
        lead=known[-1],
        forbidden="\0\r",
        is_context_free=_context_free_test(normalize, " ", known[-1]),
    )


def _context_free_test(
    normalize: Callable[[str], str], spaces: str, lead: str
) -> Callable[[str], bool]:
    """A test of whether a word is normalized alike by itself and between other words.

    The test tries each of the `spaces` on both sides. It fails if normalization makes a second
    word mark appear inside the word.
    """
    ordinary = ordinary_characters(normalize)

    def is_context_free(word: str) -> bool:
        text = lead + word if word.startswith("\n") else word.removeprefix(" ")
        if ordinary.issuperset(text):
            return True
        alone = normalize(f"x {normalize(text)} x")
        return MARK not in alone and all(
            normalize(f"x{before}{text}{after}x") == alone for before in spaces for after in spaces
        )

    return is_context_free
