"""Scores on minimal pairs, without fine-tuning: is the good sentence the more probable one?

The benchmark is BLiMP (Warstadt et al., 2020, arXiv 1912.00582), the score that of Salazar et al.,
2020 (arXiv 1910.14659).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from data_pipeline import DataError
from data_pipeline.task_files.minimal_pairs import MinimalPair, read_minimal_pairs
from data_pipeline.tokenization.tokenizer import Vocabulary, load
from model import ModelError, encoder_from_pretrained, read_encoder_config
from trainer.evaluation.pseudo_likelihood import pseudo_log_likelihoods
from trainer.own_tokenizer import require_own_tokenizer

CHANCE = 0.5  # the accuracy of guessing


@dataclass(frozen=True)
class PartScore:
    """The score on the pairs of one paradigm."""

    phenomenon: str
    paradigm: str
    pairs: int
    accuracy: float


@dataclass(frozen=True)
class PairScores:
    """The fraction of pairs whose good sentence is the more probable one, also by phenomenon."""

    pairs: int
    accuracy: float
    by_phenomenon: dict[str, float]
    by_paradigm: list[PartScore]


def score_minimal_pairs(folder: Path, pairs_path: str, device: torch.device) -> PairScores:
    """The scores of an exported model, with its own tokenizer, on BLiMP's files.

    Raises ModelError for a model without a masked-LM head or with a decoder, DataError for pairs
    that cannot be read or are longer than the model reads.
    """
    read = _read(folder, pairs_path)
    model = encoder_from_pretrained(folder).to(device)
    found = pseudo_log_likelihoods(model, read.vocabulary, read.sentences)
    return _scores(read.pairs, [bool(good > bad) for good, bad in found.reshape(-1, 2)])


def require_scorable(folder: Path, pairs_path: str) -> None:
    """Raise what `score_minimal_pairs` raises, without the model's weights."""
    _read(folder, pairs_path)


class _Readable(NamedTuple):
    """Pairs, and the token ids of each good sentence and of the bad one after it."""

    pairs: list[MinimalPair]
    sentences: list[list[int]]
    vocabulary: Vocabulary


def _read(folder: Path, pairs_path: str) -> _Readable:
    config = read_encoder_config(folder)
    if not config.mlm_head:
        raise ModelError(f"{folder}: has no masked-LM head, by which minimal pairs are scored")
    pairs = list(read_minimal_pairs(pairs_path))
    tokenizer, vocabulary = load(folder)
    require_own_tokenizer(folder, vocabulary, config)
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    sentences = [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
    for pair, good, bad in zip(pairs, sentences[0::2], sentences[1::2], strict=True):
        _require_telling(pair.where, good, bad, config.longest_sequence)
    return _Readable(pairs, sentences, vocabulary)


def _require_telling(
    where: str, good: Sequence[int], bad: Sequence[int], longest: int | None
) -> None:
    """Raise DataError for a pair of which a model cannot tell which one is more probable."""
    if not good or not bad:
        raise DataError(f"{where}: a sentence has no tokens; remove the pair")
    if good == bad:
        raise DataError(f"{where}: its sentences are the same to this tokenizer; remove the pair")
    most = max(len(good), len(bad)) + 2
    if longest is not None and most > longest:
        raise DataError(f"{where}: has {most} tokens, and the model reads {longest}")


def _scores(pairs: Sequence[MinimalPair], right: Sequence[bool]) -> PairScores:
    by_phenomenon: dict[str, list[bool]] = defaultdict(list)
    by_paradigm: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for pair, is_right in zip(pairs, right, strict=True):
        by_phenomenon[pair.phenomenon].append(is_right)
        by_paradigm[pair.phenomenon, pair.paradigm].append(is_right)
    return PairScores(
        pairs=len(pairs),
        accuracy=sum(right) / len(right),
        by_phenomenon={name: sum(ones) / len(ones) for name, ones in sorted(by_phenomenon.items())},
        by_paradigm=[
            PartScore(*names, len(ones), sum(ones) / len(ones))
            for names, ones in sorted(by_paradigm.items())
        ],
    )
