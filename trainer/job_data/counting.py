"""The number of sequences in each global batch, and in each block of a job's corpora.

A corpus of 10 trillion tokens has 20 million blocks, which one process counts in 16 hours. The
counts are cached beside the index, so only the first job with a new packing or length counts.
"""

import logging
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from data_pipeline import BatchSizes, Corpus, CorpusSplit, DataConfig, open_splits, rows_for_tokens
from data_pipeline.packing.sequences import PackingRules
from trainer.config import JobConfig
from trainer.device import background_group
from trainer.watch.ranks import SendHeartbeat


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


_log = logging.getLogger(__name__)

BLOCKS = 512  # that each rank counts between two heartbeats, in about two seconds


def count_sequences(
    data: DataConfig,
    corpora: Mapping[str, Corpus],
    splits: Collection[str],
    heartbeat: SendHeartbeat = lambda: None,
) -> None:
    """Count the sequences of the text that a job reads, unless that has been done. Collective.

    `splits` are "train", "val" or both. Afterwards every rank has the counts, also where it cannot
    write them beside the index, or has an index of its own. The counting may take any time:
    `heartbeat` is called on all ranks after every `BLOCKS` blocks of each. Raises DataError for a
    split without documents and for a damaged index.
    """
    if data.has_examples:
        return
    for split, rules in _needed(data, corpora, splits):
        has_counts = split.has_counts(rules)
        if not _on_all_ranks(has_counts):
            counts = _count_together(split, rules, heartbeat)
            if not has_counts:
                split.keep_counts(rules, counts)


def _needed(
    data: DataConfig, corpora: Mapping[str, Corpus], splits: Collection[str]
) -> Iterator[tuple[CorpusSplit, PackingRules]]:
    """The splits with their rules of packing, once each; "val" has those of the first phase."""
    phases = [
        PackingRules(kind, length, data.short_sequence_probability)
        for length, kind in data.lengths_and_packings()
    ]
    for corpus in corpora.values():
        for name in splits:
            split = corpus.split(name)
            for rules in dict.fromkeys(phases if name == "train" else phases[:1]):
                yield split, rules


def _on_all_ranks(holds: bool) -> bool:
    """Whether something holds on every rank. Collective."""
    held = torch.tensor(int(holds))
    dist.all_reduce(held, dist.ReduceOp.MIN, background_group())
    return bool(held)


def _count_together(
    split: CorpusSplit, rules: PackingRules, heartbeat: SendHeartbeat
) -> NDArray[np.uint32]:
    """The number of sequences in each block, on every rank. Collective.

    The ranks meet after every `BLOCKS` blocks, so that none waits long for a slower one.
    """
    rank, at_once = dist.get_rank(), dist.get_world_size() * BLOCKS
    counts = torch.zeros(len(split.index.blocks), dtype=torch.int64)
    _log.info("%s: counting the sequences of %d blocks", split.name, len(counts))
    for start in range(0, len(counts), at_once):
        first = start + rank * BLOCKS
        counted = split.count(rules, first, first + BLOCKS)
        counts[first : first + len(counted)] = torch.from_numpy(counted.astype(np.int64))
        dist.all_reduce(counts[start : start + at_once], group=background_group())
        heartbeat()
    return counts.numpy().astype(np.uint32)
