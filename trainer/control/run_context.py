"""One rank's run-time services: its attempt, requests, heartbeat and watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.checkpoint import Attempt
from trainer.config import JobConfig
from trainer.control.heartbeat import Heartbeat
from trainer.control.requested import Requests
from trainer.control.requests import CHECKPOINT, STOP, RequestBox
from trainer.measure.startup import Startup
from trainer.run_folder.folder import RunFolder
from trainer.watch.first_failure import FirstFailure
from trainer.watch.hang_watch import HangWatch


@dataclass(frozen=True)
class RunContext:
    """One rank's run-time services."""

    attempt: Attempt
    stop_requested: Callable[[], bool]  # whether this process was told to stop
    request_box: RequestBox
    first_failure: FirstFailure
    heartbeat: Heartbeat
    hang_watch: HangWatch
    startup: Startup

    @classmethod
    def of(
        cls,
        config: JobConfig,
        attempt: Attempt,
        rank: int,
        stop_requested: Callable[[], bool],
        startup: Startup,
    ) -> RunContext:
        """The services of one rank. Heartbeat and hang watch are not open yet."""
        folder, first_failure = RunFolder.of(config), FirstFailure(attempt, rank)
        hang_watch = HangWatch(folder.rank_log(rank), config.watch.hang_timeout_s)
        return cls(
            attempt,
            stop_requested,
            RequestBox(folder.requests, reads=rank == 0),
            first_failure,
            Heartbeat(attempt, rank, first_failure, hang_watch, folder.metrics),
            hang_watch,
            startup,
        )

    def opened(self, part: str) -> None:
        """Tell the hang watch and the startup clock that a part of the start is done."""
        self.hang_watch.heartbeat()
        self.startup.mark(part)

    def made_a_step(self) -> None:
        """Tell the hang watch and the startup clock that a step is done."""
        self.hang_watch.heartbeat()
        self.startup.first_step_is_done()

    def requests(self) -> Requests:
        """The requests that this rank knows of.

        Raises StaleAttempt when a newer attempt has begun.
        """
        self.heartbeat.check()
        asked = self.request_box.look()
        return Requests(stop=self.stop_requested() or STOP in asked, save=CHECKPOINT in asked)
