"""Suites: the models' scores on several tasks, and the table that compares them."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from configs.tables import as_text, plain_table
from trainer.evaluation.minimal_pairs import CHANCE, PairScores
from trainer.report.chart import Level, Point, scatter
from trainer.report.elements import COLOURS, document, html_row, html_table, percent, short
from trainer.run_folder.run_files import columns_of, primary_of
from trainer.scoring.columns import ACCURACY, Column

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
        other: {
            seed: score
            for seed, facts in learners.items()
            if (score := facts.get(other.name)) is not None
        }
        for other in columns_of(next(iter(evaluations.values())))
    }
    # Runs of before tell how many sequences alone, of which an example may have several.
    speeds = [
        facts.get("examples_per_second") or facts["sequences_per_second"]
        for facts in learners.values()
    ]
    return TaskScore(
        column,
        others[column],
        statistics.median(speeds),
        others=others,
        steps={seed: _steps(facts) for seed, facts in learners.items()},
    )


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


Models = Mapping[str, ModelResults]  # the first is the reference


def comparison_table(models: Models) -> str:
    """The table as plain text, one line per model, followed by the meaning of its columns."""
    headings, *rows = _cells(models)
    table = plain_table(*headings)
    for row in rows:
        table.add_row(*row)
    scores = plain_table("task", *models)
    scores.add_column("score")
    for task, score, *cells in _all_scores(models)[1:]:
        scores.add_row(task, *cells, score)
    more = ["", "All scores:", as_text(scores)] if scores.row_count else []
    return "\n".join([as_text(table), "", *_legend(models), *more])


def write_comparison(path: Path, title: str, about: str, models: Models) -> None:
    """Write the table as a self-contained page, with one by phenomenon for minimal pairs."""
    folders = "".join(
        f"<li>{escape(name)}: <code>{escape(model.folder)}</code></li>"
        for name, model in models.items()
    )
    notes = "".join(f"<p>{escape(line)}</p>" for line in _legend(models))
    scores = _all_scores(models)
    below = f"<div>{notes}</div><div><ul>{folders}</ul></div>"
    body = (
        f"<header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>"
        f"{_section('Models', _cells(models), below)}{_pictures(models)}"
        f"{_section('All scores', scores) if scores[1:] else ''}{_pairs(models)}"
    )
    path.write_text(document(title, body), encoding="utf-8")


def _section(title: str, cells: Sequence[Sequence[str]], below: str = "") -> str:
    """A table of the page, whose first row holds the headings, and the content below it."""
    headings, *rows = cells
    table = html_table(headings, map(html_row, rows))
    return f'<section class="results"><h2>{escape(title)}</h2>{table}{below}</section>'


def _pictures(models: Models) -> str:
    """Size against the mean score, and against the accuracy on minimal pairs."""
    reference = next(iter(models.values()))
    means = {name: model.mean for name, model in models.items()}
    charts = [_picture(models, "Size against quality", "The mean of the tasks' scores", means)]
    for task, score in reference.tasks.items():
        if score.pairs is not None:
            accuracies = {
                name: model.tasks[task].mean
                for name, model in models.items()
                if task in model.tasks
            }
            note = "The accuracy on minimal pairs"
            charts.append(_picture(models, f"Size against {task}", note, accuracies, CHANCE))
    pictures = "".join(charts)
    return f'<section><div class="grid">{pictures}</div></section>' if pictures else ""


def _picture(
    models: Models,
    title: str,
    note: str,
    scores: Mapping[str, float | None],
    chance: float | None = None,
) -> str:
    """A dot for each model that has a score; empty with fewer than two."""
    points = [
        Point(name, number % COLOURS, model.parameters, score)
        for number, (name, model) in enumerate(models.items())
        if (score := scores.get(name)) is not None and model.parameters
    ]
    if len(points) < 2:
        return ""
    level = None if chance is None else Level("chance", chance)
    note = f"{note}, by parameters on a log scale"
    return scatter(title, note, points, level, "parameters", short)


def _all_scores(models: Models) -> list[list[str]]:
    """The headings, and a row for each score of each task."""
    reference = next(iter(models.values()))
    rows = [
        [
            task,
            part.column.heading,
            *(_other(model, task, part.column) for model in models.values()),
        ]
        for task, score in reference.tasks.items()
        for part in score.all_scores
    ]
    return [["task", "score", *models], *rows]


def _other(model: ModelResults, task: str, column: Column) -> str:
    by_seed = model.tasks[task].others.get(column) if task in model.tasks else None
    return "" if by_seed is None else _score(TaskScore(column, by_seed))


def _pairs(models: Models) -> str:
    """The models' accuracy by phenomenon and paradigm, for each set of minimal pairs."""
    sections = []
    for task, score in next(iter(models.values())).tasks.items():
        if score.pairs is None:
            continue
        by_model = {
            name: model.tasks[task].pairs for name, model in models.items() if task in model.tasks
        }
        scored = {name: pairs for name, pairs in by_model.items() if pairs is not None}
        sections.append(_section(f"{task} by phenomenon", _phenomenon_cells(scored)))
        sections.append(_section(f"{task} by paradigm", _paradigm_cells(scored)))
    return "".join(sections)


def _phenomenon_cells(scores: Mapping[str, PairScores]) -> list[list[str]]:
    """The headings, and a row for each phenomenon with the accuracy of each model."""
    reference = next(iter(scores.values()))
    counts = Counter[str]()
    for part in reference.by_paradigm:
        counts[part.phenomenon] += part.pairs
    rows = [
        [
            name,
            f"{counts[name]:,}",
            *(percent(pairs.by_phenomenon[name]) for pairs in scores.values()),
        ]
        for name in reference.by_phenomenon
    ]
    total = ["all", f"{reference.pairs:,}", *(percent(pairs.accuracy) for pairs in scores.values())]
    chance = ["chance", "", *(percent(CHANCE) for _ in scores)]
    return [["phenomenon", "pairs", *scores], *rows, total, chance]


def _paradigm_cells(scores: Mapping[str, PairScores]) -> list[list[str]]:
    """The headings, and a row for each paradigm with the accuracy of each model."""
    reference = next(iter(scores.values()))
    rows = [
        [
            part.paradigm,
            part.phenomenon,
            f"{part.pairs:,}",
            *(percent(pairs.by_paradigm[number].accuracy) for pairs in scores.values()),
        ]
        for number, part in enumerate(reference.by_paradigm)
    ]
    return [["paradigm", "phenomenon", "pairs", *scores], *rows]


def _cells(models: Models) -> list[list[str]]:
    """The headings, and a row for each model."""
    reference = next(iter(models.values()))
    headings = ["model", "parameters", *reference.tasks, "mean", "retention", "examples/s"]
    return [headings, *(_row(name, model, reference) for name, model in models.items())]


def _row(name: str, model: ModelResults, reference: ModelResults) -> list[str]:
    retention = None if model is reference else model.retention(reference)
    return [
        name,
        short(model.parameters),
        *(_score(model.tasks.get(task)) for task in reference.tasks),
        "" if model.mean is None else percent(model.mean),
        "" if retention is None else percent(retention),
        "" if model.examples_per_second is None else short(model.examples_per_second),
    ]


def _score(score: TaskScore | None) -> str:
    if score is None:
        return ""
    if score.mean is None:
        return "undefined"
    mean, deviation = score.column.written(score.mean), score.deviation
    shown = mean if deviation is None else f"{mean} ± {score.column.written(deviation)}"
    skipped = sum(steps["skipped"] for steps in score.steps.values())
    return f"{shown} ({skipped:,} steps skipped)" if skipped else shown


def _legend(models: Models) -> list[str]:
    reference_name, reference = next(iter(models.items()))
    scores = ", ".join(f"{task} {score.column.heading}" for task, score in reference.tasks.items())
    return [
        f"Scores: {scores}; with several seeds, mean ± standard deviation.",
        f"Retention: the share of {reference_name}'s score, the mean over the tasks in which that "
        "is above 0. Minimal pairs are in neither mean.",
        "Parameters: without the heads. Examples/s: of the encoder alone, on this machine.",
    ]
