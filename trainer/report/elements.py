"""The elements of every page: numbers, names, colours, HTML, and the scales of charts.

Positions and widths are fractions of the plot. The width of words is estimated for a phone, where
they take up the largest fraction; a wider screen leaves more room between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.learner_names import TEACHER
from trainer.run_folder.run_files import RunFiles, primary_of
from trainer.scoring.columns import Column

STYLE = Path(__file__).with_name("style.css")
COLOURS = 8  # in the style sheet: --c0 to --c7
NOT_TRAINED = "not trained"
MOST_RETENTION = 2.0  # above it the teacher has hardly learned, and a percentage says nothing
NO_RETENTION = (
    f"empty above {MOST_RETENTION:.0%}, and where the teacher does not beat guessing by frequency, "
    "since such a teacher has hardly learned"
)


def short(number: float) -> str:
    """About three significant digits: 950, 1,234, 12.3k, 4.56M, 7.89B; 0.00123, 1.23e-07."""
    if not math.isfinite(number):
        return f"{number:g}"
    size = abs(number)
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= max(0.9995 * unit, 9999.5):
            return f"{_digits(number / unit)}{suffix}"
    return f"{number:,.0f}" if size >= 1000 or number == round(number) else _digits(number)


def percent(share: float) -> str:
    """0.1234 as 12.3%."""
    return f"{share:.1%}"


def score_of(facts: Mapping[str, Any], column: Column) -> str:
    """A learner's score; "not trained" for an untrained head; empty without the head."""
    if column.name not in facts:
        return ""
    score = facts[column.name]
    return NOT_TRAINED if score is None else column.written(score)


def retention_of(name: str, evaluation: Mapping[str, Any]) -> float | None:
    """A student's retention of the teacher's score; None where a percentage would mislead."""
    retention = evaluation["learners"][name]["retention"]
    if name == TEACHER or retention is None or not 0 <= retention <= MOST_RETENTION:
        return None
    return float(retention) if _has_learned(evaluation) else None


def _has_learned(evaluation: Mapping[str, Any]) -> bool:
    """Whether the teacher beats guessing by frequency; true where no such guess is scored."""
    primary, learners = primary_of(evaluation), evaluation["learners"]
    teacher = evaluation.get("teacher_score", learners.get(TEACHER, {}).get(primary.name))
    guess = _most_frequent(next(iter(learners.values())), primary)
    baseline = evaluation["unigram"].get(primary.name, guess)
    if teacher is None or baseline is None:
        return True
    return bool(teacher > baseline if primary.higher_is_better else teacher < baseline)


def _most_frequent(facts: Mapping[str, Any], primary: Column) -> float | None:
    """The accuracy of always choosing a task's most frequent label; None of any other score."""
    head = primary.name.removesuffix("_accuracy")
    counts = [*map(sum, facts.get("breakdown", {}).get(head, {}).get("confusion", []))]
    return max(counts) / sum(counts) if any(counts) else None


def steps_of(facts: Mapping[str, Any]) -> str:
    """The steps that a learner took, and skipped: 990 + 10 skipped; empty of a frozen teacher."""
    if "steps_taken" not in facts:
        return ""
    skipped = facts["steps_skipped"]
    return f"{facts['steps_taken']:,}" + (f" + {skipped:,} skipped" if skipped else "")


def _digits(number: float) -> str:
    decimals = max(0, 2 - math.floor(math.log10(abs(number))))
    if decimals > 6:
        return f"{number:.2e}"
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def colour(run: RunFiles, learner: str) -> int:
    """The number of a learner's colour, the same on the whole page."""
    return run.learners.index(learner) % COLOURS


def html_row(cells: Iterable[str]) -> str:
    """A row of a table, from the text of its cells."""
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def html_table(headings: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    """A table that scrolls on a narrow screen; `rows` are its <tr>s, `kind` is its class."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def document(title: str, body: str, *, head: str = "", style: str = "", script: str = "") -> str:
    """A page: `body` is what stands in its main part; `head`, `style` and `script` are added."""
    scripts = f"\n<script>\n{script}</script>" if script else ""
    styles = STYLE.read_text(encoding="utf-8") + style
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{head}<title>{escape(title)}</title><style>\n{styles}</style></head>\n"
        f"<body><main>{body}</main>{scripts}</body></html>\n"
    )


Floats = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Floats)

MOST_POINTS = 400  # a curve on a wide screen cannot show more


@dataclass(frozen=True)
class Scale:
    """Maps `start`..`end` to 0..1, the part of the chart's width or height."""

    start: float
    end: float

    def __call__(self, value: Numbers) -> Numbers:
        """The place of a number, or those of an array's."""
        return (value - self.start) / (self.end - self.start)


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
