"""What students ask of a teacher at a step: known before it runs, so that it runs once for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from model import Capture
from trainer.learner_names import MEAN
from trainer.objectives.objective import Objective, Targets
from trainer.teacher_outputs import union


@dataclass(frozen=True)
class Demand:
    """What the terms of all students read of one teacher.

    is_read: whether any does, by itself or in the mean of all teachers; capture: what its features
    are to hold; own_logits, mean_logits: how many students compare with its distributions, and with
    those of the mean.
    """

    is_read: bool
    capture: Capture
    own_logits: int
    mean_logits: int

    @classmethod
    def of(
        cls, teacher: str, students: Iterable[tuple[Objective, int]], targets: Targets = None
    ) -> Demand:
        """Of the teacher of this name, by the objective and the own step of each student.

        `targets` are those of the batch; None: whatever they are.
        """
        students, names = list(students), (teacher, MEAN)
        pairs = [(objective, step, name) for objective, step in students for name in names]
        return cls(
            is_read=any(objective.reads(step, name, targets) for objective, step, name in pairs),
            capture=union(
                objective.source_capture(step, targets, name) for objective, step, name in pairs
            ),
            own_logits=sum(objective.reads_logits(step, teacher) for objective, step in students),
            mean_logits=sum(objective.reads_logits(step, MEAN) for objective, step in students),
        )

    @property
    def reads_logits(self) -> bool:
        """Whether anyone needs the teacher's vocabulary projection."""
        return self.own_logits + self.mean_logits > 0
