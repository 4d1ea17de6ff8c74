"""The mean of several tasks' primary scores: the one number that GLUE has for a model.

GLUE (arXiv 1804.07461, section 3) averages the scores of its tasks, whatever their sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trainer.scoring.column import Column
from trainer.scoring.metric import Metric

TASK_MEAN = Column("task_mean", "mean")


def mean_column(metrics: Iterable[Metric[Any]], tasks: Collection[str]) -> dict[str, Column]:
    """`TASK_MEAN` by its name, if these heads have one."""
    return {TASK_MEAN.name: TASK_MEAN} if _primary_columns(metrics, tasks) else {}


def task_mean(
    scores: Mapping[str, float | None], metrics: Iterable[Metric[Any]], tasks: Collection[str]
) -> dict[str, float | None]:
    """The mean over these heads, by the name of its column; None where one is untrained.

    Empty where there is none, or a score is undefined.
    """
    names = [column.name for column in _primary_columns(metrics, tasks)]
    if not names or not all(name in scores for name in names):
        return {}
    known = [one for one in (scores[name] for name in names) if one is not None]
    return {TASK_MEAN.name: statistics.fmean(known) if len(known) == len(names) else None}


def _primary_columns(metrics: Iterable[Metric[Any]], tasks: Collection[str]) -> list[Column]:
    """Each head's primary score; none for one head alone, or if lower is better for one of them."""
    first: dict[str, Column] = {}
    for metric in metrics:
        first.setdefault(metric.head, metric.primary)
    columns = [first[task] for task in tasks if task in first]
    have_mean = len(columns) == len(tasks) > 1 and all(one.higher_is_better for one in columns)
    return columns if have_mean else []
