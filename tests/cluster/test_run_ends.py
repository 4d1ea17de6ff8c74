"""`tandem status` of runs whose job has left SLURM's queue, or may never start."""

import dataclasses
import os

import pytest

from cluster import commands
from cluster.scheduler import QueuedJob
from cluster.status import read_run, read_runs
from tests.cluster.folders import ELSEWHERE, Folder
from trainer.checkpoint.attempts import published


@pytest.fixture
def run(tmp_path):
    return Folder(tmp_path / "runs")


def test_a_run_whose_job_is_over_does_not_run(run):
    """However recent the last heartbeat of its process on another machine is."""
    run.log(10)
    run.attempt(1, machine=ELSEWHERE, job="7")
    job = QueuedJob("7", "7", "RUNNING", "None")
    assert read_run(run.path, [job]).state == "running"  # without a batch script of ours
    assert read_run(run.path, None).state == "running"
    assert read_run(run.path, []).state == "failed"
    run.event("start")
    run.event("final", 1, "out of data")
    completing = dataclasses.replace(job, state="COMPLETING")
    for jobs in (None, [], [completing]):
        status = read_run(run.path, jobs)
        assert (status.state, status.reason, status.job) == ("failed", "out of data", None)
    run.event("start", job="8")
    assert read_run(run.path, [dataclasses.replace(job, id="8", number="8")]).state == "running"


def test_the_run_of_another_user_is_not_in_this_users_queue(run, monkeypatch):
    run.log(10)
    run.event("start")
    run.attempt(1, machine=ELSEWHERE, job="7")
    assert read_run(run.path, []).state == "failed"
    monkeypatch.setattr("os.getuid", lambda: 4242)
    assert read_run(run.path, []).state == "running"


def test_what_was_done_elsewhere_since_counts_more_than_the_last_job(run):
    run.event("final", 1, "no such corpus", time=1000.0)
    run.attempt(2**22 + 1, since=2000.0)
    run.log(10)
    run.save(10)
    assert (read_run(run.path, []).state, read_run(run.path, []).reason) == ("stopped", "")


def test_a_run_that_saved_before_it_logged_a_step_has_stopped_at_its_checkpoint(run):
    """Stopped on request, with log.every above the steps that it made."""
    dead = 2**22 + 1
    run.save(5)
    run.attempt(dead)
    assert read_run(run.path, []).state == "failed"  # a fork's first checkpoint is not its own
    run.attempt(dead, ended=True)
    status = read_run(run.path, [])
    assert (status.state, status.reason, status.step) == ("stopped", "", 5)


def test_checkpoints_that_a_rollback_has_disowned_are_not_what_a_run_has_saved(run):
    """A run to step 8, rolled back to 4, and killed at step 5; then again, after it had saved."""
    dead = 2**22 + 1
    run.attempt(dead, checkpoints=[])
    run.log(1, 2, 3, 4, 5)
    for step in (2, 4, 8):
        run.save(step, attempt=1)
    assert read_run(run.path, []).checkpoint == 8
    run.attempt(dead, number=2, checkpoints=[2, 4])
    status = read_run(run.path, [])
    assert (status.state, status.checkpoint) == ("failed", 4)
    assert status.reason.startswith("it ended without saving")
    run.save(5, attempt=2)
    run.attempt(dead, number=3)  # died while it began
    status = read_run(run.path, [])
    assert (status.state, status.reason, status.checkpoint) == ("stopped", "", 5)
    assert status.checkpoint == published(run.path / "checkpoints")[-1]


@pytest.mark.parametrize(
    ("events", "end", "state", "reason"),
    [
        # A chain that was stopped: the jobs that follow find nothing left to do.
        ([("final", 75, "stopped on request")], "", "stopped", "stopped on request"),
        # srun's 0 is not the run's.
        ([("done", 0, "finished")], "", "failed", "exited with code 0 before the last step"),
        ([("final", 1, "code 137")], "OUT_OF_MEMORY", "failed", "code 137: it ran out of memory"),
        ([("ended", 75, "ended by SLURM")], "CANCELLED", "stopped", "cancelled"),
        ([("ended", 75, "ended by SLURM")], "", "stopped", "ended by SLURM"),
        ([("requeue", 75, "preempted")], "CANCELLED", "stopped", "preempted; job 7 was cancelled"),
        ([("requeue", 75, "preempted")], "", "stopped", "job 7 left SLURM's queue while"),
        ([], "NODE_FAIL", "failed", "a node failed"),
        ([], "OUT_OF_MEMORY", "failed", "it ran out of memory; raise --mem"),
        ([], "CANCELLED", "stopped", "cancelled"),
        ([], "", "failed", "it ended without saving"),
    ],
)
def test_how_a_job_ended(run, events, end, state, reason):
    run.event("start")
    for event, code, why in events:
        run.event(event, code, why)
    status = read_run(run.path, [], {"7": end} if end else {})
    assert status.state == state
    assert reason in status.reason


def test_a_requeued_run_is_queued_when_slurm_does_not_answer(run):
    run.event("requeue", 75, "preempted")
    assert read_run(run.path, None).state == "queued"


FULL = "its folder may be full, over quota or read-only"


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ("CANCELLED", "stopped", "job 7 was cancelled before it started"),
        ("", "stopped", "job 7 left SLURM's queue before it started"),
        ("NODE_FAIL", "failed", "before its script began, a node failed"),
        ("FAILED", "failed", f"its script ended and could not record why: {FULL}; see its log"),
    ],
)
def test_a_job_that_never_started(run, end, state, reason):
    run.submit("7")
    status = read_run(run.path, [], {"7": end} if end else {})
    assert (status.state, status.reason) == (state, reason)
    assert read_run(run.path, None).state == "new"


def test_a_second_submission_that_never_started_is_not_the_first_ones_failure(run):
    run.event("start", job="5", time=1000.0)
    run.event("final", 1, "no such corpus", job="5", time=1001.0)
    run.attempt(2**22 + 1, job="5", since=1000.0)
    assert read_run(run.path, []).reason == "no such corpus"
    run.submit("8", "9")
    status = read_run(run.path, [], {"9": "CANCELLED"})
    assert (status.state, status.reason) == ("stopped", "job 9 was cancelled before it started")
    run.event("start", job="8")
    run.event("final", 75, "stopped on request", job="8")
    assert read_run(run.path, []).reason == "stopped on request"


def test_a_reason_to_wait_that_will_not_pass(run):
    run.submit("7")
    job = QueuedJob("7", "7", "PENDING", "PartitionTimeLimit")
    said = read_run(run.path, [job]).reason
    assert "will never start, --time is more than its partition allows; scancel 7" in said
    held = dataclasses.replace(job, reason="JobHeldUser")
    assert "scontrol release 7" in read_run(run.path, [held]).reason


SACCT = """#!/bin/sh
echo "$*" >>"$0.calls"
[ -z "$DISABLED" ] || { echo "Slurm accounting storage is disabled" >&2; exit 1; }
cat <<END
7|FAILED
7.batch|FAILED
7.0|OUT_OF_MEMORY
8|CANCELLED by 1000
9|NODE_FAIL
9.batch|CANCELLED
END
"""


def test_accounting_is_asked_once_for_all_that_ended_without_a_word(run, tmp_path, monkeypatch):
    program = tmp_path / "bin/sacct"
    program.parent.mkdir()
    program.write_text(SACCT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run.event("start")
    for job in ("8", "9"):
        Folder(tmp_path / "runs", f"run{job}").event("start", job=job)
    finished = Folder(tmp_path / "runs", "finished")
    finished.event("done", job="10")
    (finished.path / "evaluation.json").write_text('{"step": 100}')

    def reasons():
        return {row.name: (row.state, row.reason) for row in read_runs(tmp_path / "runs", [])}

    assert reasons() == {
        "demo": ("failed", "it ran out of memory; raise --mem"),
        "run8": ("stopped", "cancelled"),
        "run9": ("failed", "a node failed"),
        "finished": ("finished", ""),
    }
    (asked,) = (tmp_path / "bin/sacct.calls").read_text().splitlines()
    assert set(asked.split()[1].split(",")) == {"7", "8", "9"}
    monkeypatch.setenv("DISABLED", "yes")
    assert reasons()["run9"][0] == "failed"


def test_every_restart_is_counted(run, capsys):
    for _ in range(8):
        run.event("start")
        run.event("requeue", 75, "the time limit")
    run.event("start")
    run.event("requeue", 75, "preempted")
    commands.status("demo", False, run.path.parent)
    said = " ".join(capsys.readouterr().out.split())
    assert "demo was restarted: the time limit (8 times); preempted" in said


def test_why_it_was_restarted(run):
    """A node that failed left no reason; a job that SLURM started again was not cancelled."""
    for event in ("start", "requeue", "start", "start", "ended"):
        run.event(event, reason={"requeue": "the time limit", "ended": "cancelled"}.get(event, ""))
    slurm = "preempted, or its node failed: SLURM requeued it"
    assert read_run(run.path, []).restarts == ["the time limit", slurm]
    run.event("start")
    assert read_run(run.path, []).restarts[2:] == [slurm]
    run.event("start", job="8")  # submitted by a person
    submitted = "its job ended without a record, and the run was submitted again"
    assert read_run(run.path, []).restarts[3:] == [submitted]
    run.event("ended", reason="cancelled", job="8")
    run.event("start", job="9")
    assert read_run(run.path, []).restarts[4:] == ["cancelled"]


def test_what_no_start_has_followed_is_no_restart(run):
    """Unless the job waits for it: the last job of a chain, and one that was cancelled, do not."""
    run.submit("7")
    run.event("start")
    run.event("requeue", reason="preempted")
    pending = QueuedJob("7", "7", "PENDING", "BeginTime")
    assert read_run(run.path, [pending]).restarts == ["preempted"]
    assert read_run(run.path, []).restarts == []
    run.event("start")
    run.event("left", reason="the time limit")
    assert read_run(run.path, []).restarts == ["preempted"]
