"""Studies: several jobs that answer one question, each run with several seeds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from configs.rules import NOT_EMPTY, Range
from configs.section import Refusal, Section


@dataclass
class ArmConfig(Section):
    """One arm of a study: a job, and its learners that the table shows."""

    job: Annotated[
        dict[str, Any],
        "Job keys that override those shared by all arms; `$seed`, `$runs` and `$models` are "
        "replaced.",
    ] = field(default_factory=dict)
    learners: Annotated[
        list[str], "The learners with a row in the table: `teacher`, or a student's name."
    ] = field(default_factory=lambda: ["teacher"])
    task: Annotated[
        str, "The task with which its job begins; empty: the task of the study, if it has one."
    ] = ""
    speeds: Annotated[
        list[Annotated[float, Range(0.0, 1.0)]],
        "Thresholds at which examples leave a teacher with branches early. Each has a row, "
        "scored on the validation file.",
    ] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """The names of its rows: its learners, then its teacher at each of its speeds."""
        return [*self.learners, *map(at_speed, self.speeds)]


def at_speed(speed: float) -> str:
    """The name of a row of a table: the teacher whose examples leave early."""
    return f"speed {speed:g}"


@dataclass
class StudyConfig(Section):
    """A question, the job shared by all arms, and the scores in the table."""

    question: Annotated[str, "The question, printed above the table."]
    job: Annotated[dict[str, Any], "Job keys shared by all arms."]
    arms: Annotated[dict[str, ArmConfig], "The arms by name."]
    seeds: Annotated[list[int], "Every arm runs once with each of these seeds."]
    task: Annotated[
        str, "A task (a name of configs/task) with which the jobs begin; empty: they read text."
    ] = ""
    files: Annotated[
        dict[str, list[str]],
        "Files that arms name as `$runs/NAME`: the `tandem` command that makes each of them, "
        "without its --out.",
    ] = field(default_factory=dict)
    scores: Annotated[
        list[str],
        "Columns of the table, named as in `evaluation.json`, which also has retention, "
        "parameters and sequences_per_second. Differences use the first column.",
    ] = field(default_factory=lambda: ["accuracy", "loss"])
    against: Annotated[
        dict[str, str],
        "The row, as `ARM.LEARNER`, with which a learner is compared. A key is a learner's "
        "name, for all arms, or `ARM.LEARNER`, for one arm. Other learners are compared "
        "with the first row.",
    ] = field(default_factory=dict)
    minimal_pairs: Annotated[
        str | None,
        NOT_EMPTY,
        "A file of minimal pairs in the corpus's folder. The models in the table are also "
        "scored on it: the score `minimal_pairs`.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        known = self._rows()
        of_learners = {row for arm in self.arms.values() for row in arm.rows}
        for row, other in self.against.items():
            if row not in of_learners.union(known):
                yield f"against.{row}", "is no row of the table"
            if other not in known:
                yield f"against.{row}", f"{other!r} is no row; there are: {', '.join(known)}"

    def reference(self, arm: str, row: str) -> tuple[str, str]:
        """The row, as arm and name, that a row of the table is compared to."""
        rows = self._rows()
        named = self.against.get(f"{arm}.{row}") or self.against.get(row) or next(iter(rows))
        return rows[named]

    def _rows(self) -> dict[str, tuple[str, str]]:
        """Arm and name of every row of the table, by what `against` calls it."""
        arms = self.arms.items()
        return {f"{arm}.{row}": (arm, row) for arm, learners in arms for row in learners.rows}
