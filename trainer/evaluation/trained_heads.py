"""Whether a learner's masked-LM head is trained; if nothing has, its scores mean nothing."""

from __future__ import annotations

import dataclasses

from trainer.learner_config import LearnerConfig
from trainer.learners.state import HeldOut
from trainer.objectives.progressive import Transfer
from trainer.objectives.step_schedule import StepSchedule
from trainer.objectives.terms.vocabulary import VocabularyTermConfig


def head_is_trained(config: LearnerConfig, own_steps: int) -> bool:
    """Whether a learner's predictions mean anything after so many steps of its own.

    A term of its objective has trained the head, or it came along with the layers below it. During
    a progressive transfer such terms are off.
    """
    if config.init.pretrained is not None or config.init.teacher_layers is not None:
        return True
    begin = 0
    if config.progressive is not None:
        begin = Transfer(config.progressive, config.model.layers).steps
    terms = config.objective.terms().values()
    weights = [term.weight for term in terms if isinstance(term, VocabularyTermConfig)]
    return any(StepSchedule.read(one, "weight").weighs_between(begin, own_steps) for one in weights)


def shown(scores: HeldOut, is_trained: bool) -> dict[str, float | None]:
    """The scores by name, those of a masked-LM head only where that is trained, else None."""
    unknown = {} if is_trained else {"loss": None, "accuracy": None}
    return {**dataclasses.asdict(scores), **unknown}
