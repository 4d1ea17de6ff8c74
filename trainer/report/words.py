"""Numbers and names, formatted for reading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.learner_names import TEACHER
from trainer.scoring.column import Column


def short(number: float) -> str:
    """About three significant digits: 950, 1,234, 12.3k, 4.56M, 7.89B; 0.00123, 1.23e-07."""
    if not math.isfinite(number):
        return f"{number:g}"
    size = abs(number)
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= max(0.9995 * unit, 9999.5):
            return f"{_digits(number / unit)}{suffix}"
    return f"{number:,.0f}" if size >= 1000 or number == round(number) else _digits(number)


NOT_TRAINED = "not trained"
MOST_RETENTION = 2.0  # above it the teacher has hardly learnt, and a percentage says nothing
NO_RETENTION = f"empty above {MOST_RETENTION:.0%}, since such a teacher has hardly learnt"


def percent(share: float) -> str:
    """0.1234 as 12.3%."""
    return f"{share:.1%}"


def score_of(facts: Mapping[str, Any], column: Column) -> str:
    """A learner's score; "not trained" for an untrained head; empty without the head."""
    if column.name not in facts:
        return ""
    score = facts[column.name]
    return NOT_TRAINED if score is None else column.written(score)


def retention_of(name: str, facts: Mapping[str, Any]) -> float | None:
    """A student's retention of the teacher's score; None where a percentage would mislead."""
    retention = facts["retention"]
    if name == TEACHER or retention is None or not 0 <= retention <= MOST_RETENTION:
        return None
    return float(retention)


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
