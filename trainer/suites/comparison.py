"""The comparison of a suite's models: one table, for a terminal and for a page."""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainer.report.page import HERE
from trainer.report.table import WIDTH
from trainer.report.words import percent, short
from trainer.suites.results import ModelResults, TaskScore

Models = Mapping[str, ModelResults]  # the first is the reference


def comparison_table(models: Models) -> str:
    """The table as plain text, a line for each model, and what its columns mean."""
    table = Table(box=None, pad_edge=False, header_style="")
    headings, *rows = _cells(models)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*lines, "", *_legend(models)])


def write_comparison(path: Path, title: str, about: str, models: Models) -> None:
    """The table as a page that needs no network."""
    headings, *rows = _cells(models)
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    folders = "".join(
        f"<li>{escape(name)}: <code>{escape(one.folder)}</code></li>"
        for name, one in models.items()
    )
    notes = "".join(f"<p>{escape(line)}</p>" for line in _legend(models))
    style = (HERE / "style.css").read_text(encoding="utf-8")
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>"
        f'<section class="results"><h2>Models</h2><div class="scroll"><table><thead><tr>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
        f"<div>{notes}</div><div><ul>{folders}</ul></div></section></main></body></html>\n",
        encoding="utf-8",
    )


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
        *(_score(one.tasks[task]) for task in reference.tasks),
        "" if one.mean is None else percent(one.mean),
        "" if retention is None else percent(retention),
        "" if one.examples_per_second is None else short(one.examples_per_second),
    ]


def _score(score: TaskScore) -> str:
    if score.mean is None:
        return "undefined"
    mean, deviation = score.column.written(score.mean), score.deviation
    return mean if deviation is None else f"{mean} ± {score.column.written(deviation)}"


def _legend(models: Models) -> list[str]:
    reference_name, reference = next(iter(models.items()))
    scores = ", ".join(f"{task} {one.column.heading}" for task, one in reference.tasks.items())
    return [
        f"Scores: {scores}; with several seeds, mean ± standard deviation.",
        f"Retention: the share of {reference_name}'s score, the mean over the tasks.",
        "Parameters: without the heads. Examples/s: of the encoder alone, on this machine.",
    ]
