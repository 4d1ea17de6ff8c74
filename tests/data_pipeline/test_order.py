"""The order of samples, for any corpus, seed, batch and world size."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.hashing import array_keys, permutation, random_uint32, scalar_key
from data_pipeline.order import BatchSizes, EpochOrder, SequenceCounts, Slots

shards = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=6
).filter(lambda one: sum(map(sum, one)) > 0)


def counts_of(shards: list[list[int]]) -> SequenceCounts:
    return SequenceCounts(
        per_block=np.array([n for shard in shards for n in shard], np.uint32),
        per_shard=np.array([sum(shard) for shard in shards]),
        first_block=np.cumsum([0, *map(len, shards)]),
    )


def samples_of_step(counts, seed, batch_size, step, rows) -> list[tuple[int, int]]:
    epochs, positions = Slots(BatchSizes.constant(batch_size), counts.total).locate(step, rows)
    orders = {epoch: EpochOrder(counts, seed, epoch) for epoch in np.unique(epochs).tolist()}
    found = []
    for epoch, position in zip(epochs.tolist(), positions.tolist(), strict=True):
        order = orders[epoch]
        span = order.span(position)
        within = order.within_block(span)[position - span.first_position]
        found.append((epoch, span.first_sample + int(within)))
    return found


@given(shards, st.integers(0, 2**63), st.integers(1, 40))
@settings(max_examples=60)
def test_every_sample_of_an_epoch_comes_once_and_epochs_follow_each_other(shards, seed, batch_size):
    counts = counts_of(shards)
    epochs = 3
    slots = counts.total * epochs
    stream = [
        sample
        for step in range(-(-slots // batch_size))
        for sample in samples_of_step(counts, seed, batch_size, step, np.arange(batch_size))
    ][:slots]
    assert Counter(stream) == Counter((e, s) for e in range(epochs) for s in range(counts.total))
    assert [epoch for epoch, _ in stream] == sorted(epoch for epoch, _ in stream)


@given(shards, st.integers(0, 2**63), st.integers(0, 2**40), st.integers(1, 6))
@settings(max_examples=30)
def test_ranks_partition_the_same_global_step(shards, seed, step, rows):
    counts = counts_of(shards)
    batch_size = rows * 12
    whole = samples_of_step(counts, seed, batch_size, step, np.arange(batch_size))
    for world_size in (2, 3, 12):
        share = batch_size // world_size
        parts = [
            samples_of_step(
                counts, seed, batch_size, step, np.arange(rank * share, (rank + 1) * share)
            )
            for rank in range(world_size)
        ]
        assert [sample for part in parts for sample in part] == whole


def test_a_lane_reads_its_blocks_one_after_the_other() -> None:
    counts = counts_of([[50, 60, 70]] * 8)
    for row in range(4):
        blocks = []
        for step in range(counts.total // 4):
            _, positions = Slots(BatchSizes.constant(4), counts.total).locate(step, np.array([row]))
            blocks.append(EpochOrder(counts, 5, 0).span(int(positions[0])).block)
        changes = sum(a != b for a, b in itertools.pairwise(blocks))
        assert changes == len(set(blocks)) - 1 <= 8


def test_epochs_and_seeds_differ() -> None:
    counts = counts_of([[9, 9], [9]] * 5)
    rows = np.arange(counts.total)
    first = samples_of_step(counts, 1, counts.total, 0, rows)
    second = samples_of_step(counts, 1, counts.total, 1, rows)
    other = samples_of_step(counts, 2, counts.total, 0, rows)
    assert [s for _, s in first] != [s for _, s in second]
    assert first != other
    assert samples_of_step(counts, 1 + 2**32, counts.total, 0, rows) != first


def shuffles(counts: SequenceCounts, seed: int, epoch: int) -> tuple[list[list[int]], ...]:
    """An epoch's order of the shards, of the blocks in each, and of the sequences in each block.

    All shards must have as many blocks as there are shards, and all blocks as many sequences.
    """
    order, size = EpochOrder(counts, seed, epoch), len(counts.per_shard)
    spans = [order.span(position) for position in range(0, counts.total, size)]
    blocks = [divmod(span.block, size) for span in spans]
    return (
        [[shard for shard, _ in blocks[::size]]],
        [[block for shard, block in blocks if shard == one] for one in range(size)],
        [
            order.within_block(span).tolist()
            for span in sorted(spans, key=lambda span: span.block)[:size]
        ],
    )


def test_shards_blocks_and_sequences_are_each_shuffled_anew_for_every_epoch_and_seed() -> None:
    size = 16
    counts = counts_of([[size] * size] * size)
    drawn = [shuffles(counts, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for level in zip(*drawn, strict=True):
        orders = [tuple(order) for orders in level for order in orders]
        assert all(sorted(order) == list(range(size)) for order in orders)
        assert len({*orders, tuple(range(size))}) == len(orders) + 1


SEEK = """
import re, sys, time
import numpy as np
from data_pipeline.order import EpochOrder, SequenceCounts
from data_pipeline.order import BatchSizes, Slots
shards, blocks = int(sys.argv[1]), int(sys.argv[2])
per_block = np.full(shards * blocks, 1000, np.uint32)
counts = SequenceCounts(
    per_block, np.full(shards, 1000 * blocks), np.arange(shards + 1) * blocks
)
def memory():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = memory()
start = time.perf_counter()
epochs, positions = Slots(BatchSizes.constant(256), counts.total).locate(1_000_000, np.arange(256))
order = EpochOrder(counts, 7, int(epochs[0]))
spans = [order.span(int(position)) for position in positions]
print(time.perf_counter() - start, memory() - before)
"""


def test_the_order_of_a_million_shards_takes_little_memory() -> None:
    out = subprocess.run(
        [sys.executable, "-c", SEEK, "1000000", "64"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    _, kilobytes = map(float, out.stdout.split())
    assert kilobytes < 300_000


def test_the_order_never_changes_between_versions() -> None:
    """If any of these numbers changes, running jobs can no longer resume."""
    assert scalar_key(1, 2, 3) == 15020427595393229491
    assert permutation(42, 8).tolist() == [3, 2, 5, 1, 4, 0, 7, 6]
    keys = array_keys(5, np.array([1, 2]), np.array([3, 2**40]))
    assert random_uint32(keys, np.array([0, 7])).tolist() == [
        [3613504034, 1972316908],
        [1219079486, 3314475086],
    ]


def test_which_sample_a_row_reads_never_changes_between_versions() -> None:
    """If any of these numbers changes, running jobs can no longer resume."""
    counts = counts_of([[2, 3], [1, 0, 2], [4]])
    stream = [one for step in range(5) for one in samples_of_step(counts, 7, 5, step, np.arange(5))]
    assert [sample for _, sample in stream[:12]] == [2, 0, 7, 11, 9, 3, 1, 5, 10, 8, 4, 6]
    assert [sample for _, sample in stream[12:24]] == [5, 3, 1, 9, 11, 7, 4, 0, 10, 8, 6, 2]
    slots = Slots(BatchSizes.of({0: 3, 2: 5}), 12)  # the batch grows inside the first epoch
    positions = [slots.locate(step, np.arange(5))[1].tolist() for step in (2, 3)]
    assert positions == [[2, 6, 7, 10, 11], [3, 0, 3, 6, 8]]


def test_words_are_uniform_and_independent() -> None:
    keys = array_keys(9, np.arange(2000))
    bits = random_uint32(keys, np.arange(128)).view(np.uint8)
    histogram = np.bincount(bits.ravel(), minlength=256)
    chi_square = ((histogram - histogram.mean()) ** 2 / histogram.mean()).sum()
    assert chi_square < 350  # 255 degrees of freedom: mean 255, deviation 23
    fractions = random_uint32(keys, np.arange(128)) / 2.0**32
    rows, columns = np.corrcoef(fractions), np.corrcoef(fractions.T)
    assert np.abs(columns - np.eye(128)).max() < 5.5 / 2000**0.5
    assert np.abs(rows - np.eye(2000)).max() < 6.5 / 128**0.5
