"""The results of a suite: the models' scores, and how much of the reference's each retains."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.evaluation.minimal_pairs import CHANCE, PairScores
from trainer.run_folder.run_files import columns_of, primary_of
from trainer.scoring.column import ACCURACY, Column

FINE_TUNED = "teacher"  # the learner of a fine-tuning job


@dataclass(frozen=True)
class TaskScore:
    """A model's scores on a task by seed; a seed with an undefined score is left out.

    others: every score of the task, by column: the primary, secondary ones and those on its test
        file. pairs: on minimal pairs, the score on each phenomenon and paradigm; None for tasks.
    """

    column: Column
    by_seed: Mapping[int, float]
    examples_per_second: float | None = None
    pairs: PairScores | None = None
    others: Mapping[Column, Mapping[int, float]] = field(default_factory=dict)
    steps: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # by seed: taken, skipped

    @property
    def all_scores(self) -> list[TaskScore]:
        """A score for each column of `others`, the primary one among them."""
        return [TaskScore(column, by_seed) for column, by_seed in self.others.items()]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds."""
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over the seeds, where there are several."""
        values = list(self.by_seed.values())
        return statistics.stdev(values) if len(values) > 1 else None

    def retention(self, reference: TaskScore) -> float | None:
        """The fraction of the reference's score that is retained; None where either is missing."""
        if self.mean is None or reference.mean is None:
            return None
        return self.column.retention(self.mean, reference.mean)


@dataclass
class ModelResults:
    """The results of one model in a suite; an untrained model has none on minimal pairs."""

    folder: str
    parameters: int = 0
    tasks: dict[str, TaskScore] = field(default_factory=dict)

    @property
    def examples_per_second(self) -> float | None:
        """Throughput over all fine-tuned tasks, each with equally many examples."""
        speeds = [
            score.examples_per_second for score in self.tasks.values() if score.examples_per_second
        ]
        return statistics.harmonic_mean(speeds) if speeds else None

    @property
    def mean(self) -> float | None:
        """The mean over the tasks whose score is better when higher, as of `task_mean`.

        Minimal pairs are not among them, and None where a score is undefined: the means of two
        models are then over the same tasks.
        """
        tasks = self._fine_tuned.values()
        return _mean([score.mean for score in tasks if score.column.higher_is_better])

    def retention(self, reference: ModelResults) -> float | None:
        """The retention of the reference's score, averaged over the tasks in which it has one."""
        known = (name for name, score in reference._fine_tuned.items() if score.retention(score))
        return _mean([self.tasks[name].retention(reference.tasks[name]) for name in known])

    @property
    def _fine_tuned(self) -> dict[str, TaskScore]:
        return {name: score for name, score in self.tasks.items() if score.pairs is None}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None where there is no value, or one is undefined."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def task_score(evaluations: Mapping[int, Mapping[str, Any]]) -> TaskScore:
    """The primary metric of one task's runs, from their ``evaluation.json`` by seed."""
    column = primary_of(next(iter(evaluations.values())))
    learners = {seed: facts["learners"][FINE_TUNED] for seed, facts in evaluations.items()}
    others = {
        other: {seed: facts[other.name] for seed, facts in learners.items() if _has(facts, other)}
        for other in columns_of(next(iter(evaluations.values())))
    }
    speeds = [facts["sequences_per_second"] for facts in learners.values()]
    return TaskScore(
        column,
        others[column],
        statistics.median(speeds),
        others=others,
        steps={seed: _steps(facts) for seed, facts in learners.items()},
    )


def _has(facts: Mapping[str, Any], column: Column) -> bool:
    return facts.get(column.name) is not None


def _steps(facts: Mapping[str, Any]) -> dict[str, int]:
    """The steps that a learner took and skipped."""
    return {kind: facts.get(f"steps_{kind}", 0) for kind in ("taken", "skipped")}


def pair_score(pairs: PairScores) -> TaskScore:
    """The score on minimal pairs, which has no seed."""
    return TaskScore(ACCURACY, {0: pairs.accuracy}, pairs=pairs)


def to_json(models: Mapping[str, ModelResults]) -> dict[str, Any]:
    """The content of ``suite.json``; the first model is the reference."""
    reference = next(iter(models.values()))
    return {
        name: {
            "folder": model.folder,
            "parameters": model.parameters,
            "mean": model.mean,
            "retention": model.retention(reference),
            "examples_per_second": model.examples_per_second,
            "tasks": {
                task: _task_json(score, reference.tasks[task])
                for task, score in model.tasks.items()
            },
        }
        for name, model in models.items()
    }


def _task_json(score: TaskScore, reference: TaskScore) -> dict[str, Any]:
    facts = {
        "metric": score.column.name,
        "mean": score.mean,
        "deviation": score.deviation,
        "by_seed": dict(score.by_seed),
        "retention": score.retention(reference),
        "examples_per_second": score.examples_per_second,
        "steps": {str(seed): dict(counts) for seed, counts in score.steps.items()},
    }
    if score.pairs is not None:
        return {**facts, **dataclasses.asdict(score.pairs), "chance": CHANCE}
    scores = {
        part.column.name: {
            "heading": part.column.heading,
            "mean": part.mean,
            "deviation": part.deviation,
            "by_seed": dict(part.by_seed),
        }
        for part in score.all_scores
    }
    return {**facts, "scores": scores}
