"""The part of the report about tasks' mistakes: by class, by exit, as points, and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from trainer.report.chart import cloud
from trainer.report.elements import colour, html_row, html_table, percent, plain_name
from trainer.run_folder.run_files import RunFiles

MOST_CLASSES = 30  # in a matrix
DEEPEST = 60  # per cent of its colour that a cell gets, so that its number can be read

CLOUD = "The predicted number above the right one; on the dashed line both are equal"
BY_CLASS = "F1 on the validation examples, and in brackets precision and recall."
BY_EXIT = (
    "Accuracy if every example leaves after this layer, or at this speed after the first layer "
    "that is certain enough; in brackets the layers that an example passes, on average."
)

Breakdown = Mapping[str, Any]  # of a head of a learner, as in ``evaluation.json``
NOTHING: Breakdown = {
    "labels": [], "confusion": [], "by_class": {}, "by_exit": {}, "points": [], "wrong": [],
    "wrong_examples": 0, "order": "",
}  # fmt: skip


def breakdowns_section(run: RunFiles) -> str:
    """The right and wrong predictions of tasks' heads on the validation examples, if any."""
    learners = run.evaluation["learners"] if run.evaluation else {}
    heads: dict[str, dict[str, Breakdown]] = {}
    for name, facts in learners.items():
        for head, breakdown in facts.get("breakdown", {}).items():
            heads.setdefault(head, {})[name] = {**NOTHING, **breakdown}
    return "".join(_head(run, head, by_learner) for head, by_learner in heads.items())


def _head(run: RunFiles, head: str, learners: Mapping[str, Breakdown]) -> str:
    """The tables in which the learners stand side by side, then the mistakes of each."""
    plots = "".join(
        cloud(plain_name(name), CLOUD, breakdown["points"], colour(run, name))
        for name, breakdown in learners.items()
        if breakdown["points"]
    )
    details = "".join(
        f"<details><summary>{escape(plain_name(name))}: what it gets wrong</summary>"
        f"{_confusion(breakdown, colour(run, name))}{_wrong(breakdown)}</details>"
        for name, breakdown in learners.items()
        if breakdown["wrong"] or breakdown["confusion"]
    )
    tables = (
        _side_by_side(learners, "by_class", "class", BY_CLASS, _scores)
        + _side_by_side(learners, "by_exit", "leaving", BY_EXIT, _exit)
    )  # fmt: skip
    grid = f'<div class="grid">{plots}</div>' if plots else ""
    title = f"<h2>{escape(head)}: right and wrong</h2>"
    return f"<section>{title}{tables}{grid}{details}</section>"


def _side_by_side(
    learners: Mapping[str, Breakdown],
    key: str,
    heading: str,
    note: str,
    written: Callable[[Mapping[str, float]], str],
) -> str:
    """A row for each class or exit, in which the learners stand side by side."""
    rows: dict[str, Mapping[str, float]] = {}
    for learner in learners.values():
        rows = {**learner[key], **rows}
    if not rows:
        return ""
    counts = {name: f"{facts['count']:,}" for name, facts in rows.items() if "count" in facts}
    shown = {name: learner[key] for name, learner in learners.items() if learner[key]}
    cells = (
        [
            name,
            *([counts[name]] if counts else []),
            *(written(by_row[name]) if by_row.get(name) else "" for by_row in shown.values()),
        ]
        for name in rows
    )
    headings = [heading, *(["examples"] if counts else []), *map(plain_name, shown)]
    return f"<p>{note}</p>{html_table(headings, map(html_row, cells))}"


def _scores(scores: Mapping[str, float]) -> str:
    return f"{percent(scores['f1'])} ({percent(scores['precision'])}, {percent(scores['recall'])})"


def _exit(exit: Mapping[str, float]) -> str:
    return f"{percent(exit['accuracy'])} ({exit['layers']:.1f})"


def _confusion(breakdown: Breakdown, colour: int) -> str:
    """Rows are the right classes, columns the predicted ones; the colour is the part of the row."""
    labels, counts = breakdown["labels"], breakdown["confusion"]
    if not 0 < len(labels) <= MOST_CLASSES:
        return ""
    rows = (
        f"<tr><td>{escape(label)}</td>{''.join(_cell(n, sum(row), colour) for n in row)}</tr>"
        for label, row in zip(labels, counts, strict=True)
    )
    return html_table(["right \\ predicted", *labels], rows, "heads")


def _cell(count: int, total: int, colour: int) -> str:
    depth = DEEPEST * count / max(1, total)
    style = f"--c:var(--c{colour});--depth:{depth:.0f}%"
    return f'<td class="change" style="{style}">{count:,}</td>'


def _wrong(breakdown: Breakdown) -> str:
    wrong, count = breakdown["wrong"], breakdown["wrong_examples"]
    if not wrong:
        return ""
    some = f"{len(wrong)} of {count:,}, {breakdown['order'] or 'drawn at random'}"
    shown = f"all {count:,}" if count == len(wrong) else some
    keys = ("text", "label", "predicted")
    rows = (html_row(example[key] for key in keys) for example in wrong)
    table = html_table(["example", "right", "predicted"], rows, "wrong")
    return f"<p>Examples: {shown}.</p>{table}"
