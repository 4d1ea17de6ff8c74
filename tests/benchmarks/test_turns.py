"""Arms of a benchmark take turns, and their first rounds do not count."""

from __future__ import annotations

from itertools import count

import numpy as np

from benchmarks import turns
from benchmarks.learners import masked_batch
from data_pipeline import MASKED


def test_arms_take_turns_and_the_first_rounds_are_left_out():
    calls = count()
    found = turns.take_turns({"a": lambda: next(calls), "b": lambda: next(calls)}, 2, uncounted=1)
    assert found == {"a": [2, 4], "b": [3, 5]}


def test_seconds_are_medians_of_the_rounds_that_count():
    ticks = iter([0, 100] * turns.UNCOUNTED + [0, 1, 0, 9, 0, 2])
    assert turns.median_seconds({"a": lambda: None}, 3, lambda: next(ticks)) == {"a": 2}


def test_each_row_of_a_batch_has_as_many_masked_positions_and_their_tokens_as_labels():
    batch = masked_batch(3, 128, seed=1)
    masked = batch.targets[MASKED]
    assert masked.labels.shape == (3, 19)
    assert masked.positions is not None
    assert (np.diff(masked.positions) > 0).all()
    found = np.take_along_axis(batch.input_ids, masked.positions, axis=1)
    np.testing.assert_array_equal(found, masked.labels)
