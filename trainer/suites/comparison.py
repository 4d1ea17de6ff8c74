"""The table that compares a suite's models, for a terminal and as an HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from trainer.evaluation.minimal_pairs import CHANCE, PairScores
from trainer.report.chart import Level, Point, scatter
from trainer.report.elements import COLOURS, document, html_row, html_table, percent, short
from trainer.report.table import as_text, plain_table
from trainer.scoring.column import Column
from trainer.suites.results import ModelResults, TaskScore

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
        f"Retention: the share of {reference_name}'s score, the mean over the tasks. Minimal pairs "
        "are in neither mean.",
        "Parameters: without the heads. Examples/s: of the encoder alone, on this machine.",
    ]
