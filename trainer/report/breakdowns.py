"""The part of the report about tasks' mistakes: by class, by exit, as points, and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from trainer.report.chart import cloud
from trainer.report.colours import colour
from trainer.report.words import percent, plain_name
from trainer.run_folder.run_files import RunFiles

MOST_CLASSES = 30  # in a matrix
DEEPEST = 60  # per cent of its colour that a cell gets, so that its number can be read

CLOUD = "The predicted number above the right one; on the dashed line both are equal"
BY_CLASS = "F1 on the validation examples, and in brackets precision and recall."
BY_EXIT = (
    "Accuracy where every example leaves after this layer, or at this speed after the first layer "
    "that is certain enough; in brackets the layers that an example passes, on average."
)

Breakdown = Mapping[str, Any]  # of a head of a learner, as in ``evaluation.json``
NOTHING: Breakdown = {
    "labels": [], "confusion": [], "by_class": {}, "by_exit": {}, "points": [], "wrong": [],
    "wrong_examples": 0, "order": "",
}  # fmt: skip


def breakdowns_section(run: RunFiles) -> str:
    """What each task's head gets right and wrong on the validation examples; empty without any."""
    learners = run.evaluation["learners"] if run.evaluation else {}
    heads: dict[str, dict[str, Breakdown]] = {}
    for name, facts in learners.items():
        for head, breakdown in facts.get("breakdown", {}).items():
            heads.setdefault(head, {})[name] = {**NOTHING, **breakdown}
    return "".join(_head(run, head, by_learner) for head, by_learner in heads.items())


def _head(run: RunFiles, head: str, learners: Mapping[str, Breakdown]) -> str:
    """The tables in which the learners stand side by side, then the mistakes of each."""
    plots = "".join(
        cloud(plain_name(name), CLOUD, one["points"], colour(run, name))
        for name, one in learners.items()
        if one["points"]
    )
    details = "".join(
        f"<details><summary>{escape(plain_name(name))}: what it gets wrong</summary>"
        f"{_confusion(one, colour(run, name))}{_wrong(one)}</details>"
        for name, one in learners.items()
        if one["wrong"] or one["confusion"]
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
    counts = {name: f"{one['count']:,}" for name, one in rows.items() if "count" in one}
    those = [name for name, learner in learners.items() if learner[key]]
    cells = (
        [
            name,
            *([counts[name]] if counts else []),
            *(written(one) if (one := learners[of][key].get(name)) else "" for of in those),
        ]
        for name in rows
    )
    headings = [heading, *(["examples"] if counts else []), *map(plain_name, those)]
    return f"<p>{note}</p>" + _table(
        headings, ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
    )


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
        f"<td>{escape(label)}</td>{''.join(_cell(count, sum(row), colour) for count in row)}"
        for label, row in zip(labels, counts, strict=True)
    )
    return _table(["right \\ predicted", *labels], rows, "heads")


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
    rows = (
        "".join(f"<td>{escape(one[key])}</td>" for key in ("text", "label", "predicted"))
        for one in wrong
    )
    table = _table(["example", "right", "predicted"], rows, "wrong")
    return f"<p>Examples: {shown}.</p>{table}"


def _table(headings: Any, rows: Any, kind: str = "") -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
