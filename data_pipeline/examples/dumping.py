"""The examples that a job of tasks trains on, as arrays: ``tandem data dump`` of a task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from data_pipeline.config import DataConfig
from data_pipeline.examples.example import View
from data_pipeline.examples.reading import ExampleSplit
from data_pipeline.examples.stream import JointStream, open_stream
from data_pipeline.order.slots import BatchSizes
from data_pipeline.reading.batches import Batch
from data_pipeline.reading.dumping import (
    RankSteps,
    label_column,
    refuse_other_files,
    sequence_columns,
    write_dump,
)
from data_pipeline.reading.stream import open_corpora


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
    real numbers. numbers holds what a head reads beside the text, as in the table. In a job of
    several tasks, the column task names each row's. Returns the number of rows. Replaces an earlier
    dump at `out`; raises DataError if another file is there.
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
    numbers = [batch.numbers for batch in batches if batch.numbers is not None]
    if numbers:
        arrays["numbers"] = np.concatenate(numbers)
    write_dump(path, arrays)
    return len(arrays["step"])


def as_read(batch: Batch) -> Batch:
    """The batch's only view; the batch itself where it has none."""
    return next(iter(batch.views.values()), batch)
