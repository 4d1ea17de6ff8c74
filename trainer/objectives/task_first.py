"""Self-distillation in two stages: the task first, then the branches (FastBERT, arXiv 2004.02178).

The original trains the model on the task, and then its branches, from the finished model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from configs.rules import INDEX, Doc, Unit
from trainer.objectives.first_stage import FirstStage, FirstStageConfig
from trainer.objectives.transfer import LAYERS, PREDICTIONS, STATES


@dataclass
class TaskFirstConfig(FirstStageConfig):
    """The task first: the model learns it without its branches, which then learn alone.

    Meanwhile the branches stay as they are; afterwards everything else does. The schedule runs over
    each of the two stages, and the optimizer begins the second with fresh moments.
    """

    simplified: ClassVar[str] = "the task is learnt in all steps"

    steps: Annotated[
        int | None,
        INDEX,
        Unit("steps"),
        Doc("How long it takes; 0: the initial weights have learnt the task."),
    ] = None

    from_best: Annotated[
        bool,
        Doc(
            "The branches begin beside the weights with the best evaluation.metric of the first "
            "stage, as in FastBERT's code; false: beside the last ones."
        ),
    ] = True

    def build(self, layers: int) -> TaskFirst:
        return TaskFirst(self)


@dataclass(frozen=True)
class TaskFirst(FirstStage):
    """The task is learnt by everything but the branches."""

    config: TaskFirstConfig

    first: ClassVar[tuple[str, ...]] = (PREDICTIONS, STATES, LAYERS)
    needs: ClassVar[str] = "a task, and branches for afterwards"
    is_scheduled: ClassVar[bool] = True

    @property
    def from_best(self) -> bool:
        return self.config.from_best

    def group(self, parameter: str) -> str:
        is_branch = parameter.startswith("model.task_heads.") and ".branches." in parameter
        return "branches" if is_branch else "all but branches"

    def factor(self, group: str, step: int) -> float:
        return 1.0 if (group == "branches") != self.lasts(step) else 0.0
