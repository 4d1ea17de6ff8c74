"""The picture of a study, as SVG: a row for each learner of each arm, and a dot for each seed.

The score is the study's first. A stroke marks the mean of a row, and the broken line that of the
first. Rows of one learner stand together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from benchmarks.studies.results import Result
from benchmarks.studies.svg import MARGIN, WIDTH, document, label_left_of, tick_below
from benchmarks.studies.tables import current
from configs.studies import StudyConfig
from trainer.report.elements import Scale, nice_ticks, padded

# In SVG's units; GAP: between the rows of two learners, LETTER: the mean width of one.
ROW, GAP, LETTER = 20, 8, 6.8


@dataclass(frozen=True)
class Row:
    """One learner of one arm: its score with each seed, at least one."""

    learner: str
    arm: str
    values: tuple[float, ...]


def write(path: Path, study: StudyConfig, results: Sequence[Result]) -> None:
    """Draw the results of a study into a file; without results there is no file."""
    if rows := rows_of(study, results):
        path.write_text(drawn(rows, study.question, study.scores[0]), encoding="utf-8")


def rows_of(study: StudyConfig, results: Sequence[Result]) -> list[Row]:
    """The rows that have results, those of one learner together, otherwise as in the study."""
    score, rows = study.scores[0], list[Row]()
    for name, arm in study.arms.items():
        runs = current(study, name, results)
        for learner in arm.rows:
            scores = [run.scores.get(learner, {}).get(score) for run in runs]
            if values := tuple(value for value in scores if value is not None):
                rows.append(Row(learner, name, values))
    order = [*dict.fromkeys(row.learner for row in rows)]
    return sorted(rows, key=lambda row: order.index(row.learner))


def drawn(rows: Sequence[Row], title: str, score: str) -> str:
    """The SVG of at least one row."""
    alone = len({row.learner for row in rows}) == 1
    names = [row.arm if alone else f"{row.learner}, {row.arm}" for row in rows]
    left = MARGIN + LETTER * max(map(len, names))
    low, high = padded(np.array([value for row in rows for value in row.values]))
    scale, heights = Scale(low, high), _heights(rows)
    bottom = heights[-1] + ROW // 2

    def x(value: float) -> float:
        return round(left + (WIDTH - MARGIN - left) * scale(value), 1)

    parts = [tick_below(x(tick), ROW, bottom, tick) for tick in nice_ticks(low, high)]
    first = x(statistics.mean(rows[0].values))
    parts.append(f'<path class="first" d="M{first} {ROW}V{bottom}"/>')
    for row, name, y in zip(rows, names, heights, strict=True):
        parts.append(label_left_of(left, y, name))
        parts += _marks([x(value) for value in row.values], x(statistics.mean(row.values)), y)
    parts.append(f'<text x="{left:.0f}" y="14">{escape(score)}</text>')
    return document(title, bottom + 2 * ROW, parts)


def _heights(rows: Sequence[Row]) -> list[int]:
    """Where the middle of each row is."""
    changes = [0, *(int(row.learner != above.learner) for above, row in pairwise(rows))]
    moved = accumulate(changes)
    return [ROW * number + ROW // 2 + GAP * gaps for number, gaps in enumerate(moved, start=1)]


def _marks(dots: Sequence[float], mean: float, y: int) -> Iterator[str]:
    """A row's dots and its mean."""
    yield from (f'<circle class="dot" cx="{x}" cy="{y}" r="4.5"/>' for x in dots)
    yield f'<path class="mean" d="M{mean} {y - 7}v14"/>'
