"""Requests that a signal or a user may make to a job during a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Requests:
    """The requests that one rank knows of; the job follows those of any rank."""

    stop: bool = False  # save, and end
    save: bool = False  # save, and continue

    def votes(self) -> list[float]:
        """One number per request, to be summed over the ranks."""
        return [float(self.stop), float(self.save)]

    @classmethod
    def agreed(cls, votes: Sequence[float]) -> Requests:
        """The requests of all ranks together, from the sums of their `votes`."""
        return cls(*(bool(count) for count in votes))


NO_REQUESTS = Requests()
