"""Inspecting what a job trains on: ``tandem data dump`` and ``tandem data show``."""

import itertools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from rich.text import Text

from configs.errors import OptionError
from data_pipeline.config import DataConfig
from data_pipeline.masking.masker import NO_LABEL
from data_pipeline.order import BatchSizes
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.reading.batches import MASKED, PAIRS, Batch
from data_pipeline.reading.corpus import CorpusSplit, padding_fractions
from data_pipeline.reading.stream import BatchStream, open_splits
from data_pipeline.shards.locking import unfinished
from data_pipeline.shards.writing import disk_errors, refuse_existing
from data_pipeline.tokenization import tokenizer as tokenization

MASK_STYLE, RANDOM_STYLE, UNCHANGED_STYLE = "bold white on blue", "bold white on red", "bold green"


@dataclass(frozen=True)
class RankSteps:
    """Some steps, from `first` up to `last`, as one of `world_size` ranks reads a split in them."""

    first: int
    last: int
    rank: int = 0
    world_size: int = 1
    split: str = "train"

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise OptionError(f"--steps {self.first}:{self.last}: must be A:B with 0 <= A < B")
        if not 0 <= self.rank < self.world_size:
            raise OptionError(f"--rank {self.rank}: must be from 0 to {self.world_size - 1}")

    @property
    def steps(self) -> range:
        """The numbers of the steps."""
        return range(self.first, self.last)


def dump(
    config: DataConfig, seed: int, batch_sizes: BatchSizes | int, wanted: RankSteps, out: str
) -> int:
    """Write exactly what a rank that reads text trains on at the `wanted` steps to an .npz file.

    There is one row for each sequence: step, sample_ids (unique within an epoch), epochs (those of
    the n-th new pass that a phase begins count from n << 20),
    input_ids, segment_ids, attention_mask, labels (-100 where not masked) and pair_labels (-100
    where the packing makes no pairs); where rows hold several documents, document_ids (from 1; 0
    at padding). If phases differ in length, shorter rows are padded. Returns the number of rows.
    Replaces an earlier dump at `out`; raises DataError if another file is there.
    """
    refuse_other_files(path := Path(out))
    share = wanted.rank, wanted.world_size
    stream = BatchStream.open(config, wanted.split, seed, batch_sizes, *share)
    batches = [stream.batch(step) for step in wanted.steps]
    arrays = sequence_columns(batches, wanted.steps, stream.vocabulary.pad)
    arrays["labels"] = stacked([batch.labels() for batch in batches], NO_LABEL)
    if any(batch.document_ids is not None for batch in batches):
        arrays["document_ids"] = stacked([batch.documents for batch in batches])
    arrays["pair_labels"] = label_column(batches, PAIRS)
    write_dump(path, arrays)
    return len(arrays["step"])


def sequence_columns(batches: Sequence[Batch], steps: range, pad: int) -> dict[str, NDArray[Any]]:
    """The rows of the batches of these steps as columns, without their targets."""
    rows = [len(batch.sample_ids) for batch in batches]
    return {
        "step": np.repeat(np.array(steps), rows),
        "sample_ids": stacked([batch.sample_ids for batch in batches]),
        "epochs": stacked([batch.epochs for batch in batches]),
        "input_ids": stacked([batch.input_ids for batch in batches], pad),
        "segment_ids": stacked([batch.segment_ids for batch in batches]),
        "attention_mask": stacked([batch.attention_mask for batch in batches]),
    }


def label_column(batches: Sequence[Batch], target: str) -> NDArray[Any]:
    """A target's labels, those of tokens in their columns.

    There is no label (-100, or NaN where labels are real numbers) in batches without this target.
    """
    columns = [
        batch.targets[target].in_columns(batch.input_ids.shape) if target in batch.targets else None
        for batch in batches
    ]
    is_real = any(labels is not None and labels.dtype.kind == "f" for labels in columns)
    none = np.nan if is_real else NO_LABEL
    return stacked(
        [
            np.full(len(batch.sample_ids), none) if labels is None else labels
            for batch, labels in zip(batches, columns, strict=True)
        ],
        none,
    )


def stacked(arrays: Sequence[NDArray[Any]], fill: float = 0) -> NDArray[Any]:
    """The rows of all arrays, [R, ...], each filled up at its end to the widest and deepest."""
    depth = max(array.ndim for array in arrays)
    level = [np.expand_dims(array, tuple(range(1, 1 + depth - array.ndim))) for array in arrays]
    widest = np.max([array.shape[1:] for array in level], axis=0).tolist()
    spare = [np.subtract(widest, array.shape[1:]).tolist() for array in level]
    return np.concatenate(
        [
            np.pad(array, [(0, 0), *((0, width) for width in widths)], constant_values=fill)
            for array, widths in zip(level, spare, strict=True)
        ]
    )


def refuse_other_files(path: Path) -> None:
    """Raise DataError where a file that is no dump has the name of one that is to be written."""
    if not _is_dump(path):
        refuse_existing([path])


def write_dump(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an .npz file atomically."""
    with disk_errors(path), unfinished(path) as part:
        with open(part / path.name, "xb") as file:
            np.savez(file, **arrays)
        (part / path.name).replace(path)


def _is_dump(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return {"step.npy", "sample_ids.npy", "input_ids.npy"} <= set(file.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def show(config: DataConfig, seed: int, sizes: BatchSizes, count: int) -> Iterator[Text]:
    """The fraction of padding, and the first masked, packed samples of a job, in colour.

    Blue: the mask token; red: a random token; green: predicted, but left unchanged. The original
    token follows in brackets. Where next tokens are predicted, nothing is coloured.
    """
    splits = open_splits(config, "train")
    each = [splits] if isinstance(splits, CorpusSplit) else [*splits.values()]
    size, blocks = sizes.sizes[0], min(len(split.index.blocks) for split in each)
    stream = BatchStream(splits, config, seed, size, world_size=_ranks(size, count, blocks))
    yield _padding(splits, config)
    tokenizer, vocabulary = tokenization.load(each[0].tokenizer_dir)
    batches = ((step, stream.batch(step)) for step in itertools.count())
    rows = ((step, batch, row) for step, batch in batches for row in range(len(batch.sample_ids)))
    for step, batch, row in itertools.islice(rows, count):
        yield _heading(batch, row, config.length_and_packing_at(step)[1])
        yield _coloured(batch, row, tokenizer, vocabulary)


def _ranks(size: int, count: int, blocks: int) -> int:
    """How many ranks, at most, a batch is cut for so that the first one reads `count` rows.

    So it reads few blocks; where there are few, they may have too few samples for more ranks.
    """
    most = max(1, min(size // count, blocks))
    return next(ranks for ranks in range(most, 0, -1) if size % ranks == 0)


def _padding(splits: CorpusSplit | Mapping[str, CorpusSplit], config: DataConfig) -> Text:
    parts = [
        f"{share:.1%} ({kind} at {length})"
        for share, (length, kind) in zip(
            padding_fractions(splits, config), config.lengths_and_packings(), strict=True
        )
    ]
    return Text(f"padding: {', then '.join(parts)}")


def _heading(batch: Batch, row: int, packing: str) -> Text:
    used = int(batch.attention_mask[row].sum())
    masked = int((batch.targets[MASKED].labels[row] != NO_LABEL).sum())
    text = f"sample {batch.sample_ids[row]}: {used} tokens, {masked} to predict"
    if batch.document_ids is not None:
        text += f", documents: {batch.document_ids[row].max()}"
    if batch.readable is not None and not batch.readable[row]:
        text += ", unreadable"
    elif PAIRS in batch.targets:
        label = int(batch.targets[PAIRS].labels[row])
        text += f", second segment: {PACKINGS[packing].pair_labels[label]}"
    return Text(text, style="bold underline")


def _coloured(
    batch: Batch, row: int, tokenizer: tokenizers.Tokenizer, vocabulary: tokenization.Vocabulary
) -> Text:
    labels, line = batch.labels()[row], Text()
    for column in range(int(batch.attention_mask[row].sum())):
        shown, label = int(batch.input_ids[row, column]), int(labels[column])
        word = str(tokenizer.id_to_token(shown))
        if label == NO_LABEL or batch.is_causal:
            line.append(word)
        elif shown == label:
            line.append(word, UNCHANGED_STYLE)
        else:
            line.append(word, MASK_STYLE if shown == vocabulary.mask else RANDOM_STYLE)
            line.append(f"({tokenizer.id_to_token(label)})", "dim")
        line.append(" ")
    return line
