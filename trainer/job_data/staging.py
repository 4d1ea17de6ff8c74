"""Staging: copies of the data that a node's ranks read next, on the node's own disk."""

from __future__ import annotations

import hashlib
import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from data_pipeline import BatchStream, Corpus
from data_pipeline.reading.staging import Entered, Stager, stage_folder
from trainer.config import JobConfig
from trainer.job_data.batch_plan import global_batches
from trainer.run_folder.folder import RunFolder


def folder_on_node(config: JobConfig, attempt: int) -> Path | None:
    """The folder of this attempt's copies on every node; None without ``data.stage``."""
    if config.data.stage is None:
        return None
    run = hashlib.sha256(str(RunFolder.of(config).path.resolve()).encode()).hexdigest()[:12]
    return stage_folder(config.data.stage, f"{run}-{attempt}")


def stager_of_node(
    config: JobConfig, corpora: Mapping[str, Corpus], folder: Path, step: int
) -> Stager | None:
    """The stager that copies for all ranks of a node, from batch `step` on. Collective.

    Only the first rank of each node gets one; the others get None.
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    ranks = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]
    if dist.get_rank() != ranks[0]:
        return None
    streams = [
        BatchStream.open(
            config.data,
            "train",
            config.seed,
            global_batches(config, corpora),
            *share,
            masks=False,
            staged=folder,
            corpora=corpora,
        )
        for share in shares_of(ranks, len(hosts))
    ]
    return Stager(folder, _entered(streams, step), int(config.data.stage_gb * 1e9), step)


def shares_of(ranks: Sequence[int], world_size: int) -> list[tuple[int, int]]:
    """(rank, world size) of streams that together read what the `ranks` of one node read.

    One stream suffices where a node's ranks read a contiguous, equal share of the batch, as with
    SLURM's block distribution.
    """
    size, first = len(ranks), ranks[0]
    in_a_row = list(ranks) == list(range(first, first + size))
    if in_a_row and first % size == 0 and world_size % size == 0:
        return [(first // size, world_size // size)]
    return [(rank, world_size) for rank in ranks]


def _entered(streams: Sequence[BatchStream], step: int) -> Iterator[tuple[int, Entered]]:
    walks = [stream.blocks_entered(step) for stream in streams]
    for at in itertools.count(step):
        yield at, [block for walk in walks for block in next(walk)]
