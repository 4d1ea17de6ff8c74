"""The parts of the report about the models and their tasks' mistakes."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from trainer.learner_names import plain_name
from trainer.report.chart import Level, Point, cloud, scatter
from trainer.report.elements import (
    NO_RETENTION,
    colour,
    html_row,
    html_table,
    percent,
    retention_of,
    score_of,
    short,
    steps_of,
)
from trainer.run_folder.run_files import RunFiles, columns_of, primary_of
from trainer.scoring.columns import SHARE

SIZES_AND_SPEED = ("retention", "agreement", "tokens/s", "ms/seq", "steps", "joined at")
OF_TEXT = (
    "Loss (nats) and accuracy are for masked tokens in held-out text. Agreement is the share of "
    "tokens for which the first choice equals the teacher's. Unigram guesses by frequency. "
)
OF_A_TASK = (
    "Scores are on the validation examples, which no learner trained on; those that begin with "
    "test are on the examples in data.test. "
)
OF_ALL = (
    f"Retention is the share of the teacher's primary metric, {NO_RETENTION}. "
    "Parameters exclude the heads. "
    "tokens/s is for the encoder alone, ms/seq the same for a single sequence. Not trained: no "
    "term of the learner's objective has trained the head that predicts it."
)


def setbacks_section(run: RunFiles) -> str:
    """The students with setbacks in the newest evaluation, and those that never joined."""
    if not (lines := [*run.setbacks, *_worse_at_the_end(run), *_never_joined(run)]):
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="setbacks"><h2>Needs a look</h2><ul>{items}</ul></section>'


def _worse_at_the_end(run: RunFiles) -> list[str]:
    """Students of a finished run that are worse than the unigram baseline and not named already."""
    if run.evaluation is None:
        return []
    baseline = run.evaluation["unigram"].get("loss")
    losses = {
        name: facts.get("loss")
        for name, facts in run.evaluation["learners"].items()
        if facts.get("same_tokens", True)  # the baseline's tokens are the teacher's
    }
    return [
        f"{name} ends worse than the unigram baseline: its loss is {loss - baseline:.3f} higher"
        for name, loss in losses.items()
        if None not in (loss, baseline) and loss > baseline
        if not any(line.startswith(f"{name} is ") for line in run.setbacks)
    ]


def _never_joined(run: RunFiles) -> list[str]:
    """Students of a finished run that it never started."""
    learners = run.evaluation["learners"] if run.evaluation else run.learners
    missing = [name for name in run.learners if name not in learners]
    return [f"{name} never joined: its `start` was not reached" for name in missing]


def results_section(run: RunFiles) -> str:
    """The table of learners and the chart of size against quality; empty without results."""
    if run.evaluation is None:
        return ""
    return (
        f'<section class="results"><h2>Learners</h2>{_table(run, run.evaluation)}'
        f"{_picture(run, run.evaluation)}</section>"
    )


def _table(run: RunFiles, evaluation: dict[str, Any]) -> str:
    columns, learners = columns_of(evaluation), evaluation["learners"]
    scores = [column.heading for column in columns]
    headings = ["learner", "parameters", *scores, *SIZES_AND_SPEED]
    rows = [_row(name, evaluation, colour(run, name)) for name in learners]
    baseline = "".join(f"<td>{score_of(evaluation['unigram'], column)}</td>" for column in columns)
    exports = "".join(
        f"<li>{escape(plain_name(name) + kind)}: <code>{escape(facts[key])}</code>"
        f"{escape(', ' + facts['export_format']) if 'export_format' in facts else ''}</li>"
        for name, facts in learners.items()
        for key, kind in (("export", ""), ("export_of_average", ", averaged"))
        if key in facts
    )
    nothing = "<td></td>" * len(SIZES_AND_SPEED)
    if evaluation["unigram"]:
        rows.append(f'<tr class="unigram"><td>unigram</td><td></td>{baseline}{nothing}</tr>')
    legend = (OF_TEXT if evaluation["unigram"] else OF_A_TASK) + OF_ALL
    return (
        f"{html_table(headings, rows)}<div><p>{legend}</p>{'<p>Exports:</p>' if exports else ''}"
        f"<ul>{exports}</ul></div>"
    )


def _row(name: str, evaluation: dict[str, Any], colour: int) -> str:
    facts = evaluation["learners"][name]
    retention, agreement = retention_of(name, evaluation), facts["agreement"]
    cells = [
        short(facts["parameters"]),
        *(score_of(facts, column) for column in columns_of(evaluation)),
        "" if retention is None else _bar(retention),
        "" if agreement is None else percent(agreement["top_1"]),
        short(facts["tokens_per_second"]),
        short(1000 * facts["seconds_per_sequence"]),
        steps_of(facts),
        f"{facts['started_at']:,}",
    ]
    learner = f"<td><i></i>{escape(plain_name(name))}</td>"
    values = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr style="--c:var(--c{colour})">{learner}{values}</tr>'


def _bar(share: float) -> str:
    width = max(0.0, min(share, 1.0))
    return f'<span class="bar"><i style="width:{width:.0%}"></i></span>{percent(share)}'


def _picture(run: RunFiles, evaluation: dict[str, Any]) -> str:
    """A chart of size against the primary metric, if that is a share and any learner has it."""
    primary = primary_of(evaluation)
    points = [
        Point(plain_name(name), colour(run, name), facts["parameters"], facts[primary.name])
        for name, facts in evaluation["learners"].items()
        if facts.get(primary.name) is not None
    ]
    if primary.form != SHARE or len(points) < 2:
        return ""
    unigram = evaluation["unigram"].get(primary.name)
    return scatter(
        "Size against quality",
        f"Held-out {primary.heading}, by parameters on a log scale",
        points,
        None if unigram is None else Level("unigram", unigram),
        unit="parameters",
        form=short,
    )


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
    return f"<section>{title}{_most_frequent(learners)}{tables}{grid}{details}</section>"


def _most_frequent(learners: Mapping[str, Breakdown]) -> str:
    """How often the most frequent class alone would be right: a baseline."""
    first = next((breakdown for breakdown in learners.values() if breakdown["confusion"]), NOTHING)
    counts = [*map(sum, first["confusion"])]
    if not any(counts):
        return ""
    label, share = first["labels"][counts.index(max(counts))], max(counts) / sum(counts)
    return (
        f"<p>Always choosing {escape(label)}, the most frequent, is right in {percent(share)}.</p>"
    )


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
