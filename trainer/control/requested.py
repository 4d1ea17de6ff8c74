"""What a signal or a person may request of a job during a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Requests:
    """One rank's requests; the job does what any of its ranks requests."""

    stop: bool = False  # save, and end
    save: bool = False  # save, and continue

    def votes(self) -> list[float]:
        """One number per request, to be summed over the ranks."""
        return [float(self.stop), float(self.save)]

    @classmethod
    def agreed(cls, votes: Sequence[float]) -> Requests:
        """What any rank requests, given the sums of their `votes`."""
        return cls(*(bool(count) for count in votes))


NO_REQUESTS = Requests()
