"""Failing nodes, lost ranks, and misconfigured sites, on a real SLURM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.real_slurm import RealSlurm
from tests.slurm.submitted import Submitted
from tests.waiting import until


@pytest.mark.parametrize(("patience", "saving"), [(2, 6), (30, 0)])
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
        ({"venv": "/no/venv", "python": sys.executable}, ". /no/venv/bin/activate"),
        ({"before": ["false"]}, "false"),
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
        ({"fail_at": 2}, "1:0", "the ranks failed: data.path: no such corpus: gone"),
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
