"""The table that compares a suite's models, for a terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from trainer.report.document import document
from trainer.report.table import as_text, plain_table
from trainer.report.words import percent, short
from trainer.suites.results import ModelResults, TaskScore

Models = Mapping[str, ModelResults]  # the first is the reference


def comparison_table(models: Models) -> str:
    """The table as plain text, one line per model, followed by the meaning of its columns."""
    headings, *rows = _cells(models)
    table = plain_table(*headings)
    for row in rows:
        table.add_row(*row)
    return "\n".join([as_text(table), "", *_legend(models)])


def write_comparison(path: Path, title: str, about: str, models: Models) -> None:
    """Write the table as a self-contained page, with one by phenomenon for minimal pairs."""
    folders = "".join(
        f"<li>{escape(name)}: <code>{escape(one.folder)}</code></li>"
        for name, one in models.items()
    )
    notes = "".join(f"<p>{escape(line)}</p>" for line in _legend(models))
    below = f"<div>{notes}</div><div><ul>{folders}</ul></div>"
    body = (
        f"<header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>"
        f"{_section('Models', _cells(models), below)}{_phenomena(models)}"
    )
    path.write_text(document(title, body), encoding="utf-8")


def _section(title: str, cells: Sequence[Sequence[str]], below: str = "") -> str:
    """A table of the page, whose first row holds the headings, and the content below it."""
    headings, *rows = cells
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<section class="results"><h2>{escape(title)}</h2><div class="scroll"><table><thead>'
        f"<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}</section>"
    )


def _phenomena(models: Models) -> str:
    """The models' accuracy by phenomenon, a table for each set of minimal pairs."""
    reference = next(iter(models.values()))
    return "".join(
        _section(f"{task} by phenomenon", _phenomenon_cells(models, task))
        for task, score in reference.tasks.items()
        if score.by_phenomenon
    )


def _phenomenon_cells(models: Models, task: str) -> list[list[str]]:
    """The headings, and a row for each phenomenon with the accuracy of each model."""
    known = {name: one.tasks[task] for name, one in models.items() if task in one.tasks}
    scores = [*known.values()]
    rows = [
        [phenomenon, *(one.column.written(one.by_phenomenon[phenomenon]) for one in scores)]
        for phenomenon in scores[0].by_phenomenon
    ]
    return [["phenomenon", *known], *rows]


def _cells(models: Models) -> list[list[str]]:
    """The headings, and a row for each model."""
    reference = next(iter(models.values()))
    headings = ["model", "parameters", *reference.tasks, "mean", "retention", "examples/s"]
    return [headings, *(_row(name, one, reference) for name, one in models.items())]


def _row(name: str, one: ModelResults, reference: ModelResults) -> list[str]:
    retention = None if one is reference else one.retention(reference)
    return [
        name,
        short(one.parameters),
        *(_score(one.tasks.get(task)) for task in reference.tasks),
        "" if one.mean is None else percent(one.mean),
        "" if retention is None else percent(retention),
        "" if one.examples_per_second is None else short(one.examples_per_second),
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
    scores = ", ".join(f"{task} {one.column.heading}" for task, one in reference.tasks.items())
    return [
        f"Scores: {scores}; with several seeds, mean ± standard deviation.",
        f"Retention: the share of {reference_name}'s score, the mean over the tasks. Minimal pairs "
        "are in neither mean.",
        "Parameters: without the heads. Examples/s: of the encoder alone, on this machine.",
    ]
