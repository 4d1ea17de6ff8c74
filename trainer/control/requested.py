"""What may be asked of a job while it makes a step, by signals or by people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Requests:
    """What one rank asks for; the job does what any of its ranks asks."""

    stop: bool = False  # save, and end
    save: bool = False  # save, and go on

    def votes(self) -> list[float]:
        """One number per wish, to be added up over the ranks."""
        return [float(self.stop), float(self.save)]

    @classmethod
    def agreed(cls, votes: Sequence[float]) -> Requests:
        """What the ranks together ask for, given the sums of their `votes`."""
        return cls(*(bool(count) for count in votes))


NO_REQUESTS = Requests()
