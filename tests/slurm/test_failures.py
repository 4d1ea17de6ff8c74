"""Failing nodes, lost ranks, and misconfigured sites, on a real SLURM."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest

from cluster.scheduler import queued_jobs
from cluster.status import read_run
from tests.slurm.real_slurm import RealSlurm
from tests.slurm.submitted import Submitted
from tests.waiting import until


@pytest.mark.parametrize(
    ("patience", "saving"), [(2, 6), pytest.param(30, 0, marks=pytest.mark.slow)]
)
def test_a_chain_goes_on_when_a_node_dies(
    slurm: RealSlurm, source: Path, patience: int, saving: int
) -> None:
    """If ranks take longer to save than `srun` waits for them, srun returns 0."""
    slurm.configure(KillWait=patience)
    job = Submitted(slurm, source, hold_at=5, save_every=2, saving=saving, length=3)
    job.reach(5)
    slurm.power_off("n2")
    slurm.declare_down("n2")
    slurm.wait_job(job.id)
    job.release()
    slurm.wait_job(job.ids[2], timeout=150)
    states = [slurm.job(one)["JobState"] for one in job.ids]
    assert states == ["NODE_FAIL", "COMPLETED", "COMPLETED"], job.log
    assert job.steps == list(range(1, 31))
    assert [name for name, _ in job.events if name != "ended"] == ["start", "start", "done"]
    assert "not started: finished" in (job.run / f"logs/slurm-{job.ids[2]}.log").read_text()


def test_cancelled_before_the_first_step_is_not_finished(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, hold_at=0)
    until(lambda: len(list(job.run.glob("seen/*"))) == 4, "the ranks")
    slurm.run("scancel", job.id)
    job.end("CANCELLED")
    until(lambda: job.events[-1][0] != "start", "the end", 40)
    assert job.events[-1][0] == "ended"


@pytest.mark.slow
def test_a_frozen_slurmd(slurm: RealSlurm, source: Path) -> None:
    """SLURM considers the node dead, while its ranks keep training beside the next start's."""
    job = Submitted(slurm, source, hold_at=5)
    job.reach(5)
    slurm.freeze_daemon("n2")
    slurm.declare_down("n2")
    job.requeue_soon(1)
    job.end()
    assert {one["node"] for one in job.ranks(1)} == {"n1", "n3"}
    assert job.steps == list(range(1, 31))
    assert [name for name, _ in job.events if name != "ended"] == ["start", "start", "done"]


def test_nothing_of_the_environment_is_given_but_the_script_sets_it_right(
    slurm: RealSlurm, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's SBATCH_EXPORT, like --export=NONE, affects only the script, not the ranks."""
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("SRUN_EXPORT_ENV", "NONE")
    monkeypatch.setenv("SITE", "from the shell")
    before = ["export SITE=${SITE:-none}-before"]
    site = {"variables": {"OMP_NUM_THREADS": "3"}, "before": before}
    job = Submitted(slurm, source, steps=1, cluster=site)
    job.end()
    for rank in job.ranks():
        assert (rank["SITE"], rank["OMP_NUM_THREADS"]) == ("none-before", "3")
        assert rank["PYTHONPATH"].startswith(str(job.run))


@pytest.mark.parametrize(
    ("site", "line"),
    [
        ({"modules": ["cuda/12.4"]}, "module load cuda/12.4"),
        pytest.param(
            {"venv": "/no/venv", "python": sys.executable},
            ". /no/venv/bin/activate",
            marks=pytest.mark.slow,
        ),
        pytest.param({"before": ["false"]}, "false", marks=pytest.mark.slow),
    ],
)
def test_a_set_up_that_fails_ends_the_job(
    slurm: RealSlurm, source: Path, site: dict, line: str
) -> None:
    job = Submitted(slurm, source, cluster=site)
    job.end("FAILED")
    node = slurm.job(job.id)["BatchHost"]
    assert job.events == [("start", ""), ("final", f"{line} failed on {node}")]
    assert not job.ranks()


@pytest.mark.slow
def test_module_is_found_as_a_login_shell_finds_it(slurm: RealSlurm, source: Path) -> None:
    """In /etc/profile.d, where Environment Modules and Lmod install the file that defines it."""
    (slurm.root / "profile.d").mkdir()
    (slurm.root / "profile.d/z00_lmod.sh").write_text('module() { export SITE="$*"; }')
    for node in slurm.nodes:
        slurm.inside(node, "mount", "--bind", f"{slurm.root}/profile.d", "/etc/profile.d")
    site = {"modules": ["cuda/12.4"], "python": sys.executable}
    job = Submitted(slurm, source, steps=1, cluster=site)
    job.end()
    assert {rank["SITE"] for rank in job.ranks()} == {"load cuda/12.4"}


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        pytest.param(
            {"fail_at": 2},
            "1:0",
            "the ranks failed: data.path: no such corpus: gone",
            marks=pytest.mark.slow,
        ),
        (
            {"killed_at": 2},
            "137:0",
            "rank 1 on n1 was killed; if it ran out of memory, raise --mem",
        ),
    ],
)
def test_the_reason_is_what_the_rank_said(
    slurm: RealSlurm, source: Path, config: dict, code: str, words: str
) -> None:
    given_up = {"requeue": False, "srun": {"wait": "1"}}
    job = Submitted(slurm, source, hold_at=5, cluster=given_up, **config)
    job.end("FAILED")
    assert job.events[-1] == ("left", words)
    assert slurm.job(job.id)["ExitCode"] == code


CHECK = {"preflight": True, "before": ['export PYTHONPATH="$PWD/slow:$PYTHONPATH"']}


def slow_check(slurm: RealSlurm, seconds: int) -> None:
    """The check of the nodes takes so long, as it does where Python starts slowly."""
    (slurm.root / "slow").mkdir()
    (slurm.root / "slow/sitecustomize.py").write_text(
        "import os, sys, time\n"
        f"if 'preflight' in ' '.join(sys.orig_argv) and not os.path.exists('{slurm.root}/quick'):\n"
        f"    open('{slurm.root}/checking', 'w'); time.sleep({seconds})\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_preempted_while_the_nodes_are_checked(slurm: RealSlurm, source: Path, nodes: str) -> None:
    slow_check(slurm, 60)
    job = Submitted(slurm, source, steps=3, cluster={**CHECK, "nodes": nodes})
    until((slurm.root / "checking").exists, "the check")
    urgent = ("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "--wrap=true")
    slurm.wait_job(slurm.run(*urgent).strip(), "COMPLETED")
    (slurm.root / "quick").touch()
    job.requeue_soon(1)
    job.end(timeout=150)
    assert job.steps == [1, 2, 3]
    assert job.events[1] == ("requeue", "preempted")
    assert slurm.job(job.id)["ExcNodeList"] == "(null)"


@pytest.mark.slow
def test_the_controller_is_down_when_the_ranks_have_saved(slurm: RealSlurm, source: Path) -> None:
    job = Submitted(slurm, source, hold_at=5)
    job.reach(5)
    first = slurm.job(job.id)["BatchHost"]
    slurm.pause_controller()
    # As SLURM does at the limit; through the controller the signal might be lost with it.
    slurm.inside(first, "pkill", "-USR1", "-f", "slurm_script")
    until(lambda: list(job.run.glob("checkpoints/*")), "the checkpoint")
    time.sleep(8)  # longer than the MessageTimeout
    slurm.resume_controller()
    # SLURM itself takes a minute to find out that the requeued start has ended.
    slurm.wait_job(job.id, "PENDING", timeout=200)
    job.requeue_soon(1)
    job.end()
    assert job.steps == list(range(1, 31))
    assert ("requeue", "the time limit") in job.events


@pytest.mark.slow
def test_a_task_of_an_array_submits_a_job(slurm: RealSlurm, source: Path) -> None:
    """Its variables are handed on by sbatch; the job requeues itself, and not the array's task."""
    job = Submitted(slurm, source, hold_at=5)
    slurm.run("scancel", job.id)
    job.end("CANCELLED")
    script = next(job.run.glob("submissions/*/job.sbatch"))
    shell = f"sbatch --parsable {script} >child; while [ ! -e over ]; do sleep 0.2; done"
    parent = slurm.run("sbatch", "--parsable", "--array=3", "-N1", f"--wrap={shell}").strip()
    until(lambda: (slurm.root / "child").exists() and (slurm.root / "child").read_text(), "it")
    job.id = (slurm.root / "child").read_text().strip()
    job.reach(5)
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    job.requeue_soon(1)
    job.end()
    assert slurm.job(f"{parent}_3")["Restarts"] == "0"
    (slurm.root / "over").touch()


def read_only(slurm: RealSlurm, node: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    slurm.inside(node, "mount", "--bind", str(folder), str(folder))
    remount = shlex.join(["mount", "-o", "remount,bind,ro", str(folder)])
    # It is busy while a daemon ends what it wrote for the job before.
    slurm.inside(node, "bash", "-c", f"until {remount}; do sleep 0.1; done")


@pytest.mark.slow
@pytest.mark.parametrize("within", ["", "submissions/001/accounts"])
def test_a_first_node_with_a_read_only_folder(slurm: RealSlurm, source: Path, within: str) -> None:
    """It gives the job back. Where the log and the events can be written, it says why."""
    slurm.run("scontrol", "update", "partition=main", "state=down")
    job = Submitted(slurm, source, steps=3)
    read_only(slurm, "n1", job.run / within)
    slurm.run("scontrol", "update", "partition=main", "state=up")
    job.requeue_soon(1)
    assert slurm.job(job.id)["ExcNodeList"] == "n1"
    job.end()
    assert job.steps == [1, 2, 3]
    assert {rank["node"] for rank in job.ranks(1)} == {"n2", "n3"}
    account = job.run / within / job.id
    why = f"n1 cannot write to {account} (read-only, full, or over quota)"
    said = [("requeue", why)] if within else []
    assert job.events == [*said, ("start", "restart 1"), ("done", "finished")]


def test_a_first_node_that_cannot_start_a_batch_shell(slurm: RealSlurm, source: Path) -> None:
    """SLURM itself requeues the job, and holds it; status says how to let it go on."""
    read_only(slurm, "n1", slurm.home / "spool/n1")
    job = Submitted(slurm, source, steps=3)
    until(lambda: slurm.job(job.id)["Restarts"] == "1", "SLURM's requeue")
    slurm.wait_job(job.id, "PENDING", timeout=120)  # COMPLETING before, while SLURM cleans up
    held = read_run(job.run, queued_jobs())
    assert held.state == "queued"
    assert held.reason.endswith(f"`scontrol release {job.id}`")
    slurm.run("scontrol", "update", f"jobid={job.id}", "ExcNodeList=n1")
    slurm.run("scontrol", "release", job.id)
    job.requeue_soon(1)
    job.end()
    assert job.events == [("start", "restart 1"), ("done", "finished")]
