"""Layer-by-layer transfer: a student learns one layer at a time before it learns to predict.

MobileBERT's progressive knowledge transfer (arXiv 2004.02984, section 3.5), as its code does it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from configs.rules import COUNT, Doc, Range, Unit, positive
from trainer.objectives.transfer import LAYERS, Transfer, TransferConfig

_LAYER = re.compile(r"model\.encoder\.\w+\.(\d+)\.")


@dataclass
class ProgressiveConfig(TransferConfig):
    """Train a student layer by layer before it learns to predict.

    Each layer in turn is compared with the teacher's for `steps_per_layer` steps. Meanwhile only
    the terms between layers are on, and only for this layer. The layer learns at up to `current`
    times the peak learning rate and the layers before it at up to `earlier` times; everything
    else, the embeddings included, is frozen. Within a layer's steps these rates rise from 0 over
    the first tenth, then fall to 0.9 of themselves. Afterwards only the other terms are on, all
    parameters learn and the schedule begins. Each phase, including the last, starts with fresh
    optimizer moments.
    """

    simplified: ClassVar[str] = "students learn all of their layers at once"

    steps_per_layer: Annotated[
        int, COUNT, Unit("steps"), Doc("How long each layer is compared with the teacher's.")
    ] = 10_000
    current: Annotated[
        float, positive(1e4), Doc("Factor on the learning rate of the layer that learns.")
    ] = 3.0
    earlier: Annotated[
        float, Range(0, 1e4), Doc("Factor on the learning rate of the layers before it.")
    ] = 0.3

    def build(self, layers: int) -> LayerByLayer:
        return LayerByLayer(self, layers)


@dataclass(frozen=True)
class LayerByLayer(Transfer):
    """The progressive transfer of a student with this many `layers`."""

    config: ProgressiveConfig
    layers: int
    first: ClassVar[tuple[str, ...]] = (LAYERS,)
    needs: ClassVar[str] = "terms between layers, and others for afterwards"
    each_layer: ClassVar[bool] = True

    @property
    def steps(self) -> int:
        return self.layers * self.config.steps_per_layer

    def layer(self, step: int) -> int | None:
        return step // self.config.steps_per_layer + 1 if self.lasts(step) else None

    def begins_phase(self, step: int) -> bool:
        """Whether the learner's `step` is the first of a layer, or the first after the transfer."""
        return step % self.config.steps_per_layer == 0 and step <= self.steps

    def group(self, parameter: str) -> str:
        """The number of the layer, from 1, that the parameter belongs to; `rest` for all others."""
        match = _LAYER.match(parameter)
        return str(int(match[1]) + 1) if match else "rest"

    def factor(self, group: str, step: int) -> float:
        current = self.layer(step)
        if current is None:
            return 1.0
        if group == "rest" or int(group) > current:
            return 0.0
        is_current = int(group) == current
        return self._wave(step) * (self.config.current if is_current else self.config.earlier)

    def _wave(self, step: int) -> float:
        """The factor within a layer's steps, as in the code.

        It rises linearly from 0 over the first tenth of the steps, then falls to 0.9.
        """
        if self.config.steps_per_layer == 1:
            return 1.0
        done = step % self.config.steps_per_layer / self.config.steps_per_layer
        return min(0.9 + 0.1 * math.sqrt(1 - done), 10 * done)
