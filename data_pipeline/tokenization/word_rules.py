"""Rules that say where text can be cut into words without changing its tokens."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from data_pipeline.tokenization.sentencepiece_models import MARK
from data_pipeline.tokenization.vocabularies import byte_level_words

SENTENCE = "\0"  # stands before each sentence, and begins a word that no space stands before
_SPACE = re.compile(r" (?<!\s )")
# The steps after the character map in a normalizer made by `sentencepiece_models`.
_SPACE_NORMALIZATION = [str(normalizers.Replace(Regex(" {2,}"), " ")), str(normalizers.Strip())]
# Printable ASCII, Latin, Greek, Cyrillic, dashes and quotes: each is a cluster of its own.
_RANGES = ((0x21, 0x7E), (0xC0, 0x24F), (0x391, 0x3C9), (0x400, 0x481), (0x2010, 0x2027))


@dataclass(frozen=True)
class WordRule:
    """Where text can be cut at spaces without changing its tokens.

    forbidden: a document with one of these texts must not be cut at all.
    keeps_spaces: a space belongs to the word after it, and a run of white space must not be cut.
        Otherwise spaces only separate words, and a line feed is equivalent to a space.
    depends_on_context: whether the tokens of a word depend on its neighbours.
    """

    forbidden: Sequence[str]
    keeps_spaces: bool = False
    depends_on_context: Callable[[str], bool] = lambda word: False

    def marked(self, document: str, ends: Sequence[int]) -> str | None:
        """The document with `SENTENCE` before each sentence; None if it must not be cut.

        `ends` are its `sentence_ends`.
        """
        if any(text in document for text in self.forbidden):
            return None
        if not self.keeps_spaces:
            document = document.replace("\n", " ")
        if not all(self._may_end(document[end - 1 : end + 1]) for end in ends[:-1]):
            return None
        return "".join(self._sentences(document, ends))

    def _may_end(self, around: str) -> bool:
        """Whether a sentence may end between these two characters."""
        if self.keeps_spaces:
            return around[1] in " \t\n\v\f\r" and not around[0].isspace()
        return around[1] == " "

    def _sentences(self, document: str, ends: Sequence[int]) -> Iterator[str]:
        for start, end in itertools.pairwise([0, *ends]):
            yield f" {SENTENCE}" if document[start] == " " else f" {SENTENCE} {SENTENCE}"
            yield document[start:end]

    def words(self, marked: str) -> list[str]:
        """The words of marked documents, and a `SENTENCE` before each sentence."""
        return _SPACE.split(marked[1:]) if self.keeps_spaces else marked[1:].split(" ")

    def text_of(self, word: str) -> str:
        """The text that is encoded for one of the `words`."""
        if word.startswith(SENTENCE):
            return word[1:]
        return f" {word}" if self.keeps_spaces else word


def rule_of(tokenizer: tokenizers.Tokenizer) -> WordRule | None:
    """The rule for a tokenizer; None if no rule is known."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder().values()
    if normalizer is not None and any(token.normalized for token in added):
        return None  # an added token may appear only after normalization
    forbidden = [SENTENCE, *(token.content for token in added)]
    kinds = (type(tokenizer.model), type(normalizer), type(splitter))
    if kinds == (models.WordPiece, normalizers.BertNormalizer, pre_tokenizers.BertPreTokenizer):
        # BERT's normalizer maps characters one by one, combining marks aside. White space does not
        # absorb combining marks, and the word splitting drops white space.
        return WordRule(forbidden)
    if kinds[0] is models.BPE and _is_byte_level(splitter):
        # No match of GPT-2's pattern, with marks or without, extends from other characters into
        # white space. Its lookahead finds the end of a run of white space.
        plain = kinds[1] in (type(None), normalizers.Lowercase)
        return WordRule(forbidden, keeps_spaces=True) if plain else None
    if isinstance(splitter, pre_tokenizers.Metaspace):  # of SentencePiece
        is_marked = splitter.prepend_scheme == "always" and splitter.split
        return _sentencepiece_rule(normalizer, forbidden) if is_marked else None
    return None


def _is_byte_level(splitter: pre_tokenizers.PreTokenizer) -> bool:
    """Whether it splits as GPT-2 does, perhaps with marks as parts of words."""
    if isinstance(splitter, pre_tokenizers.ByteLevel):
        return splitter.use_regex and not splitter.add_prefix_space
    return pickle.dumps(splitter) == pickle.dumps(byte_level_words())


def _sentencepiece_rule(
    normalizer: normalizers.Normalizer | None, forbidden: Sequence[str]
) -> WordRule | None:
    """The rule for SentencePiece's normalization, after which one space begins each word.

    The normalization maps clusters of characters, and a combining mark may absorb the space before
    it. So words that are not plain are tested one by one. The only cluster that ends with white
    space is a carriage return with a line feed. A normalization that keeps line feeds has no rule.
    """
    if not isinstance(normalizer, normalizers.Sequence):
        return None
    steps = [normalizer[number] for number in range(len(normalizer))]
    if steps and isinstance(steps[0], normalizers.Precompiled):
        del steps[0]
    normalize = normalizer.normalize_str
    if [str(step) for step in steps] != _SPACE_NORMALIZATION or normalize("a\nb") != "a b":
        return None
    return WordRule(["\r", *forbidden], depends_on_context=_context_test(normalize))


def _context_test(normalize: Callable[[str], str]) -> Callable[[str], bool]:
    """A test of whether a word is normalized otherwise between other words than by itself.

    Also whether normalization makes a second word mark appear inside the word.
    """
    ranges = (range(first, last + 1) for first, last in _RANGES)
    characters = map(chr, itertools.chain.from_iterable(ranges))
    ordinary = frozenset(letter for letter in characters if " " not in normalize(f"x{letter}x"))

    def depends_on_context(word: str) -> bool:
        if ordinary.issuperset(word):
            return False
        alone = normalize(f"x {normalize(word)} x")
        return MARK in alone or any(
            normalize(f"x{before}{word}{after}x") != alone for before in " \n" for after in " \n"
        )

    return depends_on_context
