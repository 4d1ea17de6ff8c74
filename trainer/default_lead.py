"""Who waits for the teacher by default: a student that begins together with an untrained one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from configs import ConfigError
from configs.typed import convert
from trainer.admission_config import StartConfig
from trainer.job_tree import with_learners
from trainer.learner_config import TRANSFERS, InitConfig
from trainer.objectives.objective_config import TEACHER_SOURCES, ObjectiveConfig

Kind = TypeVar("Kind")
MIN_LEAD = 0.25  # nats; docs/studies/listening.md
# Which recipe the study is about. Terms between layers help a student from the first step on, and
# disturb it where they set in later.
LABELS, PREDICTIONS = "mlm", {"soft_kl", "soft_cross_entropy"}
# Whoever has one of these says itself when it learns from whom.
_CHOSEN = ("min_lead", *TRANSFERS)


def with_leads(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A job's YAML tree with ``min_lead`` for students that would harm themselves without it.

    They begin with the job, neither as a copy of the teacher's layers nor beside a teacher that
    begins with trained weights, and learn masked words both from labels, as it does, and from its
    predictions, but nothing else of it.
    """
    teacher = tree.get("teacher")

    def with_lead(key: str, learner: dict[str, Any]) -> dict[str, Any]:
        is_student = key.startswith("students.") and learner.keys().isdisjoint(_CHOSEN)
        if is_student and isinstance(teacher, dict):
            with suppress(ConfigError):  # the loader says so, with its key
                if _waits(learner, teacher):
                    return {**learner, "min_lead": MIN_LEAD}
        return learner

    return with_learners(tree, with_lead)


def _waits(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> bool:
    start = _section(student, "start", StartConfig)
    init, its_init = (_section(one, "init", InitConfig) for one in (student, teacher))
    if start.step or start.fraction or start.teacher or init.teacher_layers:
        return False
    if its_init.weights is not None:
        return False
    own, its = (_section(one, "objective", ObjectiveConfig) for one in (student, teacher))
    reading = {name for name, term in own.terms().items() if term.source in TEACHER_SOURCES}
    in_common = own.label_terms() & its.label_terms()
    return bool(reading) and reading <= PREDICTIONS and LABELS in in_common


def _section(learner: Mapping[str, Any], key: str, kind: type[Kind]) -> Kind:
    """A section of a learner, checked; raises ConfigError."""
    found: Kind = convert(learner.get(key), kind, key)
    return found
