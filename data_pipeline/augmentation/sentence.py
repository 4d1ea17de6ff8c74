"""A text with its words, as a tokenizer cuts it, in which words can be replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers

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
