"""The learners of a run side by side, for a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.report.words import nats, percent, plain_name, short

SHARES_AND_SPEED = ("retention", "agreement", "tokens/s", "ms/seq")
WIDTH = 10_000  # a line is never broken: paths stay copyable


def student_table(evaluation: dict[str, Any]) -> str:
    """The results in ``evaluation.json`` as plain text, one line for each learner.

    The last line is the unigram baseline, which every learner has to beat.
    """
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("learner")
    learners = evaluation["learners"]
    pairs = any(facts.get("pair_accuracy") is not None for facts in learners.values())
    for heading in ("parameters", "loss", "accuracy", *["pairs"] * pairs, *SHARES_AND_SPEED):
        table.add_column(heading, justify="right")
    exported = any("export" in facts for facts in learners.values())
    if exported:
        table.add_column("exported to", no_wrap=True)
    for name, facts in learners.items():
        table.add_row(*_cells(name, facts, pairs), *([facts.get("export", "")] if exported else []))
    unigram = evaluation["unigram"]
    table.add_row("(unigram)", "", f"{unigram['loss']:.3f}", percent(unigram["accuracy"]))
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*lines, "", _LEGEND])


_LEGEND = (
    "loss and accuracy: of masked tokens in held-out text; pairs: share of pairs of segments told\n"
    "right; retention: share of the teacher's accuracy; agreement: same first choice as the\n"
    "teacher's;\n"
    "not trained: no term of its objective has trained what predicts tokens;\n"
    "parameters: without the heads; tokens/s: of the encoder alone, on this machine; ms/seq: the\n"
    "same for a single sequence"
)


def _cells(name: str, facts: dict[str, Any], pairs: bool) -> list[str]:
    retention, agreement, told = facts["retention"], facts["agreement"], facts.get("pair_accuracy")
    return [
        plain_name(name),
        short(facts["parameters"]),
        nats(facts["loss"]),
        percent(facts["accuracy"]),
        *([percent(told) if told is not None else ""] if pairs else []),
        "" if retention is None or name == "teacher" else percent(retention),
        "" if agreement is None else percent(agreement["top_1"]),
        short(facts["tokens_per_second"]),
        short(1000 * facts["seconds_per_sequence"]),
    ]
