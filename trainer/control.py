"""The requests to a live run, and one rank's run-time services: attempt, heartbeat, watches.

``requests/KIND.json`` is a request. It is created exclusively, so that two people who ask at once
make one request. Rank 0 looks for requests in every step, the ranks agree on them in the collective
that sums the step's losses, and ``requests/KIND.answer.json`` has the answer. It works from any
node that shares the run folder.

A stop stays on record until a person starts the run again: a copy that SLURM requeues meanwhile
finds it and ends too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from configs import ConfigError
from configs.durable import atomic_write
from configs.runs import HEARTBEAT_SECONDS
from configs.strict_json import from_json, read_json
from trainer.checkpoint.attempts import Attempt, live_owner, owner_has_ended, send_heartbeat
from trainer.config import JobConfig
from trainer.errors import StaleAttempt, TrainingError
from trainer.measure import Startup
from trainer.run_folder.folder import RunFolder
from trainer.watch.ranks import FAILED, FirstFailure, HangWatch

STOP, CHECKPOINT = "stop", "checkpoint"
KINDS = (STOP, CHECKPOINT)
LOOK_SECONDS = 1.0  # between reads of the folder, which may be on a slow file system
_log = logging.getLogger(__name__)
POLL_SECONDS = 0.2
UNSEEN_SECONDS = 60.0  # for which NFS may not show here what another machine has written


class Requests(NamedTuple):
    """The requests that one rank knows of; the job follows those of any rank."""

    stop: bool = False  # save, and end
    save: bool = False  # save, and continue


class RequestBox:
    """The requests to a run, as rank 0 sees them; always empty on other ranks."""

    def __init__(self, folder: Path, reads: bool) -> None:
        """`folder` is ``RUN/requests``; `reads` is true on rank 0 only."""
        self._folder, self._reads = folder, reads
        self._looked = float("-inf")
        self._seen: dict[str, str] = {}  # kind -> id, until a save begins that answers it
        self._begun: set[str] = set()  # ids whose save has begun; their files are still there

    def look(self) -> frozenset[str]:
        """The requested kinds; reads the folder at most once in `LOOK_SECONDS`."""
        now = time.monotonic()
        if self._reads and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            for kind in KINDS:
                request = _id_in(self._folder / f"{kind}.json")
                if request and request not in self._begun:
                    self._seen[kind] = request
        return frozenset(self._seen)

    def answer_after_save(self, step: int) -> Callable[[Exception | None], None]:
        """A function to call when the checkpoint of `step` is published, or has failed.

        It answers the requests seen so far, and may be called from any thread.
        """
        seen, self._seen = self._seen, {}
        self._begun |= set(seen.values())

        def answer(error: Exception | None) -> None:
            for kind, request in seen.items():
                reason = None if error is None else str(error)
                self._answer(kind, {"id": request, "step": step, "error": reason})

        return answer

    def _answer(self, kind: str, content: dict[str, Any]) -> None:
        try:
            atomic_write(self._folder / f"{kind}.answer.json", json.dumps(content))
            if kind != STOP:
                (self._folder / f"{kind}.json").unlink(missing_ok=True)
        except OSError as error:
            _log.warning("requests/%s.json could not be answered: %s", kind, error)


def ask(folder: Path, kind: str) -> str:
    """Leave a request of a `kind` in ``RUN/requests`` and return its id.

    If there is one already, return the id of that.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.json"
    request = uuid.uuid4().hex
    content = json.dumps({"id": request, "time": time.time()})
    try:
        with path.open("x") as file:
            file.write(content)
    except FileExistsError:
        if pending := _id_in(path):
            return pending
        # Its writer died, or the disk was full, before the request was complete.
        atomic_write(path, content)
    return request


def answer_to(folder: Path, kind: str, request: str) -> dict[str, Any] | None:
    """The run's answer to a request: ``step``, and ``error`` or None. None before there is one."""
    try:
        answer = from_json(read_json(folder / f"{kind}.answer.json"), _Answer, kind)
    except (OSError, ConfigError):
        return None
    return asdict(answer) if answer.id == request else None


def forget(folder: Path) -> None:
    """Drop every request, answered or not: a person has started the run again."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Request:
    id: str


@dataclass(frozen=True)
class _Answer:
    id: str
    step: int
    error: str | None


def _id_in(path: Path) -> str:
    """The id of a request; empty if there is none, or while the disk is unavailable."""
    try:
        return from_json(read_json(path), _Request, path).id
    except (OSError, ConfigError):
        return ""


def ask_and_wait(run: RunFolder, kind: str, seconds: float) -> str:
    """Request a stop or a checkpoint; returns the run's answer in one line.

    Raises TrainingError if the run is not live, if the save failed, or if there is no answer within
    `seconds`. In the last case the run still acts on the request as soon as it sees it.
    """
    owner = live_owner(run.path)
    if owner is None:
        raise TrainingError(f"{run.path}: no job is running in it, so there is nothing to {kind}")
    request = ask(run.requests, kind)
    end = ended_at = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        is_gone = owner.is_on_this_machine and not owner.has_process
        has_ended = is_gone or owner_has_ended(run.path)
        answer = answer_to(run.requests, kind, request)  # read after: it may end right behind it
        if answer is None:
            ended_at = min(now, ended_at) if has_ended else end
            if is_gone or now > ended_at + UNSEEN_SECONDS:
                raise TrainingError(f"{run.path}: the job ended before it could {kind}")
        elif answer["error"] is not None:
            raise TrainingError(f"{run.path}: not saved: {answer['error']}")
        elif kind != STOP:
            return f"{run.path}: saved at step {answer['step']:,}"
        elif has_ended or live_owner(run.path) is None:
            return f"{run.path}: saved at step {answer['step']:,} and ended"
        time.sleep(POLL_SECONDS)
    raise TrainingError(
        f"{run.path}: its job ({owner}) has not answered for {seconds:.0f} s; the request "
        "stays, and the job reads it between two steps"
    )


# Time for this rank to notice by itself that another one has failed. With gloo it does so at once;
# with NCCL it may wait in a kernel forever.
GRACE_SECONDS = 10.0


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
