"""What is wrong with nodes: a shared address, too little memory, and which are left out."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.slurm.real_slurm import RealSlurm, requeue_soon, why_not
from tests.slurm.submitted import Submitted


@pytest.mark.slow
def test_an_interface_that_every_node_has(slurm: RealSlurm, source: Path) -> None:
    """docker0 has one address everywhere. Naming it is the fault of no node."""
    add = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; "
    for node in slurm.nodes:
        slurm.inside(node, "sh", "-c", f"{add} ip link set docker0 up")
    unnamed = Submitted(slurm, source, steps=2, cluster={"nodes": "3", "preflight": True})
    unnamed.end(timeout=150)
    assert unnamed.events == [("start", ""), ("done", "finished")]
    named = {"nodes": "3", "preflight": True, "interface": "docker0"}
    job = Submitted(slurm, source, name="named", steps=2, cluster=named)
    job.end("FAILED", timeout=150)
    words = "several nodes have the address 172.17.0.1 of docker0; set interface to another"
    assert job.events == [("start", ""), ("final", words)]
    assert slurm.job(job.id)["ExcNodeList"] == "(null)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "hours", "excluded"), [("1-2", 1, "n2,n3"), ("1-2", 48, "n2"), ("2", 1, "n2")]
)
def test_bad_nodes_are_left_out_for_a_day_while_enough_others_remain(
    slurm: RealSlurm, source: Path, nodes: str, hours: int, excluded: str
) -> None:
    """n3 was bad some hours ago. Now the run folder is read-only on n2."""
    slurm.run("scontrol", "update", "partition=main", "state=down")
    job = Submitted(slurm, source, steps=3, cluster={"nodes": nodes, "preflight": True})
    account = job.run / f"submissions/001/accounts/{job.id}"
    account.mkdir(parents=True)
    (account / "excluded").write_text(f"{int(time.time()) - 3600 * hours} n3\n")
    slurm.run("scontrol", "update", f"jobid={job.id}", "ExcNodeList=n3")
    slurm.inside("n2", "mount", "--bind", str(job.run), str(job.run))
    slurm.inside("n2", "mount", "-o", "remount,bind,ro", str(job.run))
    slurm.run("scontrol", "update", "partition=main", "state=up")
    requeue_soon(slurm, job.id, 1)
    assert slurm.job(job.id)["ExcNodeList"] == excluded
    job.end(timeout=150)
    assert job.steps == [1, 2, 3]


def test_out_of_memory_under_cgroups(source: Path, tmp_path: Path, monkeypatch) -> None:
    """The kernel kills a rank, of which srun makes exit code 1."""
    if reason := why_not():
        pytest.skip(reason)
    if not os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK):
        pytest.skip("no writable memory controller of cgroup v1")
    with RealSlurm(nodes=1, cgroups=True) as slurm:
        slurm.root = tmp_path
        monkeypatch.setenv("SLURM_CONF", str(slurm.layout.conf))
        monkeypatch.chdir(tmp_path)
        site = {"nodes": "1", "sbatch": {"mem": "200"}, "requeue": False, "srun": {"wait": "1"}}
        job = Submitted(slurm, source, hold_at=5, grow_at=2, cluster=site)
        job.end("FAILED")
        assert job.events[-1] == ("left", "rank 1 on n1 ran out of memory; raise --mem")
