"""The geometry of the report's charts: ticks, thinned curves, names and their positions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.progress import counted
from trainer.report.chart import Series
from trainer.report.elements import (
    MOST_POINTS,
    around,
    beside,
    free_heights,
    log_ticks,
    nice_ticks,
    padded,
    rows_of_names,
    short,
    thin,
)


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.integers(3, 8),
)
def test_ticks_are_round_few_and_inside(low, span, most):
    ticks = nice_ticks(low, low + span, most)
    assert 1 <= len(ticks) <= most
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in ticks)
    gaps = np.diff(ticks)
    if len(gaps):
        digits = f"{gaps[0]:.3e}"
        assert digits[0] in "125"
        np.testing.assert_allclose(gaps, gaps[0], rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(4e5, 3.3e6, [5e5, 1e6, 2e6]), (1e6, 4e8, [1e6, 1e7, 1e8]), (110, 450, [200])],
)
def test_log_ticks(low, high, ticks):
    assert log_ticks(low, high) == pytest.approx(ticks)


@given(st.integers(1, 3 * MOST_POINTS))
def test_a_thinned_curve_keeps_its_ends_and_its_range(length):
    steps = np.arange(1.0, length + 1)
    values = np.sin(steps)
    fewer, means = thin(steps, values)
    assert len(fewer) == len(means) <= MOST_POINTS
    assert (np.diff(fewer) > 0).all()
    assert fewer[-1] == steps[-1]
    assert means[-1] == values[-1]
    assert np.abs(means).max() <= 1


def test_a_range_has_air_and_survives_flat_and_missing_values():
    assert padded(np.array([1.0, 3.0])) == pytest.approx((0.88, 3.12))
    assert padded(np.array([1.0, math.nan, math.inf, 3.0]), from_zero=True)[0] == 0
    for values in ([], [0.0], [5.0, 5.0], [math.nan]):
        low, high = padded(np.array(values))
        assert high > low
    assert len(Series("x", 0, np.zeros(0), np.zeros(0)).thinned().steps) == 0


shares = st.floats(0, 1)


@given(st.lists(st.tuples(shares, shares), max_size=5))
def test_labels_of_dots_overlap_nothing(places):
    """There is always room for five names beside their dots."""
    named = [(x, y, "student 25.0%") for x, y in places]
    found = free_heights(named)
    names = [beside(x, height, words) for (x, _, words), height in zip(named, found, strict=True)]
    for number, name in enumerate(names):
        assert 0 <= name.top < name.bottom <= 1
        assert not any(name.meets(around(x, y)) for x, y in places)
        assert not any(name.meets(other) for other in names[:number])


def test_a_name_with_room_stands_beside_its_dot():
    assert free_heights([(0.2, 0.3, "a"), (0.5, 0.3, "b"), (0.9, 0.7, "c")]) == [0.3, 0.3, 0.7]


@given(st.lists(shares, max_size=12))
def test_names_above_the_plot_stand_beside_each_other(places):
    rows = rows_of_names([(x, "restart 1") for x in places])
    for row in set(rows) - {None}:
        there = [x for x, own in zip(places, rows, strict=True) if own == row]
        names = [beside(x, 0.0, "restart 1") for x in there]
        for number, name in enumerate(names):
            assert not any(name.meets(other) for other in names[:number])


def test_of_names_that_overlap_the_line_of_none_crosses_another():
    assert rows_of_names([(0.1, "a joins"), (0.15, "b joins"), (0.2, "c joins")]) == [2, 1, 0]
    assert rows_of_names([(0.8, "a joins"), (0.85, "b joins")]) == [0, 1]
    assert rows_of_names([(0.1, "restart")] * 5).count(None) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (1234, "1,234"),
        (12345, "12.3k"),
        (736_000, "736k"),
        (999_999, "1M"),
        (1_873_280, "1.87M"),
        (109_482_240, "109M"),
        (2.5e12, "2.5T"),
        (0.25, "0.25"),
        (4.5678, "4.57"),
        (1e-4, "0.0001"),
        (1.234e-7, "1.23e-07"),
        (math.nan, "nan"),
        (-1500.5, "-1,500"),
    ],
)
def test_short_numbers(number, text):
    assert short(number) == text


def test_counts():
    assert (counted(1, "student"), counted(2, "student")) == ("1 student", "2 students")
