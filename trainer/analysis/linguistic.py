"""Attention to words with linguistic features, and between the words of syntactic pairs.

After Kovaleva et al. (2019, arXiv 1908.08593). Section 4.4: the attention that a token receives
from all tokens, divided by their number; of several tokens with a feature the largest counts.
Section 4.5: the attention from [CLS] to these tokens, and the largest weight, in either direction,
between two tokens of a pair. Each is a mean over the sentences that have the feature or the pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import Batch, DataError, TextEncoder
from data_pipeline.task_files.conll import ParsedWord, read_parsed
from model import Model
from trainer.analysis.maps import maps_of_layers
from trainer.batches import MicroBatch, to_micro_batches
from trainer.task_facts import require_own_tokenizer

ROWS = 16  # sentences in a forward pass
LONGEST = 512  # tokens of a sentence, where the model reads that many

SUBJECTS, OBJECTS = ("nsubj", "nsubjpass", "csubj"), ("obj", "iobj", "dobj")
FEATURES: dict[str, Callable[[ParsedWord], bool]] = {
    "noun": lambda word: word.tag in ("NOUN", "PROPN"),
    "verb": lambda word: word.tag == "VERB",
    "pronoun": lambda word: word.tag == "PRON",
    "subject": lambda word: _relation(word) in SUBJECTS,
    "object": lambda word: _relation(word) in OBJECTS,
    "negation": lambda word: "Polarity=Neg" in word.features or _relation(word) == "neg",
}
CLS, SEP = "[CLS]", "[SEP]"
PAIRS = ("noun-pronoun", "verb-subject")
RECEIVED = (*FEATURES, CLS, SEP)
KINDS = (*RECEIVED, *(f"{CLS} to {name}" for name in RECEIVED), *PAIRS)


@dataclass(frozen=True)
class LinguisticAttention:
    """The attention of the heads in the parsed sentences of `file`.

    means: float64 [kinds, layers, heads], for each of `KINDS`. counts: the sentences, of
    `sentences`, that have each; the means of a kind that none has are 0.
    """

    file: str
    means: Tensor
    counts: Sequence[int]
    sentences: int


@dataclass(frozen=True)
class ParsedSentence:
    """The tokens of a sentence, [CLS] and [SEP] included, and what they are.

    features: bool [features, tokens], of `RECEIVED`; pairs: bool [pairs, tokens, tokens], of
    `PAIRS`, in both directions.
    """

    ids: NDArray[np.int64]
    features: NDArray[np.bool_]
    pairs: NDArray[np.bool_]

    @classmethod
    def of(cls, words: Sequence[ParsedWord], encoder: TextEncoder) -> ParsedSentence:
        """The sentence as the model reads it."""
        pieces = [encoder.word(word.form) for word in words]
        vocabulary = encoder.vocabulary
        inner = [token for ids in pieces for token in ids]
        ids = np.array([vocabulary.cls, *inner, vocabulary.sep], np.int64)
        word_of = np.repeat(np.arange(len(words)), [len(ids) for ids in pieces])
        features = np.zeros((len(RECEIVED), len(ids)), bool)
        for number, has in enumerate(FEATURES.values()):
            features[number, 1:-1] = np.array([has(word) for word in words])[word_of]
        features[RECEIVED.index(CLS), 0] = features[RECEIVED.index(SEP), -1] = True
        pairs = np.zeros((len(PAIRS), len(ids), len(ids)), bool)
        pairs[:, 1:-1, 1:-1] = _pairs(words)[:, word_of[:, None], word_of]
        return cls(ids, features, pairs)


def _pairs(words: Sequence[ParsedWord]) -> NDArray[np.bool_]:
    """Which words are a pair of `PAIRS`: bool [pairs, words, words], in both directions."""
    pairs = np.zeros((len(PAIRS), len(words), len(words)), bool)
    nouns, pronouns = (
        np.array([FEATURES[name](word) for word in words]) for name in ("noun", "pronoun")
    )
    pairs[0] = nouns[:, None] & pronouns
    for number, word in enumerate(words):
        if word.head is not None and FEATURES["subject"](word):
            pairs[1, word.head, number] = FEATURES["verb"](words[word.head])
    return pairs | pairs.transpose(0, 2, 1)


def _relation(word: ParsedWord) -> str:
    """A word's relation without its subtype, such as nsubj of nsubj:pass."""
    return word.relation.partition(":")[0]


def read_sentences(model: Model, folder: Path, file: str, limit: int) -> list[ParsedSentence]:
    """The first sentences of a CoNLL-U file that fit into the model.

    Raises DataError for a file that has none, or is not parsed, and for a folder without tokenizer.
    """
    longest = model.config.longest_sequence or LONGEST
    encoder = TextEncoder(folder, longest)
    require_own_tokenizer(folder, encoder.vocabulary, model.config)
    sentences = (ParsedSentence.of(words, encoder) for _, words in read_parsed(file))
    fitting = [*islice((sentence for sentence in sentences if len(sentence.ids) <= longest), limit)]
    if not fitting:
        raise DataError(f"{file}: every sentence has more than {longest} tokens")
    return fitting


@torch.no_grad()
def linguistic_attention(
    model: Model, sentences: Sequence[ParsedSentence], file: str
) -> LinguisticAttention:
    """The attention of every layer's heads in the sentences, which were read from `file`."""
    config = model.config
    sums = torch.zeros(len(KINDS), config.layers, config.heads, dtype=torch.float64)
    counts = torch.zeros(len(KINDS), dtype=torch.int64)
    for batch, features, pairs in _batches(sentences, next(model.parameters()).device):
        between = pairs.flatten(2).any(dim=-1)
        counts += torch.cat([*[features.any(dim=-1)] * 2, between]).sum(dim=1).cpu()
        for layer, weights in enumerate(maps_of_layers(model, batch)):
            sums[:, layer] += of_maps(weights, features, pairs).sum(dim=1).cpu()
    means = sums / counts.clamp(min=1)[:, None, None]
    return LinguisticAttention(file, means, counts.tolist(), len(sentences))


def of_maps(weights: Tensor, features: Tensor, pairs: Tensor) -> Tensor:
    """The attention of each of `KINDS` in each map, 0 where there is none: float64 [kinds, B, A].

    weights: [B, A, L, L], with rows of 0 for padding; features: bool [F, B, L], pairs: bool
    [P, B, L, L].
    """
    tokens = weights.sum(dim=(2, 3))[:, :, None]  # each token gives away an attention of 1
    received = (weights.sum(dim=2) / tokens, weights[:, :, 0])
    to_features = [torch.where(features[:, :, None], part, 0.0).amax(dim=-1) for part in received]
    between = [torch.where(pair[:, None], weights, 0.0).amax(dim=(2, 3)) for pair in pairs]
    return torch.cat([*to_features, torch.stack(between)]).double()


def _batches(
    sentences: Sequence[ParsedSentence], device: torch.device
) -> Iterator[tuple[MicroBatch, Tensor, Tensor]]:
    """Padded batches with their features [F, B, L] and pairs [P, B, L, L]."""
    for first in range(0, len(sentences), ROWS):
        some = sentences[first : first + ROWS]
        length = max(len(sentence.ids) for sentence in some)
        ids = np.zeros((len(some), length), np.int64)
        mask = np.zeros_like(ids)
        features = np.zeros((len(RECEIVED), len(some), length), bool)
        pairs = np.zeros((len(PAIRS), len(some), length, length), bool)
        for row, sentence in enumerate(some):
            size = len(sentence.ids)
            ids[row, :size], mask[row, :size] = sentence.ids, 1
            features[:, row, :size], pairs[:, row, :size, :size] = sentence.features, sentence.pairs
        numbers = np.arange(len(some))
        batch = Batch(ids, np.zeros_like(ids), mask, {}, numbers, np.zeros_like(numbers))
        (micro,) = to_micro_batches(batch, len(some), device)
        yield micro, torch.from_numpy(features).to(device), torch.from_numpy(pairs).to(device)
