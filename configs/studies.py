"""Studies: several jobs that answer one question, each run with several seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from configs.rules import NOT_EMPTY, Doc, Range
from configs.section import Section

KIND = "study"


@dataclass
class ArmConfig(Section):
    """One arm of a study: a job, and its learners that the table shows."""

    job: Annotated[
        dict[str, Any],
        Doc(
            "Job keys that override those shared by all arms; `$seed`, `$runs` and `$models` are "
            "replaced."
        ),
    ] = field(default_factory=dict)
    learners: Annotated[
        list[str], Doc("The learners with a row in the table: `teacher`, or a student's name.")
    ] = field(default_factory=lambda: ["teacher"])
    task: Annotated[
        str, Doc("The task that its job begins with; empty: that of the study, if it has one.")
    ] = ""
    speeds: Annotated[
        list[Annotated[float, Range(0.0, 1.0)]],
        Doc(
            "Of a teacher with branches: the thresholds at which examples leave early, each with a "
            "row of its own, scored on the validation file."
        ),
    ] = field(default_factory=list)


@dataclass
class StudyConfig(Section):
    """A question, the job shared by all arms, and the scores in the table."""

    question: Annotated[str, Doc("The question, printed above the table.")]
    job: Annotated[dict[str, Any], Doc("Job keys shared by all arms.")]
    arms: Annotated[dict[str, ArmConfig], Doc("The arms by name; the first is the reference.")]
    seeds: Annotated[list[int], Doc("Every arm runs once with each of these seeds.")]
    task: Annotated[
        str, Doc("A task, a name of configs/task, that the jobs begin with; empty: they read text.")
    ] = ""
    files: Annotated[
        dict[str, list[str]],
        Doc(
            "Files that arms name as `$runs/NAME`: the `tandem` command that makes each of them, "
            "without its --out."
        ),
    ] = field(default_factory=dict)
    scores: Annotated[
        list[str],
        Doc(
            "Columns of the table, named as in `evaluation.json` (so are retention, parameters and "
            "sequences_per_second); differences use the first."
        ),
    ] = field(default_factory=lambda: ["accuracy", "loss"])
    minimal_pairs: Annotated[
        str | None,
        NOT_EMPTY,
        Doc(
            "A file of minimal pairs in the corpus's folder, by which the models in the table are "
            "scored too: the score `minimal_pairs`."
        ),
    ] = None
