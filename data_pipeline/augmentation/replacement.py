"""TinyBERT's data augmentation (Jiao et al., arXiv 1909.10351, algorithm 1, in its code's form).

Each word of letters that is no stop word has candidates. In each of N copies of a text, each of
these words is replaced with probability p by one of its candidates; copies that come out alike are
one. The paper has N = 20, p = 0.4 and 15 candidates. Its code has N = 30; for SST-2 and QNLI 20,
for MNLI and QQP 10.

Unlike the code, an example of two texts is not repeated, and the second text is varied beside the
first one as it was; copies in which nothing was replaced are left out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

from data_pipeline.hashing import ReplacementDraw, array_keys, scalar_key
from data_pipeline.tokenization.sentencepiece_models import MARK
from data_pipeline.tokenization.tokenizer import word_prefix


@dataclass(frozen=True)
class Word:
    """A word of a sentence: its text, where that stands in it, and its pieces, by number."""

    text: str
    start: int
    pieces: range


@dataclass(frozen=True)
class Sentence:
    """A text as its tokenizer reads it (in small letters, without accents, if that does so)."""

    text: str
    ids: tuple[int, ...]
    words: tuple[Word, ...]

    @classmethod
    def read(cls, text: str, tokenizer: tokenizers.Tokenizer) -> Sentence:
        """Cut a text into words. The first has the tokens that it would have behind others."""
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text).replace(MARK, " ").strip()
        prefix = word_prefix(tokenizer)
        encoding = tokenizer.encode(prefix + text, add_special_tokens=False)
        return cls(text, tuple(encoding.ids), tuple(_words(prefix + text, encoding, len(prefix))))

    def replaced(self, words: Mapping[int, str]) -> str:
        """The text with other words, by number, in place of its own."""
        parts, end = [], 0
        for number in sorted(words):
            word = self.words[number]
            parts += [self.text[end : word.start], words[number]]
            end = word.start + len(word.text)
        return "".join([*parts, self.text[end:]])


def _words(text: str, encoding: tokenizers.Encoding, skipped: int) -> list[Word]:
    """The words, without white space that a tokenizer counts to them.

    They are placed in the text behind its first `skipped` characters. A tokenizer that does not
    split text at spaces marks the tokens that begin a word.
    """
    words, first, numbers = [], 0, encoding.word_ids
    for end in range(1, len(numbers) + 1):
        if (
            end == len(numbers)
            or numbers[end] != numbers[first]
            or encoding.tokens[end].startswith(MARK)
        ):
            start = encoding.offsets[first][0]
            raw = text[start : encoding.offsets[end - 1][1]]
            begin = start + len(raw) - len(raw.lstrip()) - skipped
            words.append(Word(raw.strip(), begin, range(first, end)))
            first = end
    return words


# NLTK's English stop words with two endings, as in the code.
_STOP_WORDS = """
i me my myself we our ours ourselves you you're you've you'll you'd your yours yourself
yourselves he him his himself she she's her hers herself it it's its itself they them their
theirs themselves this that that'll these those am is are was were be been being have has had
having do does did doing a an the and but if or because as until while of at by for with about
against between into through during before after above below to from up down in out on off over
under again further then once here there all any both each few more most other some such no nor
not only own same so than too very s t can will just don don't should should've now d ll m o re
ve y ain aren aren't couldn couldn't didn didn't doesn doesn't hadn hadn't hasn hasn't haven
haven't isn isn't ma mightn mightn't mustn mustn't needn needn't shan shan't shouldn shouldn't
wasn wasn't weren weren't won won't wouldn wouldn't 's 're
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
LEAST_ENGLISH = 0.15  # of the words of English text are stop words; usually 0.3 to 0.5


@dataclass(frozen=True)
class Replacement:
    """How many copies of a text are made, and how often a word in them is replaced."""

    copies: int = 30
    probability: float = 0.4
    seed: int = 1

    def copies_of(
        self, sentence: Sentence, candidates: Mapping[int, Sequence[str]], *place: int
    ) -> list[str]:
        """Different texts in which words, by number, are replaced by some of their `candidates`.

        A pure function of the arguments; `place` are integers that say which text it is.
        """
        numbers = np.array(sorted(candidates), np.int64)
        if not len(numbers):
            return []
        rows = np.arange(self.copies)[:, None]
        draws = [
            array_keys(scalar_key(self.seed, *place, tag), rows, numbers[None])
            for tag in (ReplacementDraw.REPLACED, ReplacementDraw.CHOSEN)
        ]
        is_replaced = draws[0] / 2.0**64 < self.probability
        copies = {sentence.text: None}  # in order
        for row in range(self.copies):
            words = {
                int(number): candidates[int(number)][int(draw) % len(candidates[int(number)])]
                for number, draw in zip(
                    numbers[is_replaced[row]], draws[1][row, is_replaced[row]], strict=True
                )
            }
            copies[sentence.replaced(words)] = None
        return list(copies)[1:]


def replaceable(sentence: Sentence, stop_words: Collection[str] | None = None) -> list[int]:
    """The numbers of the words that may be replaced: no stop words, and `is_word`.

    `stop_words` are those of a language other than English.
    """
    excluded = STOP_WORDS if stop_words is None else stop_words
    return [
        number
        for number, word in enumerate(sentence.words)
        if is_word(word.text, english=stop_words is None) and word.text.lower() not in excluded
    ]


def is_word(text: str, english: bool) -> bool:
    """Whether a text has letters only, of English or of any script with its marks."""
    if english:
        return text.isascii() and text.isalpha()
    return text[:1].isalpha() and all(unicodedata.category(letter)[0] in "LM" for letter in text)


def is_english(texts: Iterable[str]) -> bool:
    """Whether as many of the words are English stop words as in English text."""
    words = [word.strip(".,;:!?\"'()").lower() for text in texts for word in text.split()]
    return sum(word in STOP_WORDS for word in words) >= LEAST_ENGLISH * len(words)
