"""Inspecting what a job trains on: ``tandem data dump`` and ``tandem data show``."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from rich.text import Text

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.masking.masker import NO_LABEL
from data_pipeline.order.slots import BatchSizes
from data_pipeline.reading.batches import MASKED, PAIRS, Batch
from data_pipeline.reading.corpus import Corpus, CorpusSplit
from data_pipeline.reading.padding import padding_fractions
from data_pipeline.reading.stream import BatchStream, open_splits
from data_pipeline.shards.writing import disk_errors, refuse_existing
from data_pipeline.tokenization import tokenizer as tokenization

MASK_STYLE, RANDOM_STYLE, UNCHANGED_STYLE = "bold white on blue", "bold white on red", "bold green"
PAIR_NAMES = {
    "sop": ("in order", "swapped"),
    "segment_pair": ("next", "from another document"),
    "sentence_pair": ("next", "from another document"),
}


def dump(
    config: DataConfig,
    seed: int,
    batch_sizes: BatchSizes | int,
    steps: tuple[int, int],
    world_size: int,
    rank: int,
    out: str,
    split: str = "train",
) -> int:
    """Write exactly what a rank trains on in steps[0] <= step < steps[1] to an .npz file.

    There is one row for each sequence: step, sample_ids (unique within an epoch), epochs,
    input_ids, segment_ids, attention_mask, labels (-100 where not masked) and, for pairs,
    pair_labels. If phases differ in length, shorter rows are padded. Returns the number of rows.
    Replaces an earlier dump at `out`; raises DataError if another file is there, and for the
    examples of a task.
    """
    if config.train:
        raise DataError("data.train: dump is for text; `tandem data show` shows a task's examples")
    first, last = steps
    if not 0 <= first < last:
        raise DataError(f"--steps {first}:{last}: must be A:B with 0 <= A < B")
    if not 0 <= rank < world_size:
        raise DataError(f"--rank {rank}: must be from 0 to {world_size - 1}")
    if not _is_dump(path := Path(out)):
        refuse_existing([path])
    stream = BatchStream.open(config, split, seed, batch_sizes, rank, world_size)
    batches = [stream.batch(step) for step in range(first, last)]
    arrays = _columns(batches, first, stream.vocabulary.pad)
    _replace(path, arrays)
    return len(arrays["step"])


def _columns(batches: Sequence[Batch], first: int, pad: int) -> dict[str, np.ndarray]:
    """The rows of the batches, as columns; `first` is the step of the first batch."""
    length = max(batch.input_ids.shape[1] for batch in batches)
    columns: dict[str, list[np.ndarray]] = {
        "step": [np.full(len(b.sample_ids), first + n) for n, b in enumerate(batches)],
        "sample_ids": [batch.sample_ids for batch in batches],
        "epochs": [batch.epochs for batch in batches],
        "input_ids": [_padded_to(batch.input_ids, length, pad) for batch in batches],
        "segment_ids": [_padded_to(batch.segment_ids, length, 0) for batch in batches],
        "attention_mask": [_padded_to(batch.attention_mask, length, 0) for batch in batches],
        "labels": [_padded_to(batch.labels(), length, NO_LABEL) for batch in batches],
    }
    if any(PAIRS in batch.targets for batch in batches):
        columns["pair_labels"] = [
            b.targets[PAIRS].labels if PAIRS in b.targets else np.full(len(b.sample_ids), NO_LABEL)
            for b in batches
        ]
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _replace(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with disk_errors(path), open(part, "xb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _is_dump(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return {"step.npy", "sample_ids.npy", "input_ids.npy"} <= set(file.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def show(config: DataConfig, seed: int, count: int = 4, split: str = "train") -> Iterator[Text]:
    """The fraction of padding, and a few masked, packed samples, in colour.

    Blue: the mask token; red: a random token; green: predicted, but left unchanged. The original
    token follows in brackets.
    """
    splits = open_splits(config, split)
    stream = BatchStream(splits, config, seed, count)
    yield _padding(splits, config)
    path = config.path or next(iter(config.mixture.values())).path
    folder = Corpus.open(path, config.cache_dir, config.cache_gb).tokenizer_dir
    tokenizer, vocabulary = tokenization.load(folder)
    batch = stream.batch(0)
    for row in range(count):
        yield _heading(batch, row, config)
        yield _coloured(batch, row, tokenizer, vocabulary)


def _padding(splits: CorpusSplit | Mapping[str, CorpusSplit], config: DataConfig) -> Text:
    parts = [
        f"{share:.1%} ({kind} at {length})"
        for share, (length, kind) in zip(
            padding_fractions(splits, config), config.lengths_and_packings(), strict=True
        )
    ]
    return Text(f"padding: {', then '.join(parts)}")


def _heading(batch: Batch, row: int, config: DataConfig) -> Text:
    used = int(batch.attention_mask[row].sum())
    masked = int((batch.targets[MASKED].labels[row] != NO_LABEL).sum())
    text = f"sample {batch.sample_ids[row]}: {used} tokens, {masked} to predict"
    if batch.readable is not None and not batch.readable[row]:
        text += ", unreadable"
    elif PAIRS in batch.targets:
        label = int(batch.targets[PAIRS].labels[row])
        text += f", second segment: {PAIR_NAMES[config.packing][label]}"
    return Text(text, style="bold underline")


def _coloured(
    batch: Batch, row: int, tokenizer: tokenizers.Tokenizer, vocabulary: tokenization.Vocabulary
) -> Text:
    labels, line = batch.labels()[row], Text()
    for column in range(int(batch.attention_mask[row].sum())):
        shown, label = int(batch.input_ids[row, column]), int(labels[column])
        word = str(tokenizer.id_to_token(shown))
        if label == NO_LABEL:
            line.append(word)
        elif shown == label:
            line.append(word, UNCHANGED_STYLE)
        else:
            line.append(word, MASK_STYLE if shown == vocabulary.mask else RANDOM_STYLE)
            line.append(f"({tokenizer.id_to_token(label)})", "dim")
        line.append(" ")
    return line


def _padded_to(array: np.ndarray, length: int, value: int) -> np.ndarray:
    spare = length - array.shape[1]
    return np.pad(array, ((0, 0), (0, spare)), constant_values=value) if spare else array
