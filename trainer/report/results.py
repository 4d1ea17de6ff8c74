"""The part of the report about the models: a table, and a chart of size against quality."""

from __future__ import annotations

from html import escape
from typing import Any

from trainer.report.chart import Level, Point, scatter
from trainer.report.elements import (
    NO_RETENTION,
    colour,
    html_table,
    percent,
    plain_name,
    retention_of,
    score_of,
    short,
    steps_of,
)
from trainer.run_folder.run_files import RunFiles, columns_of, primary_of
from trainer.scoring.column import SHARE

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
    """The students with setbacks in the newest evaluation."""
    if not (lines := [*run.setbacks, *_worse_at_the_end(run)]):
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
