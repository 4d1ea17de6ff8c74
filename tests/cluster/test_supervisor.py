"""The decisions of the batch script, with shell scripts as stand-ins for SLURM's commands.

A real SLURM takes the same decisions in tests/slurm; here every branch is cheap to test.
"""

import json
import os
import signal

import pytest

from tests.cluster.batch_script import STOP, Run, wait_for
from tests.waiting import SECONDS


@pytest.mark.parametrize(
    ("train", "verdict", "code", "reason"),
    [
        ("finish", "done", 0, "finished"),
        ("echo tandem: bad key; exit 1", "final", 1, "the ranks failed: bad key"),
        ("echo 0: tandem: bad key; exit 1", "final", 1, "the ranks failed: bad key"),
        ("step 5; echo tandem: lost; exit 1", "requeue", 1, "the ranks failed: lost"),
        (f"{STOP}; exit 75", "final", 75, "stopped on request"),
        # What nobody explains may be a node's fault.
        ("exit 1", "requeue", 1, "code 1"),
        ("exit 2", "requeue", 2, "code 2"),
        ("exit 127", "requeue", 127, "code 127"),
        ("exit 75", "requeue", 0, "neither SLURM nor `tandem stop` asked for it"),
        ("kill -9 $$", "requeue", 137, "code 137"),
    ],
)
def test_exit_codes(tmp_path, train, verdict, code, reason):
    run = Run(tmp_path)
    event, returned, why = run.end(train)
    assert (event, returned) == (verdict, code)
    assert reason in why
    assert run.requeued == (verdict == "requeue")


def test_steps_saved_again_after_a_rollback_are_progress(tmp_path):
    """Until they have passed the step at which the run was rolled back."""
    run = Run(tmp_path, max_requeues_without_progress=0)
    saved = tmp_path / "run/checkpoints/step-000001500"
    saved.mkdir(parents=True)
    (saved / "trainer.json").touch()
    save = "mkdir -p checkpoints/step-00000{0}; touch checkpoints/step-00000{0}/trainer.json; "
    resume = """attempt ', "checkpoints": [250, 500], "more": [9]'; """
    lost = "echo tandem: lost; exit 1"
    assert run.end(resume + save.format("0900") + lost)[0] == "requeue"
    resume = resume.replace("500", "500, 900")
    assert run.end(resume + save.format("1000") + lost, restart=1)[0] == "requeue"
    assert run.end(resume + save.format("0900") + lost, restart=2)[0] == "final"


LOST = "srun lost the ranks: a node failed, or a rank did not end"


def test_code_0_of_srun_is_no_end(tmp_path):
    """srun also returns it for lost ranks; only the run knows whether it is finished."""
    run = Run(tmp_path)
    assert run.end("step 5; exit 0") == ("requeue", 70, LOST)
    assert run.end("attempt; step 6; exit 0") == ("requeue", 70, LOST)


def test_what_another_start_has_finished_is_not_this_ones_end(tmp_path):
    run = Run(tmp_path)
    assert run.end("step 5; finish")[0] == "done"
    assert run.end("step 6; exit 0", restart=1)[:2] == ("requeue", 70)


def test_a_run_that_is_finished_is_done_whatever_srun_says(tmp_path):
    """A node that fails after the results were written does not matter."""
    assert Run(tmp_path).end("(finish); kill -9 $$") == ("done", 0, "finished")


def test_cancelled_ranks_that_srun_returns_0_for_are_not_finished(tmp_path):
    run = Run(tmp_path, chained=True)
    process = run.start("trap 'exit 0' TERM; touch ready; while :; do sleep 0.05; done")
    wait_for(tmp_path / "run/ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert run.last(process.returncode)[:2] == ("ended", 70)
    assert "final" not in (run.submission / "accounts/chain/progress").read_text()


def test_warning_is_passed_on_and_leads_to_a_requeue(tmp_path):
    run = Run(tmp_path)
    process = run.start("trap 'exit 75' USR1; touch ready; while :; do sleep 0.05; done")
    wait_for(tmp_path / "run/ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=SECONDS)
    assert run.last(process.returncode) == ("requeue", 0, "the time limit")
    assert run.requeued == 1


@pytest.mark.parametrize(("reason", "verdict"), [("None", "ended"), ("TimeLimit", "requeue")])
def test_ended_by_slurm(tmp_path, reason, verdict):
    """``scancel`` and the time limit both send TERM; SLURM's reason tells them apart."""
    run = Run(tmp_path)
    train = "trap 'exit 75' TERM; touch ready; while :; do sleep 0.05; done"
    process = run.start(train, REASON=reason)
    wait_for(tmp_path / "run/ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert run.last(process.returncode)[:2] == (verdict, 75)
    assert run.requeued == (verdict == "requeue")


def test_preempted_with_a_grace(tmp_path):
    """SLURM signals only the ranks. No budget is spent, since the job could not take a step."""
    run = Run(tmp_path, max_requeues_without_progress=0)
    given = {"REASON": "None PreemptTime=2026-01-01T00:00:00"}
    assert run.end("exit 75", **given) == ("requeue", 0, "preempted")
    assert run.end("echo tandem: lost; exit 1", **given) == ("requeue", 1, "preempted")
    assert run.end("exit 75", REASON="None PreemptTime=None")[0] == "final"


def test_a_stop_that_a_person_asked_for_is_final_even_at_the_time_limit(tmp_path):
    run = Run(tmp_path)
    train = "trap 'exit 75' USR1; mkdir requests; touch requests/stop.json ready; "
    process = run.start(train + "while :; do sleep 0.05; done")
    wait_for(tmp_path / "run/ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=SECONDS)
    assert run.last(process.returncode) == ("final", 75, "stopped on request")
    assert run.requeued == 0


@pytest.mark.parametrize(
    ("cluster", "train", "code"),
    [
        ({}, f"{STOP}; exit 75", 75),
        ({"max_requeues": 0}, "step 1; exit 75", 75),
        ({"gpus_per_node": "1", "max_gpu_hours": 1e-9}, "finish", 75),
        ({"max_requeues_without_progress": 0}, "exit 75", 1),
        ({}, "echo tandem: bad key; exit 1", 1),
    ],
)
def test_who_ends_as_told_is_cancelled_for_slurm_and_has_not_failed(tmp_path, cluster, train, code):
    """A job that exits with 75 is FAILED in SLURM's accounting, unless it is cancelled."""
    run = Run(tmp_path, **cluster)
    assert run.end(train)[:2] == ("final", code)
    assert ("scancel 7" in run.calls) == (code == 75)


def test_a_run_that_slurm_does_not_requeue_has_failed(tmp_path):
    refused = Run(tmp_path).end("step 1; exit 75", REFUSAL="disabled")
    assert refused[:2] == ("final", 1)


def test_a_copy_that_slurm_requeued_does_not_start_after_a_stop(tmp_path):
    run = Run(tmp_path)
    assert run.end("step 1; kill -9 $$")[0] == "requeue"
    (tmp_path / "run/requests").mkdir()
    (tmp_path / "run/requests/stop.json").touch()
    assert run.end("touch started", restart=1) == ("final", 75, "stopped on request")
    assert not (tmp_path / "run/started").exists()
    again = run.end("finish", SLURM_JOB_ID="8")  # a person submitted it again
    assert again == ("done", 0, "finished")


def test_a_stop_of_before_a_submission_ends_none_of_its_starts(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "run/requests").mkdir()
    (tmp_path / "run/requests/stop.json").touch()
    assert run.end("kill -9 $$")[0] == "requeue", "its ranks had no time to forget the request"
    assert run.end("finish", restart=1)[0] == "done"


def test_a_job_that_another_one_kept_out_is_not_requeued(tmp_path):
    """The steps of the other job do not count as progress of this one."""
    run = Run(tmp_path)
    others = """mkdir attempts; echo '{"job": "6"}' >attempts/000001.json"""
    assert run.end(f"{others}; step 5; echo tandem: it is live; exit 1")[:2] == ("final", 1)
    assert run.end("attempt; step 6; exit 1")[:2] == ("requeue", 1)


def test_attempts_without_progress_end_the_job(tmp_path):
    """Two are allowed: the first stops at step 5, and later ones never get further."""
    run = Run(tmp_path, max_requeues_without_progress=2)
    outcomes = [run.end("step 5; kill -9 $$", restart)[0] for restart in range(4)]
    assert outcomes == ["requeue", "requeue", "requeue", "final"]
    event, code, why = run.end("step 5; kill -9 $$", 4)
    assert (event, code) == ("final", 1)
    again = "gave up after 2 requeues without a new step; fix the cause, then `tandem submit` again"
    assert why == again
    assert run.requeued == 3


def test_progress_resets_the_count_of_requeues(tmp_path):
    run = Run(tmp_path, max_requeues_without_progress=1)
    for restart in range(6):
        assert run.end(f"step {restart // 2 + 1}; kill -9 $$", restart)[0] == "requeue"


def test_a_saved_checkpoint_is_progress(tmp_path):
    run = Run(tmp_path, max_requeues_without_progress=0)
    for restart, step in enumerate(["000000008", "000000009", "000000010"]):
        train = f"mkdir -p checkpoints/step-{step}; kill -9 $$"
        assert run.end(train, restart)[0] == "requeue"
    assert run.end("kill -9 $$", 3)[0] == "final"


def test_attempts_that_never_reached_their_end_count(tmp_path):
    """A dead node leaves the account open, and SLURM itself requeues the job."""
    run = Run(tmp_path, max_requeues_without_progress=1)
    for restart in range(2):
        process = run.start("touch ready; sleep 20", restart)
        wait_for(tmp_path / "run/ready")
        (tmp_path / "run/ready").unlink()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)
    event, code, _ = run.end("exit 0", 2)
    assert (event, code) == ("final", 1)


def test_a_shell_that_was_cut_off_touches_nothing(tmp_path):
    """Its job was requeued elsewhere: it must neither requeue the job again nor end the account."""
    run = Run(tmp_path)
    stale = run.start("touch ready; while [ ! -e go ]; do sleep 0.05; done; exit 1")
    wait_for(tmp_path / "run/ready")
    fresh = run.start("touch started; while [ ! -e stop ]; do sleep 0.05; done; finish", restart=1)
    wait_for(tmp_path / "run/started")
    (tmp_path / "run/go").touch()
    stale.communicate(timeout=SECONDS)
    assert "another attempt of this run has begun" in run.output
    assert run.requeued == 0
    (tmp_path / "run/stop").touch()
    fresh.communicate(timeout=SECONDS)
    assert run.last(fresh.returncode) == ("done", 0, "finished")
    events = (tmp_path / "run/slurm.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["start", "start", "done"]


def test_submitting_the_script_again_by_hand_starts_afresh(tmp_path):
    run = Run(tmp_path, max_requeues_without_progress=0)
    assert run.end("kill -9 $$")[0] == "final"
    assert run.end("finish")[0] == "final"
    assert run.end("finish", SLURM_JOB_ID="8")[0] == "done"


def test_a_chain_goes_on_after_the_time_limit_but_not_after_a_failure(tmp_path):
    run = Run(tmp_path, chained=True)
    assert run.end("step 5; kill -9 $$")[0] == "left"
    assert run.end("echo tandem: bad key; exit 1")[0] == "final"
    event, code, why = run.end("exit 0")
    assert (event, code, why) == ("final", 1, "the ranks failed: bad key")
    assert run.requeued == 0


def test_a_chain_that_is_done_starts_no_more(tmp_path):
    run = Run(tmp_path, chained=True)
    assert run.end("finish")[0] == "done"
    assert run.end("touch started") == ("done", 0, "finished")
    assert not (tmp_path / "run/started").exists()


def test_a_refused_requeue_is_told(tmp_path):
    run = Run(tmp_path)
    event, _, why = run.end("step 1; kill -9 $$", REFUSAL='Requested "operation" is disabled')
    assert event == "final"
    assert why.endswith("SLURM did not requeue it: Requested 'operation' is disabled")


FAILURE = (
    """echo '{"rank": 3, "error": "gone: a\\"b\\nmore", "host": "n2"}' >attempts/000009.failure"""
)
KILLED = "srun: error: n2: task 1: Killed"


@pytest.mark.parametrize(
    ("says", "code", "reason"),
    [
        (f"attempt; {FAILURE}", 1, "rank 3 on n2 failed: gone: a'b"),
        ("echo 'tandem: data.path: no such corpus: gone'", 1, "data.path: no such corpus: gone"),
        ("echo Traceback", 1, "the ranks ended with code 1"),
        (
            f"attempt; {FAILURE}; echo 'srun: error: n1: task 0: Exited with exit code 1'; "
            f"echo '{KILLED}'",
            137,
            "rank 1 on n2 was killed; if it ran out of memory, raise --mem",
        ),
        ("echo 'srun: error: n1: tasks 0-1: Out Of Memory'", 137, "ranks 0-1 on n1 ran out of"),
        ("echo 'srun: error: n1: task 0: Segmentation fault'", 139, "rank 0 on n1: Segmentation"),
    ],
)
def test_the_reason_quotes_the_rank(tmp_path, says, code, reason):
    """From the record of the first failure, or from what this start wrote to the log."""
    run = Run(tmp_path)
    log = tmp_path / "run/logs/slurm-7.log"
    log.parent.mkdir()
    log.write_text(f"{KILLED}\ntandem: an earlier start\n")
    assert run.end(f"{{ {says}; }} >>logs/slurm-7.log; exit {code}")[2].count(reason) == 1
