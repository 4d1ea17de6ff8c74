"""The sample that each row of each step reads while the batch grows and shrinks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import BatchSizes, BatchStream, Corpus, DataConfig, DataError, PhaseConfig
from data_pipeline.order import Slots
from tests.data_pipeline.test_stream import assert_equal, config, joined

plans = st.dictionaries(st.integers(1, 30), st.integers(1, 12), max_size=4)


@given(plans, st.integers(1, 12), st.integers(1, 60))
@settings(max_examples=100)
def test_every_position_of_an_epoch_comes_once(plan, first, total) -> None:
    sizes = BatchSizes.of({0: first} | {step: size * 2 for step, size in plan.items()})
    slots = Slots(sizes, total)
    found: list[tuple[int, int]] = []
    for step in range(60):
        epochs, positions = slots.locate(step, np.arange(sizes.at(step)))
        assert sizes.before(step) == len(found)
        found += zip(epochs.tolist(), positions.tolist(), strict=True)
    assert [epoch for epoch, _ in found] == sorted(epoch for epoch, _ in found)
    whole = len(found) // total
    expected = Counter((epoch, one) for epoch in range(whole) for one in range(total))
    assert Counter(found[: whole * total]) == expected
    assert len(set(found)) == len(found)


@given(plans, st.integers(1, 60), st.lists(st.integers(0, 60), min_size=1, max_size=6))
@settings(max_examples=100)
def test_any_step_can_be_had_at_any_time(plan, total, steps) -> None:
    sizes = BatchSizes.of({0: 4} | plan)
    used = Slots(sizes, total)
    for step in steps:
        rows = np.arange(sizes.at(step))
        for one, other in zip(
            used.locate(step, rows), Slots(sizes, total).locate(step, rows), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_lanes_continue_with_long_runs_after_a_change() -> None:
    """After a change, each row reads long runs again, so blocks are opened about as rarely."""
    sizes = BatchSizes((0, 50), (8, 24))
    slots = Slots(sizes, 10_000)
    rows = np.arange(24)
    paths = np.stack([slots.locate(step, rows)[1] for step in range(50, 400)])
    assert (np.diff(paths, axis=0) != 1).sum() <= 8  # one at the end of each old lane's rest


def test_sizes_of_a_stretch_of_steps() -> None:
    sizes = BatchSizes.of({0: 4, 10: 8, 20: 16})
    assert [sizes.at(step) for step in (0, 9, 10, 19, 20, 99)] == [4, 4, 8, 8, 16, 16]
    assert sizes.before(25) == 40 + 80 + 80
    assert sizes.between(0, 15) == BatchSizes((0, 10), (4, 8))
    assert sizes.between(15, None) == BatchSizes((0, 5), (8, 16))


@pytest.mark.parametrize("packing", ["full_sentences", "segment_pair"])
def test_a_growing_batch_is_the_same_for_every_world_size(corpus: Corpus, packing: str) -> None:
    split, data = corpus.split("train"), config(packing=packing, phases=[PhaseConfig(17, 32)])
    sizes = BatchSizes.of({0: 4, 6: 12, 11: 24, 20: 8})
    whole = BatchStream(split, data, 5, sizes)
    for step in (0, 5, 6, 10, 11, 16, 17, 19, 20, 300, 3):
        batch = whole.batch(step)
        assert len(batch.input_ids) == sizes.at(step)
        for world_size in (2, 4):
            streams = [BatchStream(split, data, 5, sizes, r, world_size) for r in range(world_size)]
            assert_equal(joined([stream.batch(step) for stream in streams]), batch)
        epochs, samples = whole.samples(step)
        np.testing.assert_array_equal(epochs, batch.epochs)
        np.testing.assert_array_equal(samples, batch.sample_ids)


def test_epochs_stay_complete_while_the_batch_grows(corpus: Corpus) -> None:
    sizes = BatchSizes.of({0: 8, 7: 16, 9: 48})
    stream = BatchStream(corpus.split("train"), config(), 3, sizes)
    total = stream.samples_per_epoch
    rows = [stream.batch(step) for step in range(90)]
    seen = [
        (epoch, sample)
        for batch in rows
        for epoch, sample in zip(batch.epochs.tolist(), batch.sample_ids.tolist(), strict=True)
    ]
    whole = len(seen) // total
    assert whole >= 2
    expected = Counter((epoch, sample) for epoch in range(whole) for sample in range(total))
    assert Counter(seen[: whole * total]) == expected


def test_every_size_must_divide(corpus: Corpus) -> None:
    sizes = BatchSizes.of({0: 4, 10: 6})
    with pytest.raises(DataError, match="6 rows cannot be split among 4 ranks"):
        BatchStream(corpus.split("train"), DataConfig(path="x"), 1, sizes, 0, 4)
