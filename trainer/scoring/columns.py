"""Columns: the scores that metrics report, by name and format; without torch, for reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Prefixes of columns: the score on a task's test file, that of a learner's averaged weights, and
# that of next tokens in a job that also masks.
ON_TEST, OF_AVERAGE, OF_NEXT_TOKENS = "test_", "average_", "next_token_"
SHARE, NUMBER = "share", "number"  # the format of a score: 0.1234 as 12.3%, or as 0.123


@dataclass(frozen=True)
class Column:
    """A score that a metric reports, by its name in ``metrics.jsonl`` and in configs."""

    name: str
    heading: str  # in tables
    form: str = SHARE
    higher_is_better: bool = True

    def written(self, score: float) -> str:
        """0.1234 as 12.3%, or as 0.123."""
        return f"{score:.1%}" if self.form == SHARE else f"{score:.3f}"

    def retention(self, score: float, reference: float) -> float | None:
        """The fraction of the teacher's `reference` that a student retains; None if undefined."""
        part, base = (score, reference) if self.higher_is_better else (reference, score)
        return part / base if base > 0 else None

    def prefixed(self, prefix: str) -> Column:
        """The column of the same score on a test file, or of averaged weights."""
        heading = f"{prefix.rstrip('_')} {self.heading}"
        return replace(self, name=f"{prefix}{self.name}", heading=heading)


LOSS = Column("loss", "loss", NUMBER, higher_is_better=False)
ACCURACY = Column("accuracy", "accuracy")
PAIR_ACCURACY = Column("pair_accuracy", "pairs")
TASK_MEAN = Column("task_mean", "mean")
