"""Scales and ticks of a chart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_POINTS = 400  # a curve on a wide screen cannot show more


@dataclass(frozen=True)
class Scale:
    """Maps `start`..`end` to 0..1, the part of the chart's width or height."""

    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of one number."""
        return (value - self.start) / (self.end - self.start)

    def many(self, values: Floats) -> Floats:
        """The places of an array's numbers."""
        return (values - self.start) / (self.end - self.start)


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers (1, 2 or 5 times a power of ten) from `low` to `high`."""
    assert high > low
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [round(number * step, 12) for number in range(first, last + 1)]
    raise AssertionError((low, high, most))


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between `low` and `high`, fewer over a wide range."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    wide = math.log10(high / low) > 2
    factors = (1,) if wide else (1, 2, 5)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def padded(values: Floats, *, from_zero: bool = False) -> tuple[float, float]:
    """A range that holds all finite `values` with a small margin; 0 to 1 when there are none."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    air = 0.06 * ((high - low) or abs(high) or 1.0)
    return (low if from_zero else low - air), high + air


def around_points(points: Floats, level: float | None) -> tuple[float, float, bool]:
    """A range in which shares (`points`) lie apart, and whether a reference `level` fits into it.

    It fits where it leaves the points at least half of the range.
    """
    low, high = float(points.min()), float(points.max())
    spread = (high - low) or 0.1 * abs(high) or 0.1
    fits = level is not None and low - spread <= level <= high + spread
    if level is not None and fits:
        low, high = min(low, level), max(high, level)
    air = 0.2 * spread
    # A share ends at 100%, which gets room for a dot.
    return low - air, min(high + air, max(1.0 + 0.1 * spread, high)), fits


def thin(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """At most MOST_POINTS points, each the mean of consecutive ones; the last stays as it is."""
    if len(steps) <= MOST_POINTS:
        return steps, values
    cuts = np.linspace(0, len(steps) - 1, MOST_POINTS).astype(int)
    widths = np.diff(cuts)

    def means(column: Floats) -> Floats:
        return np.append(np.add.reduceat(column[:-1], cuts[:-1]) / widths, column[-1])

    return means(steps), means(values)
