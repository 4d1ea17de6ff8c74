"""Jobs on a real SLURM: submitted, warned, requeued, cancelled, and preempted."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from cluster import LaunchError, commands
from cluster.scheduler import expected_start, queued_jobs
from cluster.status import read_run
from tests.slurm.real_slurm import RealSlurm, requeue_soon
from tests.slurm.submitted import Submitted
from tests.waiting import until


def test_two_nodes(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, steps=3)
    job.end()
    assert job.steps == [1, 2, 3]
    ranks = job.ranks()
    assert [one["rank"] for one in ranks] == [0, 1, 2, 3]
    assert [one["local_rank"] for one in ranks] == [0, 1, 0, 1]
    assert [one["node"] for one in ranks] == ["n1", "n1", "n2", "n2"]
    assert {(one["world_size"], one["local_world_size"]) for one in ranks} == {(4, 2)}
    assert {one["master_addr"] for one in ranks} == {"n1"}
    assert len({one["master_port"] for one in ranks}) == 1
    assert job.events == [("start", ""), ("done", "finished")]


def test_scancel_is_final(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, hold_at=3)
    job.reach(3)
    slurm.run("scancel", job.id)
    job.end("CANCELLED")
    slurm.wait_nodes("idle")
    assert slurm.job(job.id)["Restarts"] == "0"
    assert list(job.run.glob("checkpoints/*")), "the ranks saved before they ended"


@pytest.mark.slow
def test_scancel_after_the_warning_is_final(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, saving=2, hold_at=1)
    job.reach(1)
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    slurm.run("scancel", job.id)
    job.end("CANCELLED")
    slurm.wait_nodes("idle")
    assert slurm.job(job.id)["JobState"] == "CANCELLED"


def test_a_preempted_job_saves_and_goes_on(slurm: RealSlurm, source: Path) -> None:
    """SLURM gives its nodes to a more urgent job, and requeues it."""
    job = Submitted(slurm, source, hold_at=5)
    job.reach(5)
    urgent = ("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "--wrap=true")
    slurm.wait_job(slurm.run(*urgent).strip(), "COMPLETED")
    saved = [int(path.name[5:]) for path in job.run.glob("checkpoints/*")]
    assert len(saved) == 1
    job.requeue_soon(1)
    job.end()
    assert job.steps == list(range(1, 31))
    assert ("requeue", "preempted") in job.events
    until(lambda: slurm.ends(job.id) == ["PENDING", "COMPLETED"], "the states in accounting")
    assert "Exited with exit code" not in job.log, "its step has not failed for SLURM"


@pytest.mark.slow
def test_fewer_nodes_when_asked(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, save_every=2, hold_at=5, cluster={"nodes": "2-3"})
    job.reach(5)
    assert job.ranks(0)[0]["world_size"] == 6
    slurm.power_off("n3")
    slurm.declare_down("n3")
    job.requeue_soon(1)
    job.end()
    assert job.ranks(1)[0]["world_size"] == 4
    assert job.steps == list(range(1, 31))


@pytest.mark.slow
def test_a_crash_loop_ends(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, crash_at=3, cluster={"max_requeues_without_progress": 1})
    for restarts in (1, 2):
        job.requeue_soon(restarts)
    job.end("FAILED")
    assert job.events[-1][0] == "final"
    assert "gave up after 1 requeue without a new step" in job.events[-1][1]


@pytest.mark.slow
def test_preflight_names_a_bad_node_and_goes_on_without_it(slurm: RealSlurm, source: Path) -> None:
    """On n2 the run folder is mounted read-only. Labels of srun do not disguise the answers."""
    run = slurm.root / "runs/demo"
    run.mkdir(parents=True)
    slurm.inside("n2", "mount", "--bind", str(run), str(run))
    slurm.inside("n2", "mount", "-o", "remount,bind,ro", str(run))
    site = {"preflight": True, "srun": {"label": ""}}
    job = Submitted(slurm, source, steps=3, cluster=site)
    job.requeue_soon(1)
    assert slurm.job(job.id)["ExcNodeList"] == "n2"
    job.end(timeout=100)
    assert job.steps == [1, 2, 3]
    assert job.events[1] == ("requeue", f"bad node n2: {run}: Read-only file system")
    assert {one["node"] for one in job.ranks(1)} == {"n1", "n3"}


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"gpus_per_node": "2"}, {"sbatch": {"gres": "gpu:2"}}])
def test_one_rank_per_gpu(slurm: RealSlurm, source: Path, asked: dict) -> None:
    job = Submitted(slurm, source, steps=1, cluster={"nodes": "1", **asked})
    job.end()
    assert [one["local_rank"] for one in job.ranks()] == [0, 1]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in job.ranks()} == {"0,1"}, (
        "every rank sees all, for NCCL's sake"
    )


@pytest.mark.slow
def test_the_time_limit_itself(slurm: RealSlurm, source: Path) -> None:
    """Two minutes of SLURM's own clock: the warning and the restart are SLURM's."""
    limits = {"sbatch": {"time": "0:01:30"}, "warning_seconds": 45}
    job = Submitted(slurm, source, steps=150, seconds=1, cluster=limits)
    job.reach(1)
    until(lambda: job.events[-1][0] == "done", "the end", 400)
    assert job.steps == list(range(1, 151))
    assert ("requeue", "the time limit") in job.events
    until(lambda: slurm.ends(job.id)[-1:] == ["COMPLETED"], "the states in accounting")
    assert {*slurm.ends(job.id)} == {"PENDING", "COMPLETED"}
    assert "Exited with exit code" not in job.log, "its step has not failed for SLURM"


@pytest.mark.slow
def test_a_limit_reached_without_having_saved(slurm: RealSlurm, source: Path) -> None:
    """The ranks ignore the warning, and SLURM ends them; the job is restarted nevertheless."""
    limits = {"sbatch": {"time": "0:01:00"}, "warning_seconds": 5}
    job = Submitted(slurm, source, steps=2, seconds=300, cluster=limits)
    until(lambda: job.run.joinpath("slurm.jsonl").exists() and len(job.events) > 1, "it", 300)
    assert job.events[1] == ("requeue", "the time limit, before the ranks had saved")


@pytest.mark.slow
def test_array_of_seeds(slurm: RealSlurm, source: Path) -> None:
    """Only the task whose id equals the array's is warned; the other keeps training."""
    job = Submitted(slurm, source, hold_at=5, seeds=(3, 7), cluster={"nodes": "1"})
    runs = [job.run.with_name(f"demo-seed{seed}") for seed in (3, 7)]

    def events(run: Path) -> list[dict]:
        file = run / "slurm.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    until(lambda: all((run / "metrics.jsonl").exists() for run in runs), "both")
    (warned,) = [number for number, run in enumerate(runs) if events(run)[0]["job"] == job.id]
    task = f"{job.id}_{warned}"
    slurm.run("scancel", "--batch", "--signal=USR1", task)
    requeue_soon(slurm, task, 1)
    for run in runs:
        (run / "go").touch()
    until(lambda: all(events(run)[-1]["event"] == "done" for run in runs), "the end", 60)
    assert [one["event"] for one in events(runs[warned])] == ["start", "requeue", "start", "done"]
    assert [one["event"] for one in events(runs[1 - warned])] == ["start", "done"]


def test_chain(slurm: RealSlurm, source: Path) -> None:
    """Two links: the first is warned, and the second does the remaining work."""
    job = Submitted(slurm, source, hold_at=5, length=2)
    job.reach(5)
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    slurm.wait_job(job.id)
    job.release()
    slurm.wait_job(job.ids[1])
    assert job.steps == list(range(1, 31))
    assert [name for name, _ in job.events] == ["start", "left", "start", "done"]


def test_what_waits_of_a_chain_is_cancelled(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, hold_at=2, length=3)
    job.reach(2)
    lines, has_started = commands.cancel_waiting(job.run, is_live=True)
    assert (lines, has_started) == (
        [f"{job.run}: cancelled before it started: job {', '.join(job.ids[1:])}"],
        True,
    )
    for one in job.ids[1:]:
        slurm.wait_job(one, "CANCELLED")
    assert slurm.job(job.id)["JobState"] == "RUNNING"


@pytest.mark.slow
def test_the_end_is_told_of_a_job_that_is_cancelled_not_of_one_that_is_requeued(
    slurm: RealSlurm, source: Path
) -> None:
    told = slurm.root / "told"
    line = f'echo "$TANDEM_END: $TANDEM_REASON" >>{told}'
    job = Submitted(slurm, source, steps=1000, cluster={"at_end": [line], "max_requeues": 3})
    job.reach(2)
    slurm.run("scontrol", "requeue", job.id)
    job.requeue_soon(1)
    until(lambda: job.events[-1][0] == "start" and len(job.events) > 2, "the second start", 60)
    until(lambda: len(job.ranks(restart=1)) == 4, "its ranks", 60)
    assert not told.exists()
    slurm.run("scancel", job.id)
    job.end("CANCELLED")
    until(told.exists, "the word of the end")
    assert told.read_text() == "stopped: cancelled\n"
    lost = [reason for event, reason in job.events if event in ("ended", "requeue")]
    assert lost == ["preempted, or a node failed: SLURM requeues it", "cancelled"]


@pytest.mark.slow
def test_a_container_and_modules(
    slurm: RealSlurm, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for apptainer and Lmod record their calls; apptainer also runs its command."""
    record = slurm.root / "called"
    for name, then in (("apptainer", 'shift 2; exec "$@"'), ("module", "")):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >>{record}\n{then}\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    site = {
        "preflight": True,
        "container": ["apptainer", "exec", "my image.sif"],
        "modules": ["cuda/12.4"],
        "python": sys.executable,
    }
    job = Submitted(slurm, source, steps=2, cluster=site)
    job.end(timeout=100)
    assert job.steps == [1, 2]
    calls = record.read_text().splitlines()
    assert calls.count("module load cuda/12.4") == 1
    inside = [call for call in calls if call.startswith("apptainer exec my image.sif")]
    assert sum(" preflight " in call for call in inside) == 2  # on each node
    assert sum(" train " in call for call in inside) == 4  # each rank


def test_hostile_name(slurm: RealSlurm, source: Path) -> None:
    name = """a b"c'd $(touch pwned) `touch pwned` ; touch pwned # *"""
    odd = {"comment": f"{name} \\ %j"}
    job = Submitted(slurm, source, name=name, steps=2, cluster={"sbatch": odd})
    job.end()
    assert job.steps == [1, 2]
    assert "finished" in (job.run / f"logs/slurm-{job.id}.log").read_text()
    shown = slurm.run("squeue", "-h", "--states=all", "-j", job.id, "-o", "%j")
    assert shown.rstrip("\n") == name
    shown = slurm.run("squeue", "-h", "--states=all", "-j", job.id, "-o", "%k")
    assert shown.rstrip("\n") == odd["comment"]
    assert not list(slurm.root.rglob("pwned"))


def test_slurms_refusal_is_one_line_and_leaves_nothing(slurm: RealSlurm, source: Path) -> None:
    with pytest.raises(LaunchError, match="invalid partition specified: nope") as error:
        Submitted(slurm, source, cluster={"sbatch": {"partition": "nope"}})
    assert "\n" not in str(error.value)
    assert not list(slurm.root.glob("runs/demo/submissions/*"))


def test_second_submission_of_a_live_run_is_refused(slurm: RealSlurm, source: Path) -> None:
    first = Submitted(slurm, source, hold_at=1)
    with pytest.raises(LaunchError, match=rf"job {first.id} of this run is .*scancel {first.id}"):
        Submitted(slurm, source)


def test_editing_the_checkout_does_not_change_a_queued_job(
    slurm: RealSlurm, source: Path, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for path in source.iterdir():
        (checkout / path.name).symlink_to(path)
    (checkout / "tandem.py").unlink()
    (checkout / "tandem.py").write_bytes((source / "tandem.py").read_bytes())
    slurm.run("scontrol", "update", "partition=main", "state=down")
    job = Submitted(slurm, checkout, steps=2)
    (checkout / "tandem.py").write_text("raise SystemExit('edited')")
    slurm.run("scontrol", "update", "partition=main", "state=up")
    job.end()
    assert job.steps == [1, 2]


def test_status_knows_the_queue(slurm: RealSlurm, source: Path) -> None:
    slurm.run("scontrol", "update", "partition=main", "state=down")
    job = Submitted(slurm, source, hold_at=3)
    queued = read_run(job.run, queued_jobs())
    assert (queued.state, queued.reason, queued.job) == ("queued", "PartitionDown", job.id)
    slurm.run("scontrol", "update", "partition=main", "state=up")
    job.reach(3)
    running = read_run(job.run, queued_jobs())
    assert (running.state, running.steps, running.job) == ("running", 30, job.id)
    slurm.run("scancel", job.id)
    job.end("CANCELLED")
    until(lambda: not queued_jobs(), "the end of the job")
    assert read_run(job.run, queued_jobs()).state == "stopped"


def test_status_of_a_job_that_was_cancelled_while_it_waited(slurm: RealSlurm, source: Path) -> None:
    slurm.run("scontrol", "update", "partition=main", "state=down")
    job = Submitted(slurm, source)
    slurm.run("scancel", job.id)
    ended = read_run(job.run, queued_jobs())
    assert (ended.state, ended.reason) == (
        "stopped",
        f"job {job.id} left SLURM's queue before it started",
    )


@pytest.mark.parametrize(
    ("limit", "cluster", "words"),
    [
        (
            "MaxTime=30",
            {"sbatch": {"time": "1:00:00"}},
            "sbatch.time: 1:00:00 requested, but partition main",
        ),
        (
            "MaxNodes=1",
            {"nodes": "2-3"},
            "nodes: 2-3 requested, but partition main allows at most 1",
        ),
        ("State=UP", {"nodes": "9"}, "nodes: 9 requested, but partition main has 3"),
        ("State=UP", {"sbatch": {"quos": "high"}}, "sbatch: unrecognized option '--quos=high'"),
        ("State=DRAIN", {}, "Required partition not available"),
    ],
)
def test_what_will_never_run_is_refused_at_submission(
    slurm: RealSlurm, source: Path, limit: str, cluster: dict, words: str
) -> None:
    slurm.run("scontrol", "update", "partition=main", limit)
    with pytest.raises(LaunchError, match=re.escape(words)):
        Submitted(slurm, source, cluster=cluster)
    assert not (slurm.root / "runs").exists()
    assert queued_jobs() == []


def test_slurm_says_when_a_job_would_start(slurm: RealSlurm) -> None:
    script = "#!/bin/sh\n#SBATCH --nodes=3 --exclusive --time=5\nsleep 60\n"
    assert expected_start(script) is not None
    assert expected_start(script.replace("--nodes=3", "--nodes=4")) is None
