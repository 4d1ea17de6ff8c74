"""Which checkpoints to keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The last ``last`` checkpoints, every one at a multiple of ``every`` steps, the ``best`` ones.

    ``best`` counts by the metric passed to ``save`` (a held-out loss: lower is better). Suspect
    checkpoints are never among the best, and push out none that are sound.
    """

    last: int = 3
    every: int | None = None
    best: int = 0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError("last: at least one checkpoint must be kept")
        if self.every is not None and self.every < 1:
            raise ValueError("every: must be a positive number of steps, or null")
        if self.best < 0:
            raise ValueError("best: must not be negative")

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
        ranked = sorted(measured, key=lambda step: (metrics[step], step))
        keep = {*steps[-self.last :], *sound[-self.last :], *ranked[: self.best], *pinned}
        if self.every is not None:
            keep |= {step for step in steps if step % self.every == 0}
        return [step for step in steps if step not in keep]
