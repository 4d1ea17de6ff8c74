"""Studies: one question asked of several jobs, each run with several seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from configs.rules import Doc
from configs.section import Section

KIND = "study"


@dataclass
class ArmConfig(Section):
    """One arm of a study: a job, and the learners of it that the table shows."""

    job: Annotated[
        dict[str, Any],
        Doc("Keys of a job over those that all arms share; `$seed` and `$runs` are filled in."),
    ] = field(default_factory=dict)
    learners: Annotated[
        list[str], Doc("The learners with a row in the table: `teacher`, or a student's name.")
    ] = field(default_factory=lambda: ["teacher"])


@dataclass
class StudyConfig(Section):
    """A question, the job that all arms share, and the scores of the table."""

    question: Annotated[str, Doc("What the study asks; printed above its table.")]
    job: Annotated[dict[str, Any], Doc("Keys of a job that all arms share.")]
    arms: Annotated[dict[str, ArmConfig], Doc("The arms by name; the first is the reference.")]
    seeds: Annotated[list[int], Doc("Every arm runs once with each of these as its `seed`.")]
    scores: Annotated[
        list[str],
        Doc("Columns of the table, as in `evaluation.json`; differences are of the first."),
    ] = field(default_factory=lambda: ["accuracy", "loss"])
