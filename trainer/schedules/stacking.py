"""Progressive stacking: a teacher's layers are doubled while it trains.

Gong et al., "Efficient Training of BERT by Progressively Stacking", ICML 2019: layer i of L becomes
layers i and i + L, and the optimizer is reset. `teacher.model` is the final size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import COUNT, Ascending, Doc, Unit
from configs.section import Refusal, Section
from model import Ability, ModelConfig
from trainer.objectives.layers import at_depth


@dataclass
class StackingConfig(Section):
    """Progressive stacking: a teacher begins with few layers, which are then doubled."""

    steps: Annotated[
        list[int],
        COUNT,
        Ascending(),
        Unit("steps"),
        Doc(
            "The job's steps before which the layers double; empty: the teacher has its final size."
        ),
    ] = field(default_factory=list)

    def conflicts_with(self, model: ModelConfig) -> Iterator[Refusal]:
        """Why the final `model` cannot be reached by doubling."""
        times = 2 ** len(self.steps)
        if model.layers % times:
            yield "stacking.steps", f"{model.layers} layers are not {times} times a smaller number"
        if self.steps and (why := model.cannot(Ability.GROW)):
            yield "stacking.steps", why

    def layers_at(self, step: int, final_layers: int) -> int:
        """The teacher's number of layers at `step`, from 0."""
        return final_layers >> sum(growth > step for growth in self.steps)


def layers_of_the_moment(layers: Sequence[int], final_layers: int, now: int) -> list[int]:
    """Layers of the final teacher, mapped to the same relative depths of one with `now` layers.

    All layers are counted from 0.
    """
    numbers = at_depth(dict(enumerate(layer + 1 for layer in layers)), final_layers, now)
    return [number - 1 for number in numbers.values()]
