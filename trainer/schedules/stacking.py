"""Progressive stacking: a teacher that doubles its layers while it trains.

Gong et al., "Efficient Training of BERT by Progressively Stacking", ICML 2019: layer i of L becomes
layers i and i + L, and the optimizer begins anew. `teacher.model` is the final size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.bounds import COUNT, require_bounds
from model import EncoderConfig
from trainer.objectives.layer_maps import at_depth


@dataclass
class StackingConfig:
    """The steps of the job before which the teacher's layers double; none: it is never smaller."""

    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse steps that are not in order."""
        require_bounds(self, steps=COUNT)
        if sorted(set(self.steps)) != list(self.steps):
            raise ValueError("steps: must be in ascending order")

    def require_fit(self, model: EncoderConfig) -> None:
        """Raise ValueError unless the final `model` can be reached by doubling."""
        times = 2 ** len(self.steps)
        if model.layers % times:
            raise ValueError(
                f"stacking.steps: {model.layers} layers are not {times} times a smaller number"
            )
        if self.steps and model.groups > 1:
            raise ValueError("stacking.steps: is for models without groups of shared layers")

    def layers_at(self, step: int, final_layers: int) -> int:
        """The teacher's layers while it makes the 0-based `step`."""
        return final_layers >> sum(growth > step for growth in self.steps)


def layers_of_the_moment(layers: Sequence[int], final_layers: int, now: int) -> list[int]:
    """0-based layers of the final teacher as those at the same relative depths of `now` layers."""
    numbers = at_depth(dict(enumerate(layer + 1 for layer in layers)), final_layers, now)
    return [number - 1 for number in numbers.values()]
