"""The retention policy: which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from configs.rules import COUNT, INDEX
from configs.section import Section

Scores = Mapping[str, Any]  # learner -> {"metric": its name, "value": the score}


@dataclass(frozen=True)
class Ranking:
    """How the checkpoints of a learner are ranked: by its scores of this metric.

    Scores of another metric do not count: they do not compare.
    """

    learner: str
    metric: str
    highest: bool = False

    def score(self, scores: Scores) -> float | None:
        """The learner's score among those of a checkpoint; None if it has none of this metric.

        Checkpoints of old versions may not name theirs, which then counts as this one.
        """
        entry = scores.get(self.learner)
        return entry["value"] if entry and entry["metric"] in (self.metric, None) else None

    def is_better(self, score: float, than: float) -> bool:
        """Whether a score is better than another one."""
        return score > than if self.highest else score < than

    def ranked(self, scores: Mapping[int, Scores]) -> list[int]:
        """The steps of the checkpoints that have a score, the best first; of equal ones the first.

        `scores` are those of every checkpoint, by its step.
        """
        values = {step: self.score(learners) for step, learners in scores.items()}
        measured = {step: value for step, value in values.items() if value is not None}
        sign = -1 if self.highest else 1
        return sorted(measured, key=lambda step: (sign * measured[step], step))


@dataclass(frozen=True)
class Retention(Section):
    """Keeps the ``last`` checkpoints, those at multiples of ``every`` steps, and the ``best`` ones.

    The best are those of each learner among `rankings`, by the scores passed to ``save``. Suspect
    checkpoints are never among the best, and never replace sound ones among the last.
    """

    last: Annotated[int, COUNT] = 3
    every: Annotated[int | None, COUNT] = None
    best: Annotated[int, INDEX] = 0
    rankings: tuple[Ranking, ...] = field(default=())

    def scores_to_store(self, scores: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """The finite ones among the learners' scores, each with the name of its metric."""
        metrics = {ranking.learner: ranking.metric for ranking in self.rankings}
        return {
            learner: {"metric": metrics[learner], "value": score}
            for learner, score in scores.items()
            if learner in metrics and math.isfinite(score)
        }

    def expired(
        self,
        scores: Mapping[int, Scores],
        pinned: Collection[int],
        suspect: Collection[int] = (),
    ) -> list[int]:
        """Steps to delete, oldest first.

        Args:
            scores: step -> the learners' scores, of every checkpoint.
            pinned: steps never to delete, such as the one that this run resumed from.
            suspect: steps of suspect checkpoints.
        """
        steps = sorted(scores)
        sound = {step: scores[step] for step in steps if step not in suspect}
        keep = {*steps[-self.last :], *[*sound][-self.last :], *pinned}
        for ranking in self.rankings:
            keep.update(ranking.ranked(sound)[: self.best])
        if self.every is not None:
            keep |= {step for step in steps if step % self.every == 0}
        return [step for step in steps if step not in keep]
