"""The part of the report about classes: scores by class, confusion matrices, wrong examples."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from trainer.report.colours import colour
from trainer.report.words import percent, plain_name
from trainer.run_folder.run_files import RunFiles

MOST_CLASSES = 30  # in a matrix
DEEPEST = 60  # per cent of its colour that a cell gets, so that its number can be read

Breakdown = Mapping[str, Any]  # of a head of a learner, as in ``evaluation.json``


def breakdowns_section(run: RunFiles) -> str:
    """What each task's head gets right and wrong on the validation examples; empty without any."""
    learners = run.evaluation["learners"] if run.evaluation else {}
    heads: dict[str, dict[str, Breakdown]] = {}
    for name, facts in learners.items():
        for head, breakdown in facts.get("breakdown", {}).items():
            heads.setdefault(head, {})[name] = breakdown
    return "".join(_head(run, head, found) for head, found in heads.items())


def _head(run: RunFiles, head: str, learners: Mapping[str, Breakdown]) -> str:
    details = "".join(
        f"<details><summary>{escape(plain_name(name))}: what it takes for what</summary>"
        f"{_confusion(one, colour(run, name))}{_wrong(one)}</details>"
        for name, one in learners.items()
    )
    return (
        f"<section><h2>{escape(head)} by class</h2><p>F1 on the validation examples, and in "
        f"brackets precision and recall.</p>{_by_class(learners)}{details}</section>"
    )


def _by_class(learners: Mapping[str, Breakdown]) -> str:
    """A row for each class, in which the learners stand side by side."""
    classes = {
        name: one for learner in learners.values() for name, one in learner["by_class"].items()
    }
    headings = ["class", "examples", *map(plain_name, learners)]
    rows = [
        [
            name,
            f"{one['count']:,}",
            *(_scores(each["by_class"].get(name)) for each in learners.values()),
        ]
        for name, one in classes.items()
    ]
    return _table(headings, ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows))


def _scores(scores: Mapping[str, float] | None) -> str:
    if scores is None:
        return ""
    return f"{percent(scores['f1'])} ({percent(scores['precision'])}, {percent(scores['recall'])})"


def _confusion(breakdown: Breakdown, colour: int) -> str:
    """Rows are the right classes, columns the predicted ones; the colour is the part of the row."""
    labels, counts = breakdown["labels"], breakdown["confusion"]
    if len(labels) > MOST_CLASSES:
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
    shown = (
        f"all {count:,}" if count == len(wrong) else f"{len(wrong)} of {count:,}, drawn at random"
    )
    rows = (
        "".join(f"<td>{escape(one[key])}</td>" for key in ("text", "label", "predicted"))
        for one in wrong
    )
    table = _table(["wrong example", "right", "predicted"], rows, "wrong")
    return f"<p>Wrong examples: {shown}.</p>{table}"


def _table(headings: Any, rows: Any, kind: str = "") -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
