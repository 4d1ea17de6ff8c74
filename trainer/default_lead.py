"""Who waits for the teacher by default: a student that begins together with an untrained one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs import ConfigError
from configs.typed import convert
from trainer.admission_config import StartConfig
from trainer.objectives.objective_config import HEARD, ObjectiveConfig

MIN_LEAD = 0.25  # nats; docs/studies.md, "Listening to an untrained teacher"
# Which recipe the study is about. Terms between layers help a student from the first step on, and
# disturb it where they set in later.
LABELS, PREDICTIONS = "mlm", {"soft_kl", "soft_cross_entropy"}
# Whoever has one of these says itself when it learns from whom.
_CHOSEN = ("min_lead", "progressive", "intermediate")


def fill_in_leads(tree: Mapping[str, Any]) -> None:
    """In a job's YAML tree, give ``min_lead`` to students that would harm themselves without it.

    They begin with the job, neither as a copy of the teacher's layers nor beside a teacher that
    begins with trained weights, and learn masked words both from labels, as it does, and from its
    predictions, but nothing else of it.
    """
    teacher, students = tree.get("teacher"), tree.get("students")
    if not isinstance(teacher, dict) or not isinstance(students, dict) or _knows(teacher):
        return
    for student in students.values():
        if isinstance(student, dict) and student.keys().isdisjoint(_CHOSEN):
            try:
                if _waits(student, teacher):
                    student["min_lead"] = MIN_LEAD
            except ConfigError:  # the loader says so, with its key
                continue


def _knows(teacher: Mapping[str, Any]) -> bool:
    return teacher.get("frozen") in ("true", True) or bool(_init(teacher).get("pretrained"))


def _waits(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> bool:
    start = convert(student.get("start"), StartConfig, "start")
    if start.step or start.fraction or start.teacher or _init(student).get("teacher_layers"):
        return False
    own, its = _objective(student), _objective(teacher)
    heard = {name for name, term in own.terms().items() if term.source in HEARD}
    return bool(heard) and heard <= PREDICTIONS and LABELS in own.label_terms() & its.label_terms()


def _objective(learner: Mapping[str, Any]) -> ObjectiveConfig:
    found: ObjectiveConfig = convert(learner.get("objective"), ObjectiveConfig, "objective")
    return found


def _init(learner: Mapping[str, Any]) -> Mapping[str, Any]:
    init = learner.get("init")
    return init if isinstance(init, Mapping) else {}
