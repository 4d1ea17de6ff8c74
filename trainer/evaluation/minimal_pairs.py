"""Scores on minimal pairs, without fine-tuning: is the good sentence the more probable one?

The benchmark is BLiMP (Warstadt et al., 2020, arXiv 1912.00582), the score that of Salazar et al.,
2020 (arXiv 1910.14659).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline import DataError
from data_pipeline.task_files.minimal_pairs import MinimalPair, read_minimal_pairs
from data_pipeline.tokenization.tokenizer import load
from model import Model, ModelError, encoder_from_pretrained, read_config
from trainer.evaluation.pseudo_likelihood import pseudo_log_likelihoods


@dataclass(frozen=True)
class PairScores:
    """The fraction of pairs whose good sentence is the more probable one, also by phenomenon."""

    pairs: int
    accuracy: float
    by_phenomenon: dict[str, float]


def score_minimal_pairs(folder: Path, pairs_path: str, device: torch.device) -> PairScores:
    """The scores of an exported model, with its own tokenizer, on BLiMP's files.

    Raises ModelError for a model without a masked-LM head, DataError for pairs that cannot be read
    or are longer than the model reads.
    """
    require_scorable(folder, pairs_path)
    model = encoder_from_pretrained(folder).to(device)
    pairs = list(read_minimal_pairs(pairs_path))
    return _scores(pairs, _are_right(model, folder, pairs))


def require_scorable(folder: Path, pairs_path: str) -> None:
    """Raise ModelError for a model that scores no pairs, DataError for unreadable pairs."""
    if not read_config(folder).mlm_head:
        raise ModelError(f"{folder}: has no masked-LM head, by which minimal pairs are scored")
    for _ in read_minimal_pairs(pairs_path):
        pass


def _are_right(model: Model, folder: Path, pairs: Sequence[MinimalPair]) -> list[bool]:
    """For each pair, whether the good sentence is the more probable one."""
    tokenizer, vocabulary = load(folder)
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    encoded = [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
    longest = model.config.longest_sequence
    for number, ids in enumerate(encoded):
        if longest is not None and len(ids) + 2 > longest:
            where = pairs[number // 2].where
            raise DataError(f"{where}: has {len(ids) + 2} tokens, and the model reads {longest}")
    found = pseudo_log_likelihoods(model, vocabulary, encoded)
    return [bool(good > bad) for good, bad in found.reshape(-1, 2)]


def _scores(pairs: Sequence[MinimalPair], right: Sequence[bool]) -> PairScores:
    by_phenomenon: dict[str, list[bool]] = defaultdict(list)
    for pair, is_right in zip(pairs, right, strict=True):
        by_phenomenon[pair.phenomenon].append(is_right)
    return PairScores(
        pairs=len(pairs),
        accuracy=sum(right) / len(right),
        by_phenomenon={name: sum(ones) / len(ones) for name, ones in sorted(by_phenomenon.items())},
    )
