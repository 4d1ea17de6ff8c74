"""A learner's objective: a weighted sum of terms, each a pure loss divided by a known count."""

from trainer.objectives.objective import Objective
from trainer.objectives.objective_config import ObjectiveConfig
from trainer.objectives.term import LossInputs, Term

__all__ = ["LossInputs", "Objective", "ObjectiveConfig", "Term"]
