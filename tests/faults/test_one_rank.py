"""A fault on one rank of the real job: all ranks end, and one reason is given."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from functools import partial

import pytest

from cluster.ranks import reserved_port
from configs import progress
from tests.conftest import command_environment
from tests.faults.jobs import arguments, as_rank, end, processes_of, start_sabotaged
from tests.faults.sabotaged import sabotage
from tests.fork_server import Program
from trainer.checkpoint.folder import all_steps

LINES = ("checkpoint.every=2", "watch.replicas_every=1")


def test_a_flipped_bit_is_found_before_the_next_checkpoint(corpus, tmp_path):
    code, errors = end(start_sabotaged("flips@1", corpus, tmp_path, *LINES))
    assert code == 1
    host = socket.gethostname()
    assert errors == (
        f"tandem: step 4: students/tinybert: the weights of ranks 0 on {host} and 1 on {host} "
        "differ, although they must be equal: memory or a device there is faulty; start again "
        "without that machine, to resume from the newest checkpoint\n"
    )
    assert all_steps(tmp_path / "tiny" / "checkpoints") == [2]


@pytest.mark.parametrize(
    ("kind", "rank", "others_wait_in"),
    [
        ("sleeps", 1, "step.py"),
        pytest.param("freezes", 1, "step.py", marks=pytest.mark.slow),
        pytest.param("sleeps in an export", 0, "ranks.py", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_ends_the_job_with_every_stack_in_the_logs(
    kind, rank, others_wait_in, corpus, tmp_path
):
    process = start_sabotaged(f"{kind}@{rank}", corpus, tmp_path, "watch.hang_timeout_s=15")
    code, errors = end(process)
    assert code > 1
    assert "was ended by SIGALRM" in errors
    logs = tmp_path / "tiny" / "logs"
    assert "sabotaged.py" in stacks((logs / f"rank-00{rank}.log").read_text())
    waiting = (logs / f"rank-00{1 - rank}.log").read_text()
    assert others_wait_in in stacks(waiting) or "Traceback" in waiting
    assert not processes_of(tmp_path)


def stacks(log: str) -> str:
    """The log from faulthandler's first stack on."""
    return "".join(re.split(r"(?=Current thread 0x|Thread 0x)", log)[1:])


@pytest.mark.slow
def test_a_rank_that_waits_for_others_says_where(corpus, tmp_path):
    """As where the other machine cannot reach the address."""
    with reserved_port() as port:
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        alone = Program(
            *(as_rank, impatient, arguments(corpus, tmp_path)),
            environment=command_environment(**place),
        )
        with pytest.raises(subprocess.TimeoutExpired):
            alone.wait(8)
        os.kill(alone.pid, signal.SIGKILL)
    _, errors = alone.communicate(10)
    assert f"meeting the other ranks at 127.0.0.1:{port} · " in errors


def impatient() -> None:
    progress.LINE_SECONDS = 1.0


@pytest.mark.slow
def test_a_bug_on_one_rank_is_shown_once(corpus, tmp_path):
    code, errors = end(start_sabotaged("fails@1", corpus, tmp_path))
    assert code == 1
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("RuntimeError: a bug of rank 1")
    assert "Connection closed" in (tmp_path / "tiny" / "logs" / "rank-000.log").read_text()
    assert not processes_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["", ",sleeps@0"], ids=["in a collective", "elsewhere"])
def test_without_a_launcher_one_rank_speaks_and_all_end(other, corpus, tmp_path):
    """As under srun: no launcher reads the ranks' output or ends ranks that are stuck."""
    prepare = partial(sabotage, f"complains@1{other}")
    with reserved_port() as port:
        place = {
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks = [
            Program(
                *(as_rank, prepare, arguments(corpus, tmp_path)),
                environment=command_environment(RANK=str(rank), LOCAL_RANK=str(rank), **place),
            )
            for rank in range(2)
        ]
        outcomes = [end(rank) for rank in ranks]
    assert outcomes == [(1, ""), (1, "tandem: rank 1 has no such file\n")]
