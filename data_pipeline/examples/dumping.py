"""The examples that a job of tasks trains on: ``tandem data dump`` and ``show`` of a task."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from rich.text import Text

from data_pipeline.config import DataConfig
from data_pipeline.examples.example import View
from data_pipeline.examples.reading import ExampleSplit
from data_pipeline.examples.stream import ExampleStream, JointStream, open_stream
from data_pipeline.order import BatchSizes
from data_pipeline.reading.batches import MASKED, Batch
from data_pipeline.reading.corpus import Corpus
from data_pipeline.reading.dumping import (
    RankSteps,
    label_column,
    refuse_other_files,
    sequence_columns,
    stacked,
    write_dump,
)
from data_pipeline.reading.stream import open_corpora
from data_pipeline.tokenization import tokenizer as tokenization


def dump_examples(
    config: DataConfig,
    seed: int,
    sizes: BatchSizes,
    wanted: RankSteps,
    out: str,
    views: Mapping[str, View],
) -> int:
    """Write exactly which examples a rank trains on at the `wanted` steps to an .npz.

    `views` are the forms in which a learner reads each corpus, by its name; without, it reads them
    whole.

    There is one row for each example: step, sample_ids (unique within an epoch of a task), epochs,
    input_ids, segment_ids, attention_mask, and labels_NAME for each target. They are padded to
    the longest sequence of all steps, and are [rows, C, L] where examples have up to C sequences.
    Labels of tokens stand in their columns. Without a label there is -100, or NaN where labels are
    real numbers. numbers holds what a head reads beside the text, as in the table; NaN where a task
    has fewer. In a job of several tasks, the column task names each row's. Returns the number of
    rows. Replaces an earlier dump at `out`; raises DataError if another file is there.
    """
    refuse_other_files(path := Path(out))
    corpora = open_corpora(config)
    skips = config.on_bad_shard == "skip"
    splits = {
        name: ExampleSplit(corpus, wanted.split, skips, {name: views[name]} if views else None)
        for name, corpus in corpora.items()
    }
    stream = open_stream(splits, seed, sizes, wanted.rank, wanted.world_size)
    batches = [as_read(stream.batch(step)) for step in wanted.steps]
    readers = [view.corpus for view in views.values() if view.corpus is not None]
    vocabulary = [*readers, *corpora.values()][0].vocabulary
    arrays = sequence_columns(batches, wanted.steps, vocabulary.pad)
    if isinstance(stream, JointStream):
        names = np.array([stream.schedule.at(step).task for step in wanted.steps])
        arrays["task"] = names.repeat([len(batch.sample_ids) for batch in batches])
    for target in dict.fromkeys(name for batch in batches for name in batch.targets):
        arrays[f"labels_{target}"] = label_column(batches, target)
    if any(batch.numbers is not None for batch in batches):
        arrays["numbers"] = stacked([_numbers(batch) for batch in batches], np.nan)
    write_dump(path, arrays)
    return len(arrays["step"])


def _numbers(batch: Batch) -> NDArray[np.float64]:
    """The numbers beside the batch's texts, [R, K]; K is 0 where its task has none."""
    return np.zeros((len(batch.sample_ids), 0)) if batch.numbers is None else batch.numbers


def as_read(batch: Batch) -> Batch:
    """The batch's only view; the batch itself where it has none."""
    return next(iter(batch.views.values()), batch)


def show_examples(
    config: DataConfig,
    seed: int,
    sizes: BatchSizes,
    count: int,
    views: Mapping[str, View],
    labels: Mapping[str, Sequence[str]],
) -> Iterator[Text]:
    """How long each task's examples are, and the first `count` that the job reads of it.

    They are shown in the form in which a learner reads each corpus: of `views`, or whole. `labels`
    are the names of the labels of targets, where they have any.
    """
    for name, corpus in open_corpora(config).items():
        if config.tasks:
            yield Text(name, style="bold")
        shown = {name: views[name]} if views else {}
        split = ExampleSplit(corpus, "train", views=shown)
        readers = [view.corpus for view in shown.values() if view.corpus is not None]
        yield from _show_task(split, [*readers, corpus][0], seed, sizes, count, labels)


def _show_task(
    split: ExampleSplit,
    corpus: Corpus,
    seed: int,
    sizes: BatchSizes,
    count: int,
    labels: Mapping[str, Sequence[str]],
) -> Iterator[Text]:
    lengths = split.table.lengths(0, split.total)
    yield Text(
        f"{split.total:,} examples to train on, {ExampleSplit(corpus, 'val').total:,} to score on; "
        f"{lengths.mean():.0f} tokens in the mean, {lengths.max()} at most"
    )
    tokenizer, _ = tokenization.load(corpus.tokenizer_dir)
    batch = as_read(ExampleStream(split, seed, sizes).batch(0))
    for row in range(min(count, len(batch.sample_ids))):
        yield Text(f"example {batch.sample_ids[row]}", style="bold underline")
        mask = np.atleast_2d(batch.attention_mask[row]).astype(bool)
        for sequence, is_token in zip(np.atleast_2d(batch.input_ids[row]), mask, strict=True):
            yield Text(_words(sequence[is_token], tokenizer))
        yield Text(", ".join(_targets(batch, row, tokenizer, labels)), style="bold green")
        if batch.numbers is not None:
            read = zip(split.layout.columns, batch.numbers[row].tolist(), strict=True)
            yield Text(", ".join(f"{name}: {number:g}" for name, number in read), style="bold cyan")


def _words(ids: NDArray[Any], tokenizer: tokenizers.Tokenizer) -> str:
    return " ".join(str(tokenizer.id_to_token(int(token_id))) for token_id in ids)


def _targets(
    batch: Batch, row: int, tokenizer: tokenizers.Tokenizer, labels: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    for name, target in batch.targets.items():
        values, is_labelled = target.labels[row], target.is_labelled[row]
        names = labels.get(name, ())
        if target.positions is None:
            yield f"{name}: {_named(values, is_labelled, names)}"
            continue
        words: Iterable[Any] = values[is_labelled]
        if name == MASKED:
            words = map(tokenizer.id_to_token, words)
        elif names:
            words = (names[number] for number in words)
        pairs = zip(target.positions[row][is_labelled], words, strict=True)
        yield f"{name}: " + " ".join(f"{column}:{label}" for column, label in pairs)


def _named(values: Any, is_labelled: Any, names: Sequence[str]) -> str:
    """The label of an example by its name, or all of several that are right; else the number."""
    if not names or not np.any(is_labelled):
        return str(values)
    if np.ndim(values):
        return ", ".join(name for name, right in zip(names, values, strict=True) if right == 1)
    return names[int(values)]
