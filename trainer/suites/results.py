"""What a suite of tasks says of several models: scores, and what each retains of the first's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.run_folder.run_files import primary_of
from trainer.scoring.column import ACCURACY, Column

FINE_TUNED = "teacher"  # the learner of a fine-tuning job


@dataclass(frozen=True)
class TaskScore:
    """A model's scores on a task by seed; a seed without a defined score is left out.

    by_phenomenon: the scores on minimal pairs of one phenomenon each; other tasks have none.
    """

    column: Column
    by_seed: Mapping[int, float]
    examples_per_second: float | None = None
    by_phenomenon: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over the seeds, where there are several."""
        values = list(self.by_seed.values())
        return statistics.stdev(values) if len(values) > 1 else None

    def retention(self, reference: TaskScore) -> float | None:
        """The share of the reference's score; None where either has none."""
        if self.mean is None or reference.mean is None:
            return None
        return self.column.retention(self.mean, reference.mean)


@dataclass
class ModelResults:
    """What a suite has found out of one model."""

    folder: str
    parameters: int = 0
    tasks: dict[str, TaskScore] = field(default_factory=dict)

    @property
    def examples_per_second(self) -> float | None:
        """Over all fine-tuned tasks: of as many examples of each."""
        speeds = [one.examples_per_second for one in self.tasks.values() if one.examples_per_second]
        return statistics.harmonic_mean(speeds) if speeds else None

    @property
    def mean(self) -> float | None:
        """The mean over the tasks with a score of which more is better."""
        found = [
            one.mean
            for one in self.tasks.values()
            if one.mean is not None and one.column.higher_is_better
        ]
        return statistics.fmean(found) if found else None

    def retention(self, reference: ModelResults) -> float | None:
        """The mean over the tasks of what it retains of the reference's score."""
        found = [score.retention(reference.tasks[name]) for name, score in self.tasks.items()]
        known = [one for one in found if one is not None]
        return statistics.fmean(known) if known else None


def task_score(evaluations: Mapping[int, Mapping[str, Any]]) -> TaskScore:
    """The primary metric of runs of one task, by seed, out of their ``evaluation.json``."""
    column = primary_of(next(iter(evaluations.values())))
    learners = {seed: one["learners"][FINE_TUNED] for seed, one in evaluations.items()}
    scores = {seed: facts.get(column.name) for seed, facts in learners.items()}
    speeds = [facts["sequences_per_second"] for facts in learners.values()]
    return TaskScore(
        column,
        {seed: score for seed, score in scores.items() if score is not None},
        statistics.median(speeds),
    )


def pair_score(accuracy: float, by_phenomenon: Mapping[str, float]) -> TaskScore:
    """The score on minimal pairs, which has no seed."""
    return TaskScore(ACCURACY, {0: accuracy}, by_phenomenon=by_phenomenon)


def to_json(models: Mapping[str, ModelResults]) -> dict[str, Any]:
    """Everything, as ``suite.json`` holds it; the first model is the reference."""
    reference = next(iter(models.values()))
    return {
        name: {
            "folder": one.folder,
            "parameters": one.parameters,
            "mean": one.mean,
            "retention": one.retention(reference),
            "examples_per_second": one.examples_per_second,
            "tasks": {
                task: _task_json(score, reference.tasks[task]) for task, score in one.tasks.items()
            },
        }
        for name, one in models.items()
    }


def _task_json(score: TaskScore, reference: TaskScore) -> dict[str, Any]:
    found = {
        "metric": score.column.name,
        "mean": score.mean,
        "deviation": score.deviation,
        "by_seed": dict(score.by_seed),
        "retention": score.retention(reference),
        "examples_per_second": score.examples_per_second,
    }
    by_phenomenon = dict(score.by_phenomenon)
    return {**found, "by_phenomenon": by_phenomenon} if by_phenomenon else found
