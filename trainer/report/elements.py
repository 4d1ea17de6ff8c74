"""The elements of every page and table: numbers and names in words, colours, HTML, the frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from trainer.learner_names import TEACHER
from trainer.run_folder.run_files import RunFiles, primary_of
from trainer.scoring.column import Column

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
    """Whether the teacher beats the unigram baseline; true of tasks, which have none."""
    primary = primary_of(evaluation)
    teacher = evaluation["learners"].get(TEACHER, {}).get(primary.name)
    baseline = evaluation["unigram"].get(primary.name)
    if teacher is None or baseline is None:
        return True
    return bool(teacher > baseline if primary.higher_is_better else teacher < baseline)


def steps_of(facts: Mapping[str, Any]) -> str:
    """The steps that a learner took, and skipped: 990 + 10 skipped; empty of a frozen teacher."""
    if "steps_taken" not in facts:
        return ""
    skipped = facts["steps_skipped"]
    return f"{facts['steps_taken']:,}" + (f" + {skipped:,} skipped" if skipped else "")


def plain_name(learner: str) -> str:
    """``students/tiny`` as tiny; ``teacher`` as it is."""
    return learner.removeprefix("students/")


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
