"""How tokenizers read a text: ``tandem tokenizer compare``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tokenizers

from data_pipeline.errors import DataError
from data_pipeline.text.documents import read_documents
from data_pipeline.text.formats import ReadOptions
from data_pipeline.tokenization.normalization_loss import LossCounter, NormalizationLoss
from data_pipeline.tokenization.tokenizer import load, unknown_id, word_prefix

BATCH = 1 << 14  # words encoded per call


@dataclass(frozen=True)
class Comparison:
    """How a tokenizer reads a text. Words are what stands between white space.

    unknown_words: the share of the words of which a part is unknown. loss: what its normalizer
    removes.
    """

    tokenizer: str
    vocab_size: int
    tokens_per_word: float
    characters_per_token: float
    unknown_words: float
    loss: NormalizationLoss


def compare(
    text: str, folders: Sequence[str], reading: ReadOptions | None = None
) -> list[Comparison]:
    """How each of the tokenizers reads the text. Raises DataError for a text without words."""
    loaded = [load(Path(folder)) for folder in folders]
    counters = [LossCounter(tokenizer) for tokenizer, _ in loaded]
    losses = [NormalizationLoss() for _ in loaded]
    words = Counter[str]()
    for document in read_documents([text], reading):
        words.update(document.split())
        for loss, counter in zip(losses, counters, strict=True):
            loss.add(counter([document]))
    if not words:
        raise DataError(f"{text}: holds no words")
    characters = sum(len(word) * count for word, count in words.items())
    comparisons = []
    for folder, (tokenizer, vocabulary), loss in zip(folders, loaded, losses, strict=True):
        tokens = unknown = 0
        unknown_token = unknown_id(tokenizer)
        for count, ids in zip(words.values(), encoded_words(tokenizer, words), strict=True):
            tokens += count * len(ids)
            unknown += count * (unknown_token in ids)
        total = words.total()
        shares = (tokens / total, characters / max(1, tokens), unknown / total)
        comparisons.append(Comparison(folder, vocabulary.vocab_size, *shares, loss))
    return comparisons


def encoded_words(tokenizer: tokenizers.Tokenizer, words: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each word in running text."""
    prefix = word_prefix(tokenizer)
    rest = iter(words)
    while batch := [prefix + word for word in islice(rest, BATCH)]:
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield encoding.ids
