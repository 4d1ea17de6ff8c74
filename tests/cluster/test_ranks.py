"""Ranks from each launcher's variables; SLURM's node lists against SLURM's own expansion."""

import random
import shutil
import subprocess

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import LaunchError
from cluster.ranks import (
    Ranks,
    derive,
    export,
    first_host,
    free_port,
    is_launched,
    job_port,
    reserved_port,
    tasks_on_node,
)
from tests.thorough import IS_THOROUGH

# As seen by the third task of a step of 2 + 2 tasks (Debian's SLURM 22.05).
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07,11]",
}
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_nothing_set_is_a_job_of_one_process():
    ranks = derive({})
    assert (ranks.rank, ranks.world_size, ranks.local_rank) == (0, 1, 0)
    assert not is_launched({})


def test_torchrun():
    assert derive(TORCHRUN) == Ranks(3, 4, 1, 2, 1, "10.0.0.1", 29500)
    assert is_launched(TORCHRUN)


def test_slurm_step():
    assert derive(SLURM) == Ranks(2, 4, 0, 2, 1, "gpu07", job_port(4711, 0))
    assert is_launched(SLURM)


def test_torchrun_inside_a_slurm_step_wins():
    one_per_node = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert derive(one_per_node | TORCHRUN).rank == 3


def test_requeued_job_meets_on_another_port():
    first, second = derive(SLURM), derive(SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert first.master_port != second.master_port
    assert 1024 < second.master_port < 32768


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", None])
def test_batch_and_interactive_shells_are_not_ranks(missing):
    env = {k: v for k, v in SLURM.items() if k != missing}
    env |= {} if missing else {"SLURM_PTY_PORT": "4000"}
    assert derive(env).world_size == 1
    assert not is_launched(env)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "RANK is set but LOCAL_RANK is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be a port"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0: must be a port"),
        (TORCHRUN | {"MASTER_PORT": "1" * 5000}, "is not a number"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "8 processes on this node, but 4 in all"),
        (SLURM | TORCHRUN, "RANK=3, but SLURM_PROCID=2"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_NODEID"}, "SLURM_NODEID is not set"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[7"}, "cannot read the node list"),
    ],
)
def test_inconsistent_environments_are_one_line(env, words):
    with pytest.raises(LaunchError, match=words.replace("(", r"\(")) as error:
        derive(env)
    assert "\n" not in str(error.value)


def test_export_is_read_back():
    env: dict[str, str] = {}
    export(derive(SLURM), env)
    assert derive(env) == derive(SLURM)


def test_ports_are_below_the_ephemeral_range():
    assert 1024 < free_port() < 32768


def test_a_reserved_port_is_the_jobs_alone_and_its_ranks_meet_there(monkeypatch):
    drawn = random.Random(1)
    monkeypatch.setattr(random, "randrange", drawn.randrange)
    with reserved_port() as port:
        drawn.seed(1)  # another start draws the same numbers
        assert free_port() != port
        for _ in range(2):  # and again, once its first store is gone
            store = dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True)
            store.set("rank 0", "here")
            assert store.get("rank 0") == b"here"
            del store


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("4(x2),3,1(x2)", [4, 4, 3, 1, 1])]
)
def test_tasks_on_node(text, counts):
    assert [tasks_on_node(text, node) for node in range(len(counts))] == counts


spans = st.tuples(st.integers(0, 120), st.integers(0, 5)).map(
    lambda pair: f"{pair[0]:03d}-{pair[0] + pair[1]:03d}" if pair[1] else f"{pair[0]:03d}"
)
groups = st.builds(
    lambda prefix, inner: f"{prefix}[{','.join(inner)}]" if inner else f"{prefix}1",
    st.from_regex(r"[a-z]([a-z0-9-]{0,6}[a-z-])?", fullmatch=True),
    st.lists(spans, max_size=3),
)


@pytest.mark.skipif(not shutil.which("scontrol"), reason="needs SLURM's scontrol (slurm-client)")
@settings(max_examples=100 if IS_THOROUGH else 15)
@given(st.lists(groups, min_size=1, max_size=3).map(",".join))
def test_first_host_is_slurms_own(tmp_path_factory, node_list):
    conf = tmp_path_factory.getbasetemp() / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    command = ["scontrol", "show", "hostnames", node_list]
    shown = subprocess.run(
        command, env={"SLURM_CONF": str(conf)}, capture_output=True, text=True, timeout=60
    )
    assert first_host(node_list) == shown.stdout.split()[0]
