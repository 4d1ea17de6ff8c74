"""The batches of one rank of a job, from corpora that are opened once.

A thread prepares the next batch while the current one is trained on. What a node's ranks read next
is staged: copied to the node's own disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_pipeline import (
    Batch,
    BatchStream,
    Corpus,
    ExampleSplit,
    ExampleStream,
    JointStream,
    open_stream,
)
from data_pipeline.masking.torch_masker import TorchMasker
from data_pipeline.reading.staging import Entered, Stager, stage_folder
from trainer.config import JobConfig
from trainer.job_data.counting import global_batches
from trainer.job_data.examples import views_of
from trainer.job_data.other_tokenizers import other_views
from trainer.learner_names import TEACHER
from trainer.run_folder.folder import RunFolder
from trainer.stored_logits.reading import StoredReader
from trainer.watch.guard import batch_number


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


class Feed:
    """The batches of this rank. A context manager: while it is open, blocks are copied ahead.

    masker: masks batches on the device if they arrive without masks; otherwise None.
    """

    def __init__(self, config: JobConfig, corpora: Mapping[str, Corpus], attempt: int) -> None:
        """`attempt` is this attempt's number.

        Raises DataError for data that cannot be read, and TrainingError for stored predictions.
        """
        self._config, self._corpora = config, corpora
        self._staged: Path | None = None
        self.masker: TorchMasker | None = None
        self._stream: BatchStream | ExampleStream | JointStream
        if config.data.has_examples:
            self._stream = _examples(config, corpora)
        else:
            self._open_text(attempt)
        self._stored: StoredReader | None = None
        if stored := config.teacher.stored:
            share = dist.get_rank(), dist.get_world_size()
            self._stored = StoredReader(Path(stored.path), *share, stored.temperature)
        self._open = ExitStack()

    def _open_text(self, attempt: int) -> None:
        config, masking = self._config, self._config.data.masking
        self._staged = folder_on_node(config, attempt)
        self._stream = stream = BatchStream.open(
            config.data,
            "train",
            config.seed,
            global_batches(config, self._corpora),
            dist.get_rank(),
            dist.get_world_size(),
            masks=not masking.on_device,
            staged=self._staged,
            corpora=self._corpora,
            views=other_views(config, self._corpora),
        )
        if masking.on_device:
            self.masker = TorchMasker(config.seed, masking, stream.vocabulary)

    def start(self, step: int) -> Prefetched:
        """The batches from the job's `step` on; on each node one rank has blocks copied ahead.

        Collective.
        """
        rollbacks, stager = self._config.rollback, None
        if self._staged:
            first = batch_number(step, rollbacks)
            stager = stager_of_node(self._config, self._corpora, self._staged, first)
        if stager:
            self._open.enter_context(stager)

        def read(at: int) -> Batch:
            number = batch_number(at, rollbacks)
            if stager:
                stager.reached(number)
            batch = self._stream.batch(number)
            if self._stored is None:
                return batch
            stored = {TEACHER: self._stored.read(number, batch)}
            return dataclasses.replace(batch, stored=stored)

        batches = Prefetched(read, step)
        self._open.callback(batches.close)
        return batches

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.close()


def _examples(config: JobConfig, corpora: Mapping[str, Corpus]) -> ExampleStream | JointStream:
    """The examples of the job's task, or of its tasks."""
    skips, sizes = config.data.on_bad_shard == "skip", global_batches(config)
    splits = {
        name: ExampleSplit(corpus, "train", skips, views_of(config, name, config.seed))
        for name, corpus in corpora.items()
    }
    return open_stream(splits, config.seed, sizes, dist.get_rank(), dist.get_world_size())


class Prefetched:
    """Calls `read(step)` for consecutive steps, one step ahead.

    `waited`: the seconds that `take` has waited so far, which training lost to reading.
    """

    def __init__(self, read: Callable[[int], Batch], step: int) -> None:
        self._read, self._step, self.waited = read, step, 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: Future[Batch] = self._thread.submit(read, step)

    def take(self) -> Batch:
        """The batch of the next step; raises what `read` raised."""
        began = time.monotonic()
        batch = self._next.result()
        self.waited += time.monotonic() - began
        self._step += 1
        self._next = self._thread.submit(self._read, self._step)
        return batch

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(wait=True, cancel_futures=True)
