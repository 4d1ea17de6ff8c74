"""The state of a run, from its folder, SLURM's queue and SLURM's accounting."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.run_files import Row, failure_of, newest_checkpoint
from cluster.scheduler import NEVER_PASSES, QueuedJob, job_ids, of_run, words
from configs import runs

# Twice what a new job waits for: the age of a heartbeat is measured by this machine's clock here,
# and a network file system may answer from its cache.
_SILENT_AFTER = 2 * runs.SILENT_SECONDS

# Reasons for which a job waits until somebody releases it, as squeue spells them.
HELD = (
    "JobHeldUser",
    "JobHeldAdmin",
    "JobHoldMaxRequeue",
    "job requeued in held state",
    "launch failed requeued held",  # a node could not start the batch shell
)

FAILED_ENDS = {
    "OUT_OF_MEMORY": "it ran out of memory; raise --mem",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "TIMEOUT": "it reached the time limit before it had saved",
    "DEADLINE": "its deadline passed",
    "FAILED": "its script ended and could not record why: its folder may be full, over quota or "
    "read-only; see its log",
}
STOPPED_ENDS = {"CANCELLED": "cancelled", "PREEMPTED": "preempted"}


@dataclass(frozen=True)
class Evidence:
    """The evidence of a run's state."""

    run: Path
    rows: Sequence[Row]  # the newest of metrics.jsonl
    events: Sequence[dict[str, Any]]  # noted by the batch script in slurm.jsonl
    attempt: Mapping[str, Any]  # the newest attempt's record
    heartbeat: float  # when the record was last touched, Unix time
    jobs: Sequence[QueuedJob] | None  # SLURM's queue; None where it cannot be read
    ends: Mapping[str, str]  # SLURM_JOB_ID -> final state, from accounting

    @property
    def last(self) -> Mapping[str, Any]:
        """The batch script's last event; empty where another attempt has begun since."""
        if not self.events:
            return {}
        last = self.events[-1]
        elsewhere = self.attempt.get("job") != last.get("job")
        overtaken = elsewhere and self.attempt.get("time", 0) > last.get("time", time.time())
        return {} if overtaken else last

    @property
    def last_event(self) -> str:
        """The last event: start, done, final, ended, requeue, left; empty where there is none."""
        return str(self.last.get("event", ""))

    @property
    def job(self) -> QueuedJob | None:
        """This run's job in SLURM's queue; a running job comes before a pending one."""
        numbers = {event.get("job") for event in self.events}
        if not self.attempt.get("ended"):
            numbers.add(self.attempt.get("job") or None)
        jobs = self.jobs or []
        candidates = [*of_run(jobs, self.run), *(job for job in jobs if job.number in numbers)]
        present = [job for job in candidates if not self._has_ended(job)]
        return min(present, key=lambda job: job.state == "PENDING", default=None)

    @property
    def last_job(self) -> str | None:
        """SLURM_JOB_ID of the last job that was submitted or seen."""
        seen = str(self.last["job"]) if "job" in self.last else None
        return self.left_unstarted or seen or next(reversed(job_ids(self.run)), None)

    @property
    def left_unstarted(self) -> str | None:
        """The newest submission's job, where it left the queue without starting."""
        newest = max(self.run.glob("submissions/*/jobs"), default=None)
        if newest is None or self.jobs is None or self.job:
            return None
        ids = words(newest)
        begun = {str(event.get("job")) for event in self.events} | {self.attempt.get("job")}
        since = self.attempt.get("time", 0) > newest.stat().st_mtime
        return None if since or not ids or begun & {*ids} else ids[-1]

    @property
    def end(self) -> str:
        """The last job's final state in SLURM's accounting; empty where that is unknown."""
        return self.ends.get(self.last_job or "", "")

    def _has_ended(self, job: QueuedJob) -> bool:
        """Whether its script has ended and SLURM is only cleaning up its nodes."""
        over = job.state == "COMPLETING" and self.last_event in ("done", "final", "ended", "left")
        return over and job.number == str(self.last.get("job"))


def state_of(known: Evidence, is_finished: bool) -> tuple[str, str]:
    """The state of a run (see `RunStatus.state`) and the reason for it."""
    job = known.job
    if is_finished:
        return "finished", ""
    if job and job.state == "PENDING":
        return "queued", _pending_reason(job)
    if known.jobs is None and known.last_event == "requeue":
        return "queued", "requeued when last seen; SLURM's queue cannot be read"
    if job or _is_live(known):
        return _live_state(known)
    return _ended_state(known)


def _pending_reason(job: QueuedJob) -> str:
    if job.reason in HELD:
        return f"{job.reason}: it waits for `scontrol release {job.array}`"
    if job.reason not in NEVER_PASSES:
        return job.reason
    words = NEVER_PASSES[job.reason]
    return f"{job.reason}: it will never start, {words}; scancel {job.array} and submit it again"


def _is_live(known: Evidence) -> bool:
    """Whether a run without a job in the queue is running all the same."""
    if known.jobs is None and known.last_event == "start":
        return True
    of_slurm = known.attempt.get("job")
    if of_slurm and (known.jobs is not None or known.last_event not in ("", "start")):
        return False  # its job has ended, however recent its last heartbeat
    return _process_is_live(known)


def _process_is_live(known: Evidence) -> bool:
    """Whether rank 0 of the newest attempt is alive, as far as this machine can tell.

    Its own machine's process table answers. Elsewhere, and for a record that an old version wrote
    without its machine, the heartbeat does.
    """
    attempt = known.attempt
    if "process" not in attempt or attempt.get("ended"):
        return False
    if runs.is_here(attempt.get("machine", "")):
        return runs.is_alive(attempt["process"], attempt.get("started", 0))
    return time.time() - known.heartbeat < _SILENT_AFTER


def _live_state(known: Evidence) -> tuple[str, str]:
    quiet = _quiet_too_long(known)
    if quiet is None:
        return "running", ""
    return "stalled", f"no progress for {quiet / 60:.0f} minutes"


def _ended_state(known: Evidence) -> tuple[str, str]:
    if known.left_unstarted:
        return _never_started(known)
    event = known.last_event
    if event == "done":
        words = "its ranks exited with code 0 before the last step; submit it again to resume"
        return "failed", words
    if event == "final":
        return _final_state(known)
    if event == "requeue":
        return "stopped", f"{_reason(known)}; {_departure(known)} while it waited to start again"
    if event in ("ended", "left"):
        return "stopped", STOPPED_ENDS.get(known.end) or FAILED_ENDS.get(known.end, _reason(known))
    if not event and not known.rows and not known.attempt:
        return "new", ""
    return _ended_without_reason(known)


def _final_state(known: Evidence) -> tuple[str, str]:
    reason = _reason(known)
    if known.last.get("code") == runs.STOPPED:
        return "stopped", reason
    telling = known.end if known.end in ("OUT_OF_MEMORY", "NODE_FAIL") else ""
    return "failed", f"{reason}: {FAILED_ENDS[telling]}" if telling else reason


def _reason(known: Evidence) -> str:
    return str(known.last.get("reason", ""))


def _departure(known: Evidence) -> str:
    if known.end in STOPPED_ENDS:
        return f"job {known.last_job} was {STOPPED_ENDS[known.end]}"
    return f"job {known.last_job} left SLURM's queue"


def _never_started(known: Evidence) -> tuple[str, str]:
    if known.end in FAILED_ENDS:
        before = "" if known.end == "FAILED" else "before its script began, "
        return "failed", f"{before}{FAILED_ENDS[known.end]}"
    return "stopped", f"{_departure(known)} before it started"


def _ended_without_reason(known: Evidence) -> tuple[str, str]:
    """The state where the batch script, or a run outside SLURM, was killed before it gave one."""
    if known.end in FAILED_ENDS:
        return "failed", FAILED_ENDS[known.end]
    if known.end in STOPPED_ENDS:
        return "stopped", STOPPED_ENDS[known.end]
    if failure := failure_of(known.run):
        return "failed", failure
    checkpoint, _ = newest_checkpoint(known.run)
    may_be_saved = bool(known.rows or known.attempt.get("ended"))  # no fork that died at its start
    if checkpoint is not None and may_be_saved and checkpoint >= last_step(known.rows):
        return "stopped", ""
    if not known.rows and known.last_event != "start":
        return "failed", "it ended before it logged a step; see its log"
    resumes = "begin from step 0" if checkpoint is None else "resume from its last checkpoint"
    return "failed", f"it ended without saving; start it again to {resumes}"


def _quiet_too_long(known: Evidence) -> float | None:
    """Seconds since the last progress, where that is too long; None where it is not.

    A touched attempt record is not progress: rank 0 touches it even while another rank hangs.
    """
    signs = [known.run / name for name in ("metrics.jsonl", "config.yaml", "slurm.jsonl")]
    if not known.rows:  # what is not training yet, or never does, tells its log how it gets on
        signs += known.run.glob("logs/*.log")
    quiet = min(map(runs.seconds_since, signs))
    usual = _usual_interval(training_rows(known.rows)[-runs.USUAL_ROWS :])
    return quiet if runs.stall_timeout(usual) < quiet < math.inf else None


def _usual_interval(recent: Sequence[Row]) -> float | None:
    """The mean seconds between the `recent` rows; None where there are none."""
    if not recent:
        return None
    before = recent[0]["seconds"] if len(recent) > 1 else 0.0
    return float(recent[-1]["seconds"] - before) / max(1, len(recent) - 1)


def last_step(rows: Sequence[Row]) -> int:
    """The step of the last of the `rows`; 0 where there are none."""
    return int(rows[-1]["step"]) if rows else 0


def training_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of training steps; rows of held-out scores have no ``seconds``."""
    return [row for row in rows if "seconds" in row]
