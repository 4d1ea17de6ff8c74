"""What the batch script decides, with `srun` and `scontrol` played by small shell scripts.

The same decisions are taken on a real SLURM in tests/slurm; here every branch is cheap.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.script import Job, build

FAKES = {
    "srun": """
        case "$*" in
        *cluster.preflight*) eval "${PREFLIGHT:-echo ok n1; echo ok n2}" ;;
        *) eval "$TRAIN" ;;
        esac
    """,
    "scontrol": """
        echo "$*" >>"$CALLS"
        case "$*" in
        requeue*) echo "$REFUSAL" >&2; [ -z "$REFUSAL" ] ;;
        *hostnames*) printf 'n1\\nn2\\n' ;;
        *"show job"*) echo "JobId=7 Reason=${REASON:-None} ExcNodeList=${EXCLUDED:-(null)} End=1" ;;
        esac
    """,
}

STEP = """step() { echo '{"step": '$1'}' >>metrics.jsonl; }"""


class Run:
    def __init__(self, folder: Path, **cluster) -> None:
        self.folder = folder
        self.submission = folder / "run/submissions/001"
        self.submission.mkdir(parents=True)
        (folder / "bin").mkdir()
        for name, text in FAKES.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
            (folder / "bin" / name).chmod(0o755)
        self.chained = cluster.pop("chained", False)
        self.cluster = ClusterConfig(**({"nodes": "2", "preflight": False} | cluster))

    def start(self, train: str, restart: int = 0, **env: str) -> subprocess.Popen:
        run = self.folder / "run"
        job = Job("j", run, self.submission, self.folder, "python", chained=self.chained)
        script = self.folder / "job.sbatch"
        script.write_text(build(job, self.cluster))
        env |= {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "TRAIN": f'cd {run}; step() {{ echo "{{\\"step\\": $1}}" >>metrics.jsonl; }}; {train}',
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        if restart:
            env["SLURM_RESTART_COUNT"] = str(restart)
        options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen(["bash", script], env=env, **options)

    def end(self, train: str, restart: int = 0, **env: str) -> tuple[str, int, str]:
        process = self.start(train, restart, **env)
        self.output = process.communicate(timeout=20)[0]
        return self.last(process.returncode)

    def last(self, code: int) -> tuple[str, int, str]:
        event = json.loads((self.folder / "run/slurm.jsonl").read_text().splitlines()[-1])
        return event["event"], code, event["reason"]

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def requeued(self) -> int:
        return self.calls.count("requeue 7")


@pytest.mark.parametrize(
    ("train", "verdict", "code", "reason"),
    [
        ("exit 0", "done", 0, "finished"),
        ("exit 2", "final", 2, "code 2"),
        ("exit 1", "final", 1, "code 1"),
        ("step 5; exit 1", "requeue", 1, "code 1"),
        ("exit 75", "final", 75, "stopped on request"),
        ("kill -9 $$", "requeue", 137, "code 137"),
    ],
)
def test_exit_codes(tmp_path, train, verdict, code, reason):
    run = Run(tmp_path)
    event, returned, why = run.end(train)
    assert (event, returned) == (verdict, code)
    assert reason in why
    assert run.requeued == (verdict == "requeue")


def test_warning_is_passed_on_and_leads_to_a_requeue(tmp_path):
    run = Run(tmp_path)
    process = run.start("trap 'exit 75' USR1; touch ready; while :; do sleep 0.05; done")
    wait_for(tmp_path / "run/ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert run.last(process.returncode) == ("requeue", 75, "the time limit")
    assert run.requeued == 1


@pytest.mark.parametrize(("reason", "verdict"), [("None", "ended"), ("TimeLimit", "requeue")])
def test_ended_by_slurm(tmp_path, reason, verdict):
    """``scancel`` and the end of the time both come as TERM; SLURM's reason tells them apart."""
    run = Run(tmp_path)
    train = "trap 'exit 75' TERM; touch ready; while :; do sleep 0.05; done"
    process = run.start(train, REASON=reason)
    wait_for(tmp_path / "run/ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert run.last(process.returncode)[:2] == (verdict, 75)
    assert run.requeued == (verdict == "requeue")


def test_preempted_with_a_grace(tmp_path):
    """SLURM tells the ranks alone. No budget is spent: the job could make no step."""
    run = Run(tmp_path, fruitless_requeues=0)
    given = {"REASON": "None PreemptTime=2026-01-01T00:00:00"}
    assert run.end("exit 75", **given) == ("requeue", 75, "preempted")
    assert run.end("exit 75", REASON="None PreemptTime=None")[0] == "final"


def test_a_stop_that_a_person_asked_for_is_final_even_at_the_time_limit(tmp_path):
    run = Run(tmp_path)
    train = "trap 'exit 75' USR1; mkdir requests; touch requests/stop.json ready; "
    process = run.start(train + "while :; do sleep 0.05; done")
    wait_for(tmp_path / "run/ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert run.last(process.returncode) == ("final", 75, "stopped on request")
    assert run.requeued == 0


def test_a_copy_that_slurm_requeued_does_not_start_after_a_stop(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "run/requests").mkdir()
    (tmp_path / "run/requests/stop.json").touch()
    assert run.end("touch started", restart=1) == ("final", 1, "stopped on request")
    assert not (tmp_path / "run/started").exists()
    assert run.end("touch started")[0] == "done"  # a person submitted it again


def test_a_job_that_another_one_kept_out_is_not_requeued(tmp_path):
    """The other one's steps are not this one's."""
    run = Run(tmp_path)
    attempt = """mkdir attempts; echo '{"job": "6"}' >attempts/000001.json"""
    assert run.end(f"{attempt}; step 5; exit 1")[:2] == ("final", 1)
    own = """echo '{"job": "7"}' >attempts/000002.json"""
    assert run.end(f"{own}; step 6; exit 1")[:2] == ("requeue", 1)


def test_warning_during_preflight_starts_no_ranks(tmp_path):
    run = Run(tmp_path, preflight=True)
    process = run.start("touch started", PREFLIGHT="touch $CALLS.ready; sleep 1")
    wait_for(tmp_path / "calls.ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert run.last(process.returncode)[:2] == ("requeue", 75)
    assert not (tmp_path / "run/started").exists()


def test_fruitless_attempts_end_the_job(tmp_path):
    """Two are allowed: the first stops at step 5, and those after it never get further."""
    run = Run(tmp_path, fruitless_requeues=2)
    outcomes = [run.end("step 5; kill -9 $$", restart)[0] for restart in range(4)]
    assert outcomes == ["requeue", "requeue", "requeue", "final"]
    event, code, why = run.end("step 5; kill -9 $$", 4)
    assert (event, code) == ("final", 1)
    assert "3 attempts in a row made no new step" in why
    assert run.requeued == 3


def test_progress_forgives(tmp_path):
    run = Run(tmp_path, fruitless_requeues=1)
    for restart in range(6):
        assert run.end(f"step {restart // 2 + 1}; kill -9 $$", restart)[0] == "requeue"


def test_a_saved_checkpoint_is_progress(tmp_path):
    run = Run(tmp_path, fruitless_requeues=0)
    for restart, step in enumerate(["000000008", "000000009", "000000010"]):
        train = f"mkdir -p checkpoints/step-{step}; kill -9 $$"
        assert run.end(train, restart)[0] == "requeue"
    assert run.end("kill -9 $$", 3)[0] == "final"


def test_attempts_that_never_reached_their_end_count(tmp_path):
    """A dead node leaves the account open; SLURM requeues by itself."""
    run = Run(tmp_path, fruitless_requeues=1)
    for restart in range(2):
        process = run.start("touch ready; sleep 20", restart)
        wait_for(tmp_path / "run/ready")
        (tmp_path / "run/ready").unlink()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    event, code, _ = run.end("exit 0", 2)
    assert (event, code) == ("final", 1)


def test_a_shell_that_was_cut_off_touches_nothing(tmp_path):
    """Its job was requeued elsewhere: it must neither requeue it again nor end the account."""
    run = Run(tmp_path)
    stale = run.start("touch ready; while [ ! -e go ]; do sleep 0.05; done; exit 1")
    wait_for(tmp_path / "run/ready")
    fresh = run.start("touch started; while [ ! -e stop ]; do sleep 0.05; done", restart=1)
    wait_for(tmp_path / "run/started")
    (tmp_path / "run/go").touch()
    assert "another attempt of this run has begun" in stale.communicate(timeout=20)[0]
    assert run.requeued == 0
    (tmp_path / "run/stop").touch()
    fresh.communicate(timeout=20)
    assert run.last(fresh.returncode) == ("done", 0, "finished")
    events = (tmp_path / "run/slurm.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["start", "start", "done"]


def test_submitting_the_script_again_by_hand_starts_afresh(tmp_path):
    run = Run(tmp_path, fruitless_requeues=0)
    assert run.end("kill -9 $$")[0] == "final"
    assert run.end("exit 0")[0] == "done"


def test_a_chain_goes_on_after_the_time_limit_but_not_after_a_failure(tmp_path):
    run = Run(tmp_path, chained=True)
    assert run.end("step 5; kill -9 $$")[0] == "left"
    assert run.end("exit 1")[0] == "final"
    event, code, why = run.end("exit 0")
    assert (event, code, why) == ("final", 1, "the ranks ended with code 1")
    assert run.requeued == 0


def test_a_chain_that_is_done_starts_no_more(tmp_path):
    run = Run(tmp_path, chained=True)
    assert run.end("exit 0")[0] == "done"
    assert run.end("touch started") == ("done", 0, "finished")
    assert not (tmp_path / "run/started").exists()


def test_a_bad_node_is_named_and_excluded(tmp_path):
    run = Run(tmp_path, preflight=True)
    words = "echo ok n1; echo 'bad n2: 3 of 4 GPUs found'"
    event, code, why = run.end("touch started", PREFLIGHT=words, EXCLUDED="n9")
    assert (event, code) == ("requeue", 69)
    assert "bad node n2: 3 of 4 GPUs found" in why
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n9,n2"
    assert not (tmp_path / "run/started").exists()


@pytest.mark.parametrize(
    "words",
    [
        "echo ok n1",
        "echo ok n1; echo 'srun: error: Task launch for StepId=4.0 failed on node n2: lost' >&2",
    ],
)
def test_a_silent_node_is_bad(tmp_path, words):
    run = Run(tmp_path, preflight=True)
    assert "bad node n2" in run.end("exit 0", PREFLIGHT=words)[2]
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n2"


@pytest.mark.parametrize(
    "words", ["echo 'ModuleNotFoundError'", "for n in 1 2; do echo bad n$n: full; done"]
)
def test_a_fault_of_all_nodes_excludes_none(tmp_path, words):
    run = Run(tmp_path, preflight=True)
    assert run.end("exit 0", PREFLIGHT=words)[:2] == ("final", 69)
    assert run.requeued == 0


def test_a_failure_on_a_bad_node_is_the_nodes(tmp_path):
    """Code 1 without progress is final, unless the node is to blame."""
    run = Run(tmp_path, preflight=True)
    words = "echo ok n1; [ -e $CALLS.broken ] && echo bad n2: GPU 0 is gone || echo ok n2"
    event, code, why = run.end("touch $CALLS.broken; exit 1", PREFLIGHT=words)
    assert (event, code) == ("requeue", 1)
    assert "GPU 0 is gone" in why
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n2"


def test_preflight_runs_where_the_ranks_do(tmp_path):
    """In the container that an option of srun names, say; but it is heard in any case."""
    run = Run(tmp_path, preflight=True, srun={"container-image": "my image", "output": "x"})
    words = 'printf "%s\\n" "$@" >$CALLS.check; echo ok n1; echo ok n2'
    assert run.end("exit 0", PREFLIGHT=words)[0] == "done"
    given = (tmp_path / "calls.check").read_text().splitlines()
    assert "--container-image=my image" in given
    assert given.index("--output=x") < given.index("--output=all")


def test_a_refused_requeue_is_told(tmp_path):
    run = Run(tmp_path)
    event, _, why = run.end("step 1; kill -9 $$", REFUSAL='Requested "operation" is disabled')
    assert event == "final"
    assert why.endswith("SLURM did not requeue it: Requested 'operation' is disabled")


def test_commands_around_the_ranks(tmp_path):
    run = Run(tmp_path, before=["echo before"], after=["echo after"])
    run.end("echo ranks")
    assert run.output.split()[:3] == ["before", "ranks", "after"]


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"waited in vain for {path}"
        time.sleep(0.02)
