"""The learners of a run side by side, for a terminal."""

import textwrap
from typing import Any

from configs.tables import as_text, plain_table
from data_pipeline import MASKED
from trainer.learner_names import TEACHER, plain_name
from trainer.report import elements
from trainer.run_folder.run_files import columns_of
from trainer.scoring.columns import Column

SHARES, SPEED = ("retention", "agreement"), ("tokens/s", "ms/seq", "steps")
LEGEND_WIDTH = 96


def student_table(evaluation: dict[str, Any]) -> str:
    """The results in ``evaluation.json`` as plain text, one line for each learner.

    A teacher alone has no columns that compare it. Of text, the last line is the unigram
    baseline, which every learner has to beat.
    """
    learners, columns = evaluation["learners"], columns_of(evaluation)
    headings = [column.heading for column in columns]
    shares = SHARES if learners.keys() - {TEACHER} else ()
    table = plain_table("learner", "parameters", *headings, *shares, *SPEED)
    exported = any("export" in facts for facts in learners.values())
    if exported:
        table.add_column("exported to")
    for name, facts in learners.items():
        places = [facts.get("export", "")] if exported else []
        table.add_row(*_cells(name, evaluation, bool(shares)), *places)
    unigram = evaluation["unigram"]
    if unigram:
        table.add_row("(unigram)", "", *(elements.score_of(unigram, column) for column in columns))
    notes = _OF_TEXT if unigram else _OF_A_TASK, _OF_SHARES if shares else "", _OF_ALL
    return f"{as_text(table)}\n\n{textwrap.fill(''.join(notes), LEGEND_WIDTH)}"


def model_table(results: dict[str, Any]) -> str:
    """The scores of a finished model on a labelled file as plain text, and those by class."""
    columns = [Column(**column) for column in results["columns"]]
    table = plain_table("model", "parameters", *(column.heading for column in columns))
    scores = [(results["scores"][column.name], column) for column in columns]
    table.add_row(
        results["model"],
        elements.short(results["parameters"]),
        *("undefined" if score is None else column.written(score) for score, column in scores),
    )
    parts = [as_text(table)]
    if by_name := (results["breakdown"] or {}).get("by_class"):
        by_class = plain_table("class", "examples", "precision", "recall", "F1")
        for name, scores_of_class in by_name.items():
            shares = (
                elements.percent(scores_of_class[key]) for key in ("precision", "recall", "f1")
            )
            by_class.add_row(name, f"{scores_of_class['count']:,}", *shares)
        parts.append(as_text(by_class))
    task = "translation" if results["head"] == MASKED else results["head"]
    return "\n\n".join([*parts, f"scores: of {task}, on {results['file']}"])


_OF_TEXT = (
    "loss and accuracy: of masked tokens in held-out text; pairs: share of pairs of segments told "
    "right; "
)
_OF_A_TASK = "scores: on the validation examples; those that begin with test: on data.test; "
_OF_SHARES = (
    "agreement: share of tokens with the same first choice as the teacher; "
    f"retention: share of the teacher's primary metric, {elements.NO_RETENTION}; "
)
_OF_ALL = (
    "not trained: no term of its objective has trained the head that predicts it; "
    "parameters: without the heads; tokens/s: of the encoder alone, on this machine; ms/seq: the "
    "same for a single sequence; steps: those that changed its weights, up to its checkpoint"
)


def _cells(name: str, evaluation: dict[str, Any], compares: bool) -> list[str]:
    facts = evaluation["learners"][name]
    retention, agreement = elements.retention_of(name, evaluation), facts["agreement"]
    shares = [
        "" if retention is None else elements.percent(retention),
        "" if agreement is None else elements.percent(agreement["top_1"]),
    ]
    return [
        plain_name(name),
        elements.short(facts["parameters"]),
        *(elements.score_of(facts, column) for column in columns_of(evaluation)),
        *(shares if compares else []),
        elements.short(facts["tokens_per_second"]),
        elements.short(1000 * facts["seconds_per_sequence"]),
        elements.steps_of(facts),
    ]
