"""Progressive stacking: a teacher that doubles its layers while it trains.

Gong et al., "Efficient Training of BERT by Progressively Stacking", ICML 2019: layer i of L becomes
layers i and i + L, and the optimizer begins anew. `teacher.model` is the final size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import COUNT, Ascending, Doc, Unit
from configs.section import Refusal, Section
from model import Ability, ModelConfig
from trainer.objectives.layer_maps import at_depth


@dataclass
class StackingConfig(Section):
    """Progressive stacking (of a teacher): it begins small, and its layers double."""

    steps: Annotated[
        list[int],
        COUNT,
        Ascending(),
        Unit("steps"),
        Doc("The job's steps before which the layers double; none: it is never smaller."),
    ] = field(default_factory=list)

    def conflicts_with(self, model: ModelConfig) -> Iterator[Refusal]:
        """Why the final `model` cannot be reached by doubling."""
        times = 2 ** len(self.steps)
        if model.layers % times:
            yield "stacking.steps", f"{model.layers} layers are not {times} times a smaller number"
        if self.steps and (why := model.cannot(Ability.GROW)):
            yield "stacking.steps", why

    def layers_at(self, step: int, final_layers: int) -> int:
        """The teacher's layers while it makes the 0-based `step`."""
        return final_layers >> sum(growth > step for growth in self.steps)


def layers_of_the_moment(layers: Sequence[int], final_layers: int, now: int) -> list[int]:
    """0-based layers of the final teacher as those at the same relative depths of `now` layers."""
    numbers = at_depth(dict(enumerate(layer + 1 for layer in layers)), final_layers, now)
    return [number - 1 for number in numbers.values()]
