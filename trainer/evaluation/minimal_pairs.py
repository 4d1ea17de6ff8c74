"""Scores on minimal pairs, without fine-tuning: is the good sentence the more probable one?

The benchmark is BLiMP (Warstadt et al., 2020, arXiv 1912.00582), the score that of Salazar et al.,
2020 (arXiv 1910.14659): the pseudo-log-likelihood under a masked language model. For a sentence w
it is the sum over its tokens of log P(w_t | w without w_t), where each token is masked alone. A
model that only detects replaced tokens (ELECTRA, arXiv 2003.10555) gives the sum of log P(w_t is
original | w).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from data_pipeline.errors import DataError
from data_pipeline.reading.batches import filled
from data_pipeline.task_files.contents import Dropped
from data_pipeline.task_files.tables import read_table
from data_pipeline.text.text_files import files_in, suffix_of
from data_pipeline.tokenization.tokenizer import Vocabulary, load
from model import (
    DETECTION,
    Model,
    ModelConfig,
    ModelError,
    Padded,
    encoder_from_pretrained,
    read_encoder_config,
    vocabulary_logits,
)
from trainer.batches import rows_by_length
from trainer.task_facts import require_own_tokenizer

SUFFIX = ".jsonl"  # of the files of a folder
SENTENCES = {"good": "sentence_good", "bad": "sentence_bad"}
FACTS = {"paradigm": "UID", "phenomenon": "linguistics_term"}


@dataclass(frozen=True)
class MinimalPair:
    """A good sentence and a bad one, and what they differ in."""

    where: str
    good: str
    bad: str
    paradigm: str  # BLiMP has 67 of them, with 1,000 pairs each
    phenomenon: str  # and 12 of these


def read_minimal_pairs(path: str) -> Iterator[MinimalPair]:
    """The pairs of a file, or of the .jsonl files of a folder and its folders, by name.

    They may be compressed. Files and folders whose names begin with a dot are left out. Raises
    DataError for a file without pairs, and for a pair of equal sentences.
    """
    for file in _files(path):
        dropped = Dropped()
        for where, row in dropped.present(read_table(file, SENTENCES | FACTS)):
            if row["good"] == row["bad"]:
                raise DataError(f"{where}: the good and the bad sentence are the same")
            yield MinimalPair(where, **row)
        dropped.tell(file)


def _files(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [path]
    files = [file for file in map(str, files_in(path)) if suffix_of(file) == SUFFIX]
    if not files:
        raise DataError(f"{path}: holds no {SUFFIX} files")
    return files


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

    Raises ModelError for a model with a decoder, or with neither a masked-LM head nor one that
    detects replaced tokens; DataError for pairs that cannot be read or are longer than the model
    reads.
    """
    read = _read(folder, pairs_path)
    model = encoder_from_pretrained(folder).to(device)
    score = pseudo_log_likelihoods if model.config.mlm_head else originality
    likelihoods = score(model, read.vocabulary, read.sentences)
    return _scores(read.pairs, [bool(good > bad) for good, bad in likelihoods.reshape(-1, 2)])


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
    if not config.mlm_head and not _detectors(config):
        raise ModelError(f"{folder}: has no masked-LM head, by which minimal pairs are scored")
    pairs = list(read_minimal_pairs(pairs_path))
    tokenizer, vocabulary = load(folder)
    require_own_tokenizer(folder, vocabulary, config)
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    sentences = [
        encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
    for pair, good, bad in zip(pairs, sentences[0::2], sentences[1::2], strict=True):
        _require_telling(pair.where, good, bad, config.longest_sequence)
    return _Readable(pairs, sentences, vocabulary)


def _detectors(config: ModelConfig) -> list[str]:
    """The names of heads that detect replaced tokens."""
    return [name for name, head in config.task_heads.items() if head.kind == DETECTION]


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


TOKENS = 1 << 14  # in one forward pass


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: Model,
    vocabulary: Vocabulary,
    sentences: Sequence[Sequence[int]],
    tokens_per_pass: int = TOKENS,
) -> NDArray[Any]:
    """The sum of log-probabilities (nats) of the tokens of each sentence, float64 [sentences].

    `sentences` are token ids without special tokens. Each token gives one row, in which it is
    masked; rows of similar length share a forward pass. The model must be in evaluation mode.
    """
    total = np.zeros(len(sentences))
    for rows in _passes([len(sentence) + 2 for sentence in sentences], tokens_per_pass):
        log_probabilities = _log_probabilities(model, vocabulary, sentences, rows)
        np.add.at(total, rows[:, 0], log_probabilities.double().cpu().numpy())
    return total


def _passes(lengths: Sequence[int], tokens_per_pass: int) -> Iterator[NDArray[Any]]:
    """The rows of each pass as (sentence, position in it), [rows, 2]; longest sentences first."""
    rows = [(number, place) for number, length in enumerate(lengths) for place in range(length - 2)]
    for chosen in rows_by_length([lengths[number] for number, _ in rows], tokens_per_pass):
        yield np.array([rows[row] for row in chosen])


def _log_probabilities(
    model: Model, vocabulary: Vocabulary, sentences: Sequence[Sequence[int]], rows: NDArray[Any]
) -> torch.Tensor:
    """The log-probability of the token that each row masks: float32 [rows]."""
    ids, lengths = _padded(vocabulary, [sentences[number] for number in rows[:, 0]])
    masked = np.arange(len(rows)) * ids.shape[1] + rows[:, 1] + 1  # into the flattened ids
    labels = ids.reshape(-1)[masked]
    ids.reshape(-1)[masked] = vocabulary.mask
    device = next(model.parameters()).device
    tensors = [torch.from_numpy(array).to(device) for array in (ids, lengths, masked, labels)]
    padded = Padded(tensors[1], int(lengths.sum())) if lengths.min() < lengths.max() else None
    features = model.features(tensors[0], None, padded, tensors[2])
    assert features.vocabulary_input is not None, "a model with a masked-LM head"
    logits = vocabulary_logits(features.vocabulary_input, *model.output_projection())
    return -F.cross_entropy(logits.float(), tensors[3], reduction="none")


@torch.inference_mode()
def originality(
    model: Model,
    vocabulary: Vocabulary,
    sentences: Sequence[Sequence[int]],
    tokens_per_pass: int = TOKENS,
) -> NDArray[Any]:
    """The sum over a sentence's tokens of log P(it is original), in nats: float64 [sentences].

    By the model's head for replaced-token detection; `sentences` as for `pseudo_log_likelihoods`.
    """
    total = np.zeros(len(sentences))
    (detector, *_) = _detectors(model.config)
    device = next(model.parameters()).device
    for rows in rows_by_length([len(sentence) + 2 for sentence in sentences], tokens_per_pass):
        ids, lengths = _padded(vocabulary, [sentences[row] for row in rows])
        tensors = [torch.from_numpy(array).to(device) for array in (ids, lengths)]
        logits = model(tensors[0], None, tensors[1]).heads[detector].view(ids.shape)
        originals = F.logsigmoid(-logits.double()).cpu().numpy()
        is_word = np.arange(1, ids.shape[1] + 1) < lengths[:, None]
        is_word[:, 0] = False
        total[rows] = (originals * is_word).sum(axis=1)
    return total


def _padded(
    vocabulary: Vocabulary, sentences: Sequence[Sequence[int]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The sentences between special tokens, int64 [rows, L], and the length of each."""
    rows = [[vocabulary.cls, *sentence, vocabulary.sep] for sentence in sentences]
    return filled(rows, vocabulary.pad), np.array([len(row) for row in rows])
