"""What students ask of a teacher at a step: known before it runs, so that it runs once for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from model import Capture
from trainer.learner_names import MEAN
from trainer.objectives.objective import Objective, Targets
from trainer.teacher_outputs import union


@dataclass(frozen=True)
class Demand:
    """What the terms of all students read of one teacher.

    is_read: whether any does, by itself or in the mean of several; capture: what its features are
    to hold; own_logits, mean_logits: how many students compare with its distributions, and with
    those of the mean.
    """

    is_read: bool
    capture: Capture
    own_logits: int
    mean_logits: int

    @classmethod
    def of(
        cls,
        teacher: str,
        heads: Collection[str],
        students: Iterable[tuple[Objective, int]],
        targets: Targets = None,
    ) -> Demand:
        """What the students ask of this teacher, by the objective and own step of each student.

        `heads` are the teacher's task heads: it has no part in the mean of others. `targets` are
        those of the batch; None: whatever they are.
        """
        students = list(students)
        own, mean = (
            union(objective.source_capture(step, targets, name) for objective, step in students)
            for name in (teacher, MEAN)
        )
        mean = dataclasses.replace(mean, heads=tuple(head for head in mean.heads if head in heads))
        mean_logits = sum(objective.reads_logits(step, MEAN) for objective, step in students)
        is_read = any(objective.reads(step, teacher, targets) for objective, step in students)
        return cls(
            is_read=is_read or mean_logits > 0 or bool(mean.heads),
            capture=union([own, mean]),
            own_logits=sum(objective.reads_logits(step, teacher) for objective, step in students),
            mean_logits=mean_logits,
        )

    @property
    def reads_logits(self) -> bool:
        """Whether anyone needs the teacher's vocabulary projection."""
        return self.own_logits + self.mean_logits > 0
