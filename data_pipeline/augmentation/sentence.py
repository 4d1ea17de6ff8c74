"""A text with its words, as a tokenizer cuts it, in which words can be replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


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
        """Cut a text into words."""
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        found = tokenizer.encode(text, add_special_tokens=False)
        return cls(text, tuple(found.ids), tuple(_words(text, found)))

    def replaced(self, words: Mapping[int, str]) -> str:
        """The text with other words, by number, in place of its own."""
        parts, end = [], 0
        for number in sorted(words):
            word = self.words[number]
            parts += [self.text[end : word.start], words[number]]
            end = word.start + len(word.text)
        return "".join([*parts, self.text[end:]])


def _words(text: str, encoding: tokenizers.Encoding) -> list[Word]:
    """The words; white space that a tokenizer counts to one is not part of it."""
    words, first, numbers = [], 0, encoding.word_ids
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[first]:
            start = encoding.offsets[first][0]
            raw = text[start : encoding.offsets[end - 1][1]]
            words.append(Word(raw.strip(), start + len(raw) - len(raw.lstrip()), range(first, end)))
            first = end
    return words
