"""Encoding with a cache of words: each distinct word goes through the tokenizer only once.

In 10 MB of text nine of ten words have occurred before, and a lookup is much cheaper than encoding.
The ids equal those of the text encoded whole. The text is cut only at spaces, and only for
tokenizers with a known rule for it. A document whose tokens a cut could change is left to the
caller, to be encoded whole.
"""

import itertools
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers

from data_pipeline.shards.blocks import offsets
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
        self._sizes: NDArray[np.int64] = np.zeros(1, np.int64)  # [words] ids of each
        self._in_context: NDArray[np.bool_] = np.zeros(
            1, bool
        )  # [words] True where the context decides the ids
        self._ids: NDArray[np.int32] = np.zeros(0, np.int32)  # [ids of all words]

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
