"""Placement of words on a chart, so that they cover neither each other nor a curve.

Positions and widths are fractions of the plot. The width of words is estimated for a phone, where
they take up the largest fraction; a wider screen leaves more room between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def heights(named: Sequence[tuple[float, float, str]], taken: Sequence[Box] = ()) -> list[float]:
    """The height for the name of each dot (x, y, words): the dot's own, or the nearest free one.

    As long as there is room, names cover no dot, no other name and nothing in `taken`.
    """
    boxes = [*taken, *(around(x, y) for x, y, _ in named)]
    found = {}
    for number in sorted(range(len(named)), key=lambda number: named[number][1]):
        x, y, words = named[number]
        free = (
            height
            for height in _nearby(y)
            if not any(beside(x, height, words).meets(box) for box in boxes)
        )
        found[number] = next(free, y)
        boxes.append(beside(x, found[number], words))
    return [found[number] for number in range(len(named))]


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
    found: dict[int, int | None] = {}
    for number in order:
        x, words = named[number]
        box = beside(x, 0.0, words)
        found[number] = next(
            (row for row, boxes in enumerate(free) if not any(box.meets(one) for one in boxes)),
            None,
        )
        if (row := found[number]) is not None:
            free[row].append(box)
    return [found[number] for number in range(len(named))]
