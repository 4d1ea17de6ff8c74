"""The retention policy: which checkpoints to keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from configs.rules import COUNT, INDEX
from configs.section import Section


@dataclass(frozen=True)
class Retention(Section):
    """Keeps the ``last`` checkpoints, those at multiples of ``every`` steps, and the ``best`` ones.

    ``best`` ranks by the values passed to ``save`` of ``metric``, its name; ``highest`` says which
    end is better. Values of another metric do not count: they do not compare. Suspect checkpoints
    are never among the best, and never replace sound ones among the last.
    """

    last: Annotated[int, COUNT] = 3
    every: Annotated[int | None, COUNT] = None
    best: Annotated[int, INDEX] = 0
    highest: bool = False
    metric: str = ""

    def metric_of(self, trainer: Mapping[str, Any]) -> float | None:
        """The metric of the checkpoint with this ``trainer.json``; None if it has another or none.

        Old checkpoints do not name theirs, which then counts as this one.
        """
        value: float | None = trainer.get("metric")
        return value if trainer.get("metric_name", self.metric) == self.metric else None

    def expired(
        self,
        metrics: Mapping[int, float | None],
        pinned: Collection[int],
        suspect: Collection[int] = (),
    ) -> list[int]:
        """Steps to delete, oldest first.

        Args:
            metrics: step -> metric of every checkpoint (None if not measured).
            pinned: steps never to delete, such as the one that this run resumed from.
            suspect: steps of suspect checkpoints.
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
