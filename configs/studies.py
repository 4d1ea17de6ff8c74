"""Studies: several jobs that answer one question, each run with several seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from configs.rules import NOT_EMPTY, Doc
from configs.section import Section

KIND = "study"


@dataclass
class ArmConfig(Section):
    """One arm of a study: a job, and its learners that the table shows."""

    job: Annotated[
        dict[str, Any],
        Doc("Job keys that override those shared by all arms; `$seed` and `$runs` are replaced."),
    ] = field(default_factory=dict)
    learners: Annotated[
        list[str], Doc("The learners with a row in the table: `teacher`, or a student's name.")
    ] = field(default_factory=lambda: ["teacher"])


@dataclass
class StudyConfig(Section):
    """A question, the job shared by all arms, and the scores in the table."""

    question: Annotated[str, Doc("The question, printed above the table.")]
    job: Annotated[dict[str, Any], Doc("Job keys shared by all arms.")]
    arms: Annotated[dict[str, ArmConfig], Doc("The arms by name; the first is the reference.")]
    seeds: Annotated[list[int], Doc("Every arm runs once with each of these seeds.")]
    scores: Annotated[
        list[str],
        Doc("Columns of the table, named as in `evaluation.json`; differences use the first."),
    ] = field(default_factory=lambda: ["accuracy", "loss"])
    minimal_pairs: Annotated[
        str | None,
        NOT_EMPTY,
        Doc(
            "A file of minimal pairs in the corpus's folder, by which the models in the table are "
            "scored too: the score `minimal_pairs`."
        ),
    ] = None
