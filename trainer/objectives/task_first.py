"""Self-distillation in two stages: the task first, then the branches (FastBERT, arXiv 2004.02178).

The original trains the model on the task, and then its branches, from the finished model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from configs.rules import INDEX, Doc, Unit, positive
from trainer.objectives.first_stage import FirstStageConfig
from trainer.objectives.transfer import LAYERS, PREDICTIONS, STATES, Transfer


@dataclass
class TaskFirstConfig(FirstStageConfig):
    """The task first: the model learns it without its branches, which then learn alone.

    Meanwhile the branches stay as they are; afterwards everything else does. The schedule runs over
    each of the two stages, and the optimizer begins the second with fresh moments.
    """

    steps: Annotated[
        int | None,
        INDEX,
        Unit("steps"),
        Doc("How long it takes; 0: the initial weights have learnt the task."),
    ] = None
    learning_rate: Annotated[
        float | None, positive(1e2), Doc("Its peak; null: that of the optimizer.")
    ] = None


@dataclass(frozen=True)
class TaskFirst(Transfer):
    """The first of the two stages."""

    config: TaskFirstConfig
    first: ClassVar[tuple[str, ...]] = (PREDICTIONS, STATES, LAYERS)
    needs: ClassVar[str] = "a task, and branches for afterwards"
    is_scheduled: ClassVar[bool] = True

    @property
    def steps(self) -> int:
        return self.config.length

    def begins_phase(self, step: int) -> bool:
        return step == self.steps

    def group(self, parameter: str) -> str:
        is_branch = parameter.startswith("model.task_heads.") and ".branches." in parameter
        return "branches" if is_branch else "all but branches"

    def factor(self, group: str, step: int) -> float:
        return 1.0 if (group == "branches") != self.lasts(step) else 0.0

    def rate(self, peak: float) -> float:
        return self.config.learning_rate or peak
