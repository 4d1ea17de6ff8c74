"""One rank's run-time services: its attempt, requests, heartbeat and watches."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.runs import HEARTBEAT_SECONDS
from trainer.checkpoint import Attempt, StaleAttempt, send_heartbeat
from trainer.config import JobConfig
from trainer.control.requests import CHECKPOINT, STOP, RequestBox, Requests
from trainer.measure.process import Startup
from trainer.run_folder.folder import RunFolder
from trainer.watch.ranks import FAILED, FirstFailure, HangWatch

# Time for this rank to notice by itself that another one has failed. With gloo it does so at once;
# with NCCL it may wait in a kernel forever.
GRACE_SECONDS = 10.0

_log = logging.getLogger(__name__)


class Heartbeat:
    """While it is open, rank 0 sends heartbeats and learns when a newer attempt has begun.

    It touches `metrics` when the hang watch has heard of progress, for those who look whether the
    run has stalled. It ends a rank that does not notice by itself that another has failed.
    """

    def __init__(
        self,
        attempt: Attempt,
        rank: int,
        first_failure: FirstFailure,
        hang_watch: HangWatch,
        metrics: Path,
    ) -> None:
        self._attempt, self._leads = attempt, rank == 0
        self._first_failure = first_failure
        self._hang_watch, self._metrics = hang_watch, metrics
        self._heard = 0  # heartbeats of the hang watch that `metrics` shows
        self._replaced: StaleAttempt | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def check(self) -> None:
        """Raise StaleAttempt on rank 0 once a newer attempt has begun."""
        if self._replaced is not None:
            raise self._replaced

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._closed.set()
        if self._leads:
            with contextlib.suppress(OSError):  # a full disk: the run will seem to have been killed
                self._attempt.end()

    def _run(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # the disk is unavailable for a moment
                self._look_around()

    def _look_around(self) -> None:
        if self._leads:
            self._beat()
        if self._first_failure.is_elsewhere():
            time.sleep(GRACE_SECONDS)
            if not self._closed.is_set():
                _log.info("another rank has failed and this one has not noticed: it is being ended")
                os._exit(FAILED)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the record may be gone; the check reports that
            send_heartbeat(self._attempt.record)
        try:
            self._attempt.check()
        except StaleAttempt as error:
            self._replaced = error
            return
        if self._hang_watch.heartbeats > self._heard:
            self._heard = self._hang_watch.heartbeats
            with contextlib.suppress(OSError):  # there is no row yet
                os.utime(self._metrics)


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
