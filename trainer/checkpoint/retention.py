"""Which checkpoints to keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from configs.rules import COUNT, INDEX
from configs.section import Section


@dataclass(frozen=True)
class Retention(Section):
    """The last ``last`` checkpoints, every one at a multiple of ``every`` steps, the ``best`` ones.

    ``best`` counts by the metric passed to ``save``; ``highest`` says which way is better. Suspect
    checkpoints are never among the best, and push out none that are sound.
    """

    last: Annotated[int, COUNT] = 3
    every: Annotated[int | None, COUNT] = None
    best: Annotated[int, INDEX] = 0
    highest: bool = False

    def expired(
        self,
        metrics: Mapping[int, float | None],
        pinned: Collection[int],
        suspect: Collection[int] = (),
    ) -> list[int]:
        """Steps to delete, oldest first.

        Args:
            metrics: for every checkpoint, by step, its metric (None where none was measured).
            pinned: steps never to delete (the one this run was resumed from).
            suspect: steps of checkpoints that no run should go back to.
        """
        steps = sorted(metrics)
        sound = [step for step in steps if step not in suspect]
        measured = [step for step in sound if metrics[step] is not None]
        sign = -1 if self.highest else 1
        ranked = sorted(measured, key=lambda step: (sign * (metrics[step] or 0.0), step))
        keep = {*steps[-self.last :], *sound[-self.last :], *ranked[: self.best], *pinned}
        if self.every is not None:
            keep |= {step for step in steps if step % self.every == 0}
        return [step for step in steps if step not in keep]
