"""What is no fault of the run does not end it: SLURM's silence, inherited variables, bad nodes."""

import json
import shlex
import signal
import time

import pytest

from tests.cluster.batch_script import Run, wait_for
from tests.waiting import SECONDS

DOWN = "Unable to contact slurm controller (connect failure)"
WAIT = "touch ready; while [ ! -e go ]; do sleep 0.05; done"


def once(answer: str, question: str) -> str:
    """scontrol's first answer to a question."""
    return (
        f'case "$*" in *"{question}"*) [ -e "$CALLS.once" ] || '
        f'{{ touch "$CALLS.once"; {answer}; }} ;; esac'
    )


PREEMPTED = {"REASON": "None PreemptTime=2026-01-01T00:00:00"}


@pytest.mark.parametrize(
    "answers",
    [
        "exit 143",
        "echo 'srun: Job step aborted'; exit 143",
        "echo ok n1; exit 143",
        "echo 'cut n1: all-reduce failed'; exit 143",
    ],
)
def test_a_preemption_during_the_check_of_the_nodes_is_one(tmp_path, answers):
    run = Run(tmp_path, preflight=True, max_requeues_without_progress=0)
    ended = run.end("touch started", PREFLIGHT=answers, **PREEMPTED)
    assert ended == ("requeue", 0, "preempted")
    assert not any("ExcNodeList" in call for call in run.calls)
    assert not (tmp_path / "run/started").exists()


@pytest.mark.parametrize("question", ["requeue", "show job"])
def test_a_question_to_slurm_is_repeated(tmp_path, question):
    """The controller is down when the ranks have saved."""
    run = Run(tmp_path)
    silent = once(f"echo {DOWN!r} >&2; exit 1", question)
    assert run.end("step 1; exit 75", CONTROLLER=silent, **PREEMPTED)[0] == "requeue"
    assert sum(question in call for call in run.calls) > 1


def test_a_requeue_whose_answer_is_lost_was_one(tmp_path):
    run = Run(tmp_path)
    lost = "sleep 0.1; echo 'scontrol: error: slurm_receive_msgs: Socket timed out' >&2; exit 1"
    done = "case $* in requeue*) echo 'Job/step already completing' >&2; exit 1 ;; esac"
    controller = f"{once(lost, 'requeue')}; {done}"
    event, _, why = run.end("kill -9 $$", CONTROLLER=controller, REASON="None Restarts=1")
    assert (event, why) == ("requeue", "the ranks ended with code 137")


def test_what_the_submitting_shell_hands_on_is_not_this_jobs(tmp_path):
    """Submitted from within a task of an array, which has been requeued itself."""
    run = Run(tmp_path)
    inherited = {"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "1"}
    says = 'echo "$SLURM_RESTART_COUNT" >restarts; kill -9 $$'
    assert run.end(says, 5, REASON="None Restarts=0", **inherited)[0] == "requeue"
    assert (tmp_path / "run/restarts").read_text() == "\n"
    assert [call for call in run.calls if call.startswith("requeue")] == ["requeue 7"]
    rows = (tmp_path / "run/slurm.jsonl").read_text().splitlines()
    assert {json.loads(row)["restart"] for row in rows} == {0}


def test_a_second_start_takes_nothing_from_the_one_that_trains(tmp_path):
    run = Run(tmp_path)
    first = run.start(f"trap 'exit 75' USR1; attempt; {WAIT}")
    wait_for(tmp_path / "run/ready")
    refused = "echo 'tandem: another job is running it'; exit 1"
    assert run.end(refused, SLURM_JOB_ID="8")[0] == "final"
    first.send_signal(signal.SIGUSR1)
    first.communicate(timeout=SECONDS)
    assert run.last(first.returncode) == ("requeue", 0, "the time limit")
    assert run.requeued == 1


@pytest.mark.parametrize("broken", ["logs", "submissions/001/accounts"])
def test_a_first_node_that_cannot_write_gives_the_job_back(tmp_path, broken):
    run = Run(tmp_path)
    (tmp_path / "run" / broken).touch()
    process = run.start("touch started")
    process.communicate(timeout=SECONDS)
    assert process.returncode == 69
    assert run.requeued == 1
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n1"
    process = run.start("touch started", restart=3)
    process.communicate(timeout=SECONDS)
    assert run.requeued == 1, "as often as the budget says"
    assert not (tmp_path / "run/started").exists()


def test_a_first_node_is_left_out_beside_others_and_while_enough_remain(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "run/logs").touch()
    too_few = 'echo "Requested node configuration is not available" >&2; exit 1'
    for refuses in (too_few, ""):
        process = run.start("touch started", SBATCH=refuses, EXCLUDED="n[7-8]")
        process.communicate(timeout=SECONDS)
        assert run.calls[-1 - (not refuses)].startswith("sbatch --test-only --exclude=n[7-8],n1 ")
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n[7-8],n1"
    assert run.requeued == 2


def test_the_reason_is_that_it_cannot_write(tmp_path):
    run = Run(tmp_path, max_requeues=5)
    (tmp_path / "run/submissions/001/accounts").touch()
    event, _, why = run.end("touch started", restart=3)
    account = tmp_path / "run/submissions/001/accounts/7"
    assert event == "final"
    assert why.startswith(f"n1 cannot write to {account} (read-only, full, or over quota)")


def checked(*lines: str) -> str:
    return "; ".join(f"echo {line!r}" for line in lines)


@pytest.mark.parametrize(
    ("nodes", "lines", "excluded"),
    [
        (4, ("ok n1", "ok n2", "ok n3", "cut n4: cannot reach n1"), "n4"),
        (4, ("ok n1", *(f"cut n{n}: cannot reach n1" for n in (2, 3, 4))), "n1"),
        (2, ("ok n1", "cut n2: cannot reach n1"), "n1,n2"),
        (3, [f"cut n{n}: all-reduce failed" for n in (1, 2, 3)], None),
        (3, ("ok n1", "cut n2: all-reduce failed", "bad n3: 3 of 4 GPUs found"), "n3"),
    ],
)
def test_who_is_to_blame_that_nodes_cannot_communicate(tmp_path, nodes, lines, excluded):
    run = Run(tmp_path, preflight=True)
    names = {"SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": f"n[1-{nodes}]"}
    assert run.end("finish", PREFLIGHT=checked(*lines), **names)[:2] == ("requeue", 69)
    updates = [call.partition("=")[2] for call in run.calls if call.startswith("update")]
    assert updates == ([f"7 ExcNodeList={excluded}"] if excluded else [])


def test_nodes_are_left_out_for_a_day_and_while_enough_remain(tmp_path):
    run = Run(tmp_path, preflight=True)
    account = tmp_path / "run/submissions/001/accounts/7"
    account.mkdir(parents=True)
    now = int(time.time())
    (account / "excluded").write_text(f"{now - 90_000} n3\n{now - 500} n4\n{now - 400} n5\n")
    bad = checked("ok n1", "bad n2: 3 of 4 GPUs found")
    refuses = 'case "$*" in *n4*) echo "Requested node configuration is not available" >&2 ;; esac'
    run.end("finish", PREFLIGHT=bad, EXCLUDED="n[3-5],n9", SBATCH=refuses)
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n2,n5,n9"


@pytest.mark.parametrize(
    ("words", "who"),
    [
        (
            "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your "
            "processes may have been killed by the cgroup out-of-memory handler.\n"
            "srun: error: n1: task 1: Out Of Memory",
            "rank 1 on n1",
        ),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks "
            "have been OOM Killed.",
            "a rank",
        ),
    ],
)
def test_out_of_memory_under_cgroups_ends_srun_with_code_1(tmp_path, words, who):
    event, code, why = Run(tmp_path).end(f"echo {shlex.quote(words)}; exit 1")
    assert (event, code, why) == ("requeue", 1, f"{who} ran out of memory; raise --mem")


def test_what_the_shell_prefers_of_srun_does_not_reach_the_ranks(tmp_path):
    run = Run(tmp_path, preflight=True, srun={"label": ""})
    shell = {"SRUN_EXPORT_ENV": "NONE", "SLURM_EXPORT_ENV": "NONE", "SLURM_LABELIO": "1"}
    names = "$SRUN_EXPORT_ENV $SLURM_EXPORT_ENV [$SLURM_LABELIO]"
    check = f'[[ $* != *--label* ]] && echo "{names}" >$CALLS.env; echo ok n1; echo ok n2'
    assert run.end("finish", PREFLIGHT=check, **shell)[0] == "done"
    assert (tmp_path / "calls.env").read_text() == "ALL ALL []\n"


def test_the_ranks_meet_where_nothing_listens(tmp_path):
    import socket

    run = Run(tmp_path)
    with socket.socket() as listener:
        listener.bind(("", 16000 + 7 * 101))
        listener.listen()
        run.end('echo "$TANDEM_PORT" >port; finish')
    assert (tmp_path / "run/port").read_text() == f"{16000 + 7 * 101 + 17}\n"
