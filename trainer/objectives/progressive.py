"""Layer-by-layer transfer: a student learns one layer at a time before it learns to predict.

MobileBERT's progressive knowledge transfer (arXiv 2004.02984, section 3.5, in its code's form).
Everything is a pure function of the learner's own step, so a resumed learner goes on alike.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from configs.rules import COUNT, Doc, Range, Unit, positive
from configs.section import Section

_LAYER = re.compile(r"model\.encoder\.\w+\.(\d+)\.")


@dataclass
class ProgressiveConfig(Section):
    """Layer by layer first: each layer of a student learns in turn before it learns to predict.

    For `steps_per_layer` steps each, one layer after the other is compared with the teacher's: only
    the terms between layers are on, and of them only this layer. It learns at `current` times the
    peak learning rate, those before it at `earlier` times, and all else, the embeddings too, not
    at all. Afterwards only the other terms are on, everything learns, and the schedule begins.
    The optimizer starts each of these phases, the last one too, from fresh moments.
    """

    steps_per_layer: Annotated[
        int, COUNT, Unit("steps"), Doc("How long each layer is compared with the teacher's.")
    ] = 10_000
    current: Annotated[
        float, positive(1e4), Doc("Factor on the learning rate of the layer that learns.")
    ] = 3.0
    earlier: Annotated[
        float, Range(0, 1e4), Doc("Factor on the learning rate of the layers before it.")
    ] = 0.3


@dataclass(frozen=True)
class Transfer:
    """The progressive transfer of a student of so many `layers`; a `trainer.optimizers.Rates`."""

    config: ProgressiveConfig
    layers: int

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return self.layers * self.config.steps_per_layer

    def layer(self, step: int) -> int | None:
        """The layer, from 1, that is transferred at the learner's `step`; None afterwards."""
        return step // self.config.steps_per_layer + 1 if step < self.steps else None

    def begins_phase(self, step: int) -> bool:
        """Whether the learner's `step` is the first of a layer, or the first after the transfer."""
        return step % self.config.steps_per_layer == 0 and step <= self.steps

    def group(self, parameter: str) -> str:
        """A layer of the model by its number, from 1, or `rest`."""
        match = _LAYER.match(parameter)
        return str(int(match[1]) + 1) if match else "rest"

    def factor(self, group: str, step: int) -> float:
        """What the learning rate of a group is multiplied by at the learner's `step`."""
        current = self.layer(step)
        if current is None:
            return 1.0
        if group == "rest" or int(group) > current:
            return 0.0
        is_current = int(group) == current
        return self._wave(step) * (self.config.current if is_current else self.config.earlier)

    def _wave(self, step: int) -> float:
        """Up from 0 over a tenth of a layer's steps, then down from 1 to 0.9, as in the code."""
        if self.config.steps_per_layer == 1:
            return 1.0
        done = step % self.config.steps_per_layer / self.config.steps_per_layer
        return min(0.9 + 0.1 * math.sqrt(1 - done), 10 * done)
