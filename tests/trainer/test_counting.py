"""The first job on a large corpus counts its sequences for as long as that takes."""

from __future__ import annotations

import dataclasses
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data_pipeline import BuildOptions, Corpus, build, open_corpora
from data_pipeline.packing import sequences as packing
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.shards import index, manifest
from tests.damage import Damage, harmed
from tests.distributed import RankFailed, run_distributed
from tests.faults.jobs import arguments, finish, start_ranks
from tests.trainer.jobs import tiny_job
from trainer.checkpoint.attempts import Owner
from trainer.config import JobConfig
from trainer.control import RunContext
from trainer.evaluation.held_out import ValidationSet
from trainer.job import Job
from trainer.job_data import counting
from trainer.job_data.counting import count_sequences
from trainer.job_data.feed import Feed
from trainer.lifecycle.start import start_run
from trainer.measure import Startup
from trainer.watch.ranks import HangWatch, on_rank_0

RANKS = 2
PHASES = "data.phases=[{from_step: 4, sequence_length: 24}, {from_step: 6, packing: contiguous}]"
RULES = [("full_sentences", 32), ("full_sentences", 24), ("contiguous", 24)]
BOTH = ("train", "val")


@pytest.fixture
def many_blocks(corpus: Path, text: Path, tmp_path: Path) -> Path:
    """A corpus of small blocks, of which nothing has been counted."""
    options = {"val_fraction": 0.1, "shard_mb": 0.02, "block_bytes": 4000}
    build(BuildOptions([str(text)], str(corpus / "tokenizer"), **options), str(tmp_path / "many"))
    return tmp_path / "many"


def blocks_of(folder: Path, split: str) -> int:
    return len(Corpus.open(str(folder)).split(split).index.blocks)


def counted(config: JobConfig, *, can_write: bool) -> tuple[list[list[int]], int, int]:
    """The counts by which a rank then reads, how many blocks it counted, and its heartbeats."""
    counting.BLOCKS = 3
    own, heartbeats, count = [], [], packing.count
    packing.count = lambda *arguments: own.append(1) or count(*arguments)
    if not can_write:
        index._save = lambda *arguments: False
    corpora = open_corpora(config.data)
    count_sequences(config.data, corpora, BOTH, lambda: heartbeats.append(1))
    packing.count = None  # from here on nothing is counted
    Feed(config, corpora, 0)
    ValidationSet(config, corpora)
    (corpus,) = corpora.values()
    rules = [PackingRules(*one) for one in RULES]
    found = [corpus.split("train").sequence_counts(one).per_block.tolist() for one in rules]
    return found, len(own), len(heartbeats)


@pytest.mark.parametrize("can_write", [True, False])
def test_ranks_share_the_counting(many_blocks: Path, tmp_path: Path, can_write: bool) -> None:
    """Each block is counted once, also where no rank can write the counts for the others."""
    config = tiny_job(many_blocks, tmp_path, PHASES)
    call = partial(counted, config, can_write=can_write)
    (first, *own), (second, *others) = run_distributed(call, RANKS)
    split = Corpus.open(str(many_blocks)).split("train")
    assert first == second == [split.count(PackingRules(*one)).tolist() for one in RULES]
    sizes = [blocks_of(many_blocks, "train")] * len(RULES) + [blocks_of(many_blocks, "val")]
    assert sizes[0] > 4 * RANKS
    assert own[0] + others[0] == sum(sizes)
    assert own[1] == others[1] == sum(-(-size // (3 * RANKS)) for size in sizes)
    written = {path.name for path in (many_blocks / "train").glob("sequences-*.npy")}
    assert len(written) == (2 * len(RULES) if can_write else 0)


def has_and_lacks(config: JobConfig, other: Path) -> list[int]:
    """As on nodes whose copies of a remote index are their own: only rank 0 has the counts."""
    if dist.get_rank():
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(other)))
    corpora = open_corpora(config.data)
    if not dist.get_rank():
        next(iter(corpora.values())).split("train").sequence_counts(PackingRules(*RULES[0]))
    count_sequences(config.data, corpora, ["train"])
    return sorted(path.stat().st_size for path in Path(config.data.path).glob("train/sequences-*"))


def test_a_node_without_the_counts_gets_them(many_blocks: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(many_blocks, other)
    first, second = run_distributed(has_and_lacks, RANKS, tiny_job(many_blocks, tmp_path), other)
    assert len(first) == 2  # of the blocks, and of the shards
    assert second == first[-1:]


def count_unverified(config: JobConfig) -> None:
    """As where the index is too large to be verified when it is opened."""
    manifest.verify.__defaults__ = (0,)
    count_sequences(config.data, open_corpora(config.data), ["train"])


def test_a_damaged_index_is_named(many_blocks: Path, tmp_path: Path) -> None:
    path, config = many_blocks / "train" / "sentences.u16", tiny_job(many_blocks, tmp_path)
    sizes = path.read_bytes()
    flipped = Damage("flipped", bytes([sizes[0] ^ 1]) + sizes[1:])
    with harmed(path, flipped), pytest.raises(RankFailed, match=r"sentences\.u16 .* in block 0"):
        run_distributed(count_unverified, RANKS, config)


class Impatient(HangWatch):
    """A hang watch by a clock that only counting moves."""

    now, last = 0.0, 0.0

    def heartbeat(self) -> None:
        assert self.now - self.last <= self._seconds, "the hang watch would have ended this rank"
        Impatient.last = self.now


def start_slowly(config: JobConfig) -> float:
    """Start a job that takes 1000 s to count a block; the time that this rank has counted for."""
    counting.BLOCKS = 1
    count = packing.count

    def slow_count(*arguments: object) -> int:
        Impatient.now += 1000.0
        return count(*arguments)

    packing.count = slow_count
    attempt = on_rank_0(lambda: start_run(config, Owner.here())).attempt
    context = RunContext.of(config, attempt, dist.get_rank(), lambda: False, Startup())
    watch = Impatient(Path("log"), config.watch.hang_timeout_s)
    with Job(config, torch.device("cpu"), dataclasses.replace(context, hang_watch=watch)):
        watch.heartbeat()
    return watch.now


def test_counting_may_take_longer_than_a_hang(many_blocks: Path, tmp_path: Path) -> None:
    config = tiny_job(many_blocks, tmp_path, PHASES)
    seconds = run_distributed(start_slowly, RANKS, config)
    assert min(seconds) > config.watch.hang_timeout_s


def test_the_clock_of_that_test_ends_a_rank(many_blocks: Path, tmp_path: Path) -> None:
    config = tiny_job(many_blocks, tmp_path, PHASES, "watch.hang_timeout_s=999")
    with pytest.raises(RankFailed, match="the hang watch would have ended this rank"):
        run_distributed(start_slowly, RANKS, config)


def count_slowly(seconds: float) -> None:
    counting.BLOCKS = 1
    count = packing.count

    def slow_count(*arguments: object) -> int:
        time.sleep(seconds)
        return count(*arguments)

    packing.count = slow_count


@pytest.mark.slow
def test_a_real_job_counts_for_longer_than_its_hang_timeout(
    many_blocks: Path, tmp_path: Path
) -> None:
    seconds, rounds = 20.0, -(-blocks_of(many_blocks, "train") // RANKS)
    prepare = partial(count_slowly, 2 * seconds / rounds)
    words = arguments(many_blocks, tmp_path, f"watch.hang_timeout_s={seconds}")
    began = time.monotonic()
    finish(start_ranks(prepare, words, tmp_path))
    assert time.monotonic() - began > 2 * seconds


def test_blocks_can_be_counted_from_any_on(many_blocks: Path) -> None:
    split = Corpus.open(str(many_blocks)).split("train")
    whole = split.count(PackingRules(*RULES[0]))
    size = len(whole)
    for first in range(size + 2):
        for last in (first, first + 1, first + 5, size, None):
            found = split.count(PackingRules(*RULES[0]), first, last)
            np.testing.assert_array_equal(found, whole[first:last])
