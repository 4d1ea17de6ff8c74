"""The number of sequences in each global batch of a job."""

from __future__ import annotations

from collections.abc import Mapping

from data_pipeline import BatchSizes, Corpus, open_splits, rows_for_tokens
from trainer.config import JobConfig


def global_batches(config: JobConfig, corpora: Mapping[str, Corpus] | None = None) -> BatchSizes:
    """The number of sequences in the global batch at every step.

    Where the config states tokens, the number depends on sequence length and packing. `corpora` are
    the job's, if they are already open. Raises DataError when they cannot be opened.
    """
    batch = config.batch_sizes
    splits = open_splits(config.data, "train", corpora=corpora) if batch.in_tokens else {}
    sizes = {}
    for step in _changes(config):
        target = batch.at(step)
        if target.tokens is None:
            assert target.sequences is not None
            sizes[step] = target.sequences
        else:
            sizes[step] = rows_for_tokens(splits, config.data, step, target.tokens, batch.multiple)
    return BatchSizes.of(sizes)


def usual_rows(config: JobConfig) -> int:
    """The size of the global batch at most steps, assuming no padding; opens no corpus."""
    rows_from = rows_by_step(config)
    shares: dict[int, int] = {}
    for (start, rows), end in zip(rows_from.items(), [*rows_from, config.steps][1:], strict=True):
        shares[rows] = shares.get(rows, 0) + end - start
    return max(shares, key=lambda rows: shares[rows])


def rows_by_step(config: JobConfig) -> dict[int, int]:
    """The sizes of the global batch by their first steps, assuming no padding; opens no corpus."""
    multiple, sizes = config.batch.multiple, {}
    for start in _changes(config):
        if start < config.steps:
            target = config.batch_sizes.at(start)
            length, _ = config.data.length_and_packing_at(start)
            about = max(1, round((target.tokens or 0) / length / multiple)) * multiple
            sizes[start] = target.sequences or about
    return sizes


def _changes(config: JobConfig) -> list[int]:
    """The steps at which the batch size may change, ascending, including 0."""
    phases = (phase.from_step for phase in config.data.phases)
    return sorted({0, *phases, *(growth.step for growth in config.batch_sizes.growth)})
