"""What a job meets outside of the training loop: its attempt, and whoever wants something of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.checkpoint import Attempt
from trainer.config import JobConfig
from trainer.control.heartbeat import Pulse
from trainer.control.requests import CHECKPOINT, STOP, RequestBox
from trainer.control.wishes import Wishes
from trainer.measure.startup import Startup
from trainer.run_folder.folder import RunFolder
from trainer.watch.first_failure import FirstFailure
from trainer.watch.hang_watch import HangWatch


@dataclass(frozen=True)
class Surroundings:
    """Of one rank."""

    attempt: Attempt
    signalled: Callable[[], bool]  # whether this process was told to stop
    requests: RequestBox
    first_failure: FirstFailure
    pulse: Pulse
    hang_watch: HangWatch
    startup: Startup

    @classmethod
    def of(
        cls,
        config: JobConfig,
        attempt: Attempt,
        rank: int,
        signalled: Callable[[], bool],
        startup: Startup,
    ) -> Surroundings:
        """What one rank of a job meets. Pulse and hang watch are not open yet."""
        folder, first_failure = RunFolder.of(config), FirstFailure(attempt, rank)
        return cls(
            attempt,
            signalled,
            RequestBox(folder.requests, reads=rank == 0),
            first_failure,
            Pulse(attempt, rank, first_failure),
            HangWatch(folder.rank_log(rank), config.watch.hang_seconds),
            startup,
        )

    def made_a_step(self) -> None:
        """Tell whoever waits for it."""
        self.hang_watch.beat()
        self.startup.first_step_is_done()

    def wishes(self) -> Wishes:
        """What this rank knows to be asked of the job.

        Raises StaleAttempt when a newer attempt has begun.
        """
        self.pulse.check()
        asked = self.requests.look()
        return Wishes(stop=self.signalled() or STOP in asked, save=CHECKPOINT in asked)
