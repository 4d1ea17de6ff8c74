"""Seeking, memory and shuffling at large sizes."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import BatchStream, Corpus, DataConfig
from data_pipeline.order import BatchSizes, EpochOrder, SequenceCounts, Slots
from data_pipeline.reading.corpus import index_digest
from data_pipeline.shards import manifest
from data_pipeline.shards.index import BLOCK, INDEX_FILES, SHARD, cached_array, write_index
from tests.data_pipeline.conftest import make_documents

BLOCKS = 4
PER_BLOCK = 1000

SEEK = """
import re, sys, time
from data_pipeline import BatchStream, DataConfig
config = DataConfig(path=sys.argv[1], sequence_length=512)
def memory():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = memory()
start = time.perf_counter()
stream = BatchStream.open(config, "train", 7, 4096, 3, 32)
epochs, samples = stream.samples(1_000_000)
assert len(set(samples.tolist())) == 128
print(time.perf_counter() - start, memory() - before)
"""


def write_hollow_corpus(folder: Path, corpus: Corpus, shards: int) -> None:
    """A corpus with an index of many shards, but without the shards."""
    split = folder / "train"
    split.mkdir(parents=True)
    records = np.zeros(shards, SHARD)
    records["first_block"], records["blocks"] = np.arange(shards) * BLOCKS, BLOCKS
    records["tokens"] = BLOCKS * PER_BLOCK * 500
    write_index(split, [records], [np.zeros(shards * BLOCKS, BLOCK)], np.zeros(8, np.int64))
    (split / "sentences.u16").write_bytes(b"")
    (split / "documents.u32").write_bytes(b"")
    np.save(folder / "word_starts.npy", np.ones(8, bool))
    tree = manifest.read(corpus.folder)
    names = [f"train/{name}" for name in INDEX_FILES]
    tree["files"] = manifest.records(folder, [*names, "word_starts.npy"])
    (folder / "corpus.json").write_text(manifest.render(tree))
    origin = index_digest(manifest.files_of(tree), "train")
    counts = np.full(shards * BLOCKS, PER_BLOCK, "u4")
    name = split / "sequences-full_sentences-512.npy"
    cached_array(name, origin, len(counts), lambda: counts)


def test_seeking_reads_no_shard_and_little_memory(corpus: Corpus, tmp_path: Path) -> None:
    """100,000 shards, step 1,000,000. The time is printed by `pytest -s`; it is not asserted."""
    write_hollow_corpus(tmp_path / "hollow", corpus, 100_000)
    out = subprocess.run(
        [sys.executable, "-c", SEEK, str(tmp_path / "hollow")],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    seconds, kilobytes = map(float, out.split())
    print(f"{seconds:.3f} s, {kilobytes / 1000:.0f} MB")
    assert kilobytes < 300_000


@pytest.mark.parametrize(
    ("packing", "rows"),
    [("full_sentences", 8), pytest.param("segment_pair", 100, marks=pytest.mark.slow)],
)
def test_no_growth_over_six_epochs(
    make_corpus: Callable[..., Corpus], packing: str, rows: int
) -> None:
    """With more blocks than rows, and with rows that share blocks."""
    corpus = make_corpus(make_documents(80))
    config = DataConfig(path="x", sequence_length=160, packing=packing)
    stream = BatchStream(corpus.split("train"), config, 1, rows)
    steps = -(-stream.samples_per_epoch // rows)
    sizes: list[int] = []
    tracemalloc.start()
    for epoch in range(6):
        for step in range(epoch * steps, (epoch + 1) * steps):
            stream.batch(step)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes[3:]) < 1.1 * max(sizes[:2]) + 20_000


def test_batches_represent_the_corpus_like_a_full_shuffle_s() -> None:
    """Variance of the mean position of a batch's samples in the corpus: 1 for a full shuffle."""
    shards, blocks, sequences, rows = 40, 16, 100, 64
    counts = SequenceCounts(
        np.full(shards * blocks, sequences, np.uint32),
        np.full(shards, blocks * sequences),
        np.arange(shards + 1) * blocks,
    )
    means = []
    for epoch in range(4):
        order = EpochOrder(counts, 3, epoch)
        for step in range(0, counts.total // rows, 25):
            _, positions = Slots(BatchSizes.constant(rows), counts.total).locate(
                step, np.arange(rows)
            )
            places = []
            for position in positions.tolist():
                span = order.span(position)
                within = order.within_block(span)[position - span.first_position]
                places.append((span.first_sample + within) / counts.total)
            means.append(np.mean(places))
    variance = np.mean((np.array(means) - 0.5) ** 2) * 12 * rows
    assert variance < 1.6
