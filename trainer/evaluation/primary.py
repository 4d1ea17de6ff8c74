"""The run's primary metric: what admission, retention of checkpoints, display and report read."""

from __future__ import annotations

from trainer.config import JobConfig
from trainer.scoring import scores
from trainer.scoring.column import Column


def primary_column(config: JobConfig) -> Column:
    """The column that ``evaluation.metric`` names, of the teacher's heads."""
    return scores.primary_column(config.metrics_of(config.teacher), config.evaluation.metric)
