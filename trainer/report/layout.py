"""Scales and ticks of a chart, and places for words, so that they cover neither words nor curves.

Positions and widths are fractions of the plot. The width of words is estimated for a phone, where
they take up the largest fraction; a wider screen leaves more room between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


LETTER = 6.6 / 308  # a letter's width on a phone's plot
LINE = 16 / 260  # a line's height, on the scatter
DOT = 8 / 308, 8 / 260  # half a dot's width and height
GAP = 14 / 308  # between an object and its name
TURN = 0.5  # beyond this x, names stand to the left of their objects
MOST_ROWS = 4
LONGEST = 20  # letters of a name beside its object: half the width of a phone's plot
LONGEST_OF_DOT = 14  # beside which its score stands too


@dataclass(frozen=True)
class Box:
    """A part of the plot: from `left` to `right`, from `top` down to `bottom`."""

    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether the two boxes overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def shortened(name: str, longest: int = LONGEST) -> str:
    """A name of at most `longest` letters; the middle of a longer one is left out."""
    if len(name) <= longest:
        return name
    return f"{name[: longest - longest // 2 - 1]}…{name[-(longest // 2) :]}"


def around(x: float, y: float) -> Box:
    """The box of a dot at this position."""
    return Box(x - DOT[0], x + DOT[0], y - DOT[1], y + DOT[1])


def is_before(x: float) -> bool:
    """Whether the name of an object at `x` stands to its left."""
    return x > TURN


def beside(x: float, y: float, words: str) -> Box:
    """The box of `words` that name an object at `x`, centred at height `y`."""
    width = LETTER * len(words)
    left = x - GAP - width if is_before(x) else x + GAP
    return Box(left, left + width, y - LINE / 2, y + LINE / 2)


def free_heights(
    named: Sequence[tuple[float, float, str]], taken: Sequence[Box] = ()
) -> list[float]:
    """The height for the name of each dot (x, y, words): the dot's own, or the nearest free one.

    As long as there is room, names cover no dot, no other name and nothing in `taken`.
    """
    boxes = [*taken, *(around(x, y) for x, y, _ in named)]
    height_of = {}
    for number in sorted(range(len(named)), key=lambda number: named[number][1]):
        x, y, words = named[number]
        free = (
            height
            for height in _nearby(y)
            if not any(beside(x, height, words).meets(box) for box in boxes)
        )
        height_of[number] = next(free, y)
        boxes.append(beside(x, height_of[number], words))
    return [height_of[number] for number in range(len(named))]


def _nearby(y: float) -> Iterator[float]:
    """Heights within the plot, the nearest first."""
    for count in range(100):
        for height in {y + count * LINE / 4: None, y - count * LINE / 4: None}:
            if LINE / 2 <= height <= 1 - LINE / 2:
                yield height


def rows_of_names(named: Sequence[tuple[float, str]]) -> list[int | None]:
    """The row above the plot, counted upwards, for each name (x, words).

    None where there is no room within `MOST_ROWS`. Names that overlap are ordered so that no line
    from a name down to the plot crosses other words.
    """
    free: list[list[Box]] = [[] for _ in range(MOST_ROWS)]
    order = sorted(
        range(len(named)),
        key=lambda number: (is_before(x := named[number][0]), x if is_before(x) else -x),
    )
    row_of: dict[int, int | None] = {}
    for number in order:
        x, words = named[number]
        box = beside(x, 0.0, words)
        row_of[number] = next(
            (row for row, boxes in enumerate(free) if not any(box.meets(taken) for taken in boxes)),
            None,
        )
        if (row := row_of[number]) is not None:
            free[row].append(box)
    return [row_of[number] for number in range(len(named))]
