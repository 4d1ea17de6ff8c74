"""The process groups of a job: their timeouts, and the open files that they need."""

from __future__ import annotations

import os
import re
import resource
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from trainer.checkpoint.publication import Ranks
from trainer.config import WatchConfig
from trainer.device import (
    ENDLESS,
    FILES,
    GRACE_SECONDS,
    allow_open_files,
    background_group,
    limit_waiting,
)
from trainer.errors import TrainingError


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def timeouts():
    limit_waiting(WatchConfig().hang_timeout_s)
    return timeout_of(dist.group.WORLD), timeout_of(background_group())


def test_collectives_wait_until_the_hang_watch_has_written_its_stacks():
    world, beside = run_distributed(timeouts, 1)[0]
    watch = timedelta(seconds=WatchConfig().hang_timeout_s)
    assert watch < world == watch + timedelta(seconds=GRACE_SECONDS) < beside


def timeout_before_the_config_is_known():
    from trainer.learners.engine import join_process_group

    join_process_group()
    return timeout_of(dist.group.WORLD)


def test_ranks_wait_for_rank_0_as_long_as_it_encodes_examples():
    assert run_distributed(timeout_before_the_config_is_known, 1)[0] == ENDLESS


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def a_rank_of_a_job(folder):
    """The number of open files before and after the job's engines and writer are created."""
    from tests.trainer import tiny
    from trainer.learners.engine import join_process_group
    from trainer.watch.ranks import HangWatch, run_on_rank_zero

    before = descriptors()
    join_process_group()
    tiny.learners((1, 0, 2), 2, 1)
    Ranks().agree(lambda: None)
    with HangWatch(folder / f"{dist.get_rank()}.log", 60) as watch:
        run_on_rank_zero(lambda heartbeat: None, watch)
        return before, descriptors()


def test_a_job_needs_one_group_besides_that_of_training(tmp_path):
    ranks = 3
    for before, after in run_distributed(a_rank_of_a_job, ranks, tmp_path):
        assert after - before <= ranks + 3 + 1, "the log, and one gloo group"


def test_the_limit_of_open_files_is_raised_to_what_is_needed():
    limits = {}
    patch = partial(mock.patch.object, resource)
    with (
        patch("getrlimit", lambda kind: (1024, 4096)),
        patch("setrlimit", lambda kind, new: limits.update(new=new)),
    ):
        allow_open_files(8)
        assert not limits
        allow_open_files(512)
        assert limits["new"] == (2 * 515 + FILES, 4096)
        with pytest.raises(TrainingError, match=r"4096 ranks need 8710 .* the limit is 4096"):
            allow_open_files(4096)


def joining_fails(said):
    """The message where NCCL says this as it connects the ranks, which it does as they join."""
    from trainer.learners import engine

    error = dist.DistBackendError(said)
    with (
        mock.patch.object(engine.deepspeed, "init_distributed", side_effect=error),
        pytest.raises(TrainingError) as raised,
    ):
        engine.join_process_group()
    return str(raised.value)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("Duplicate GPU detected : rank 1 and rank 0", "rank 0 computes on the same GPU"),
        (
            "Bootstrap : no socket interface found",
            r"rank 0 cannot meet the other ranks at \S+: Bootstrap : no socket interface found;",
        ),
    ],
)
def test_ranks_that_nccl_cannot_connect_are_told_why(last, told):
    said = f"NCCL error in: NCCLUtils.cpp:77\nLast error:\n{last}\nException raised from init\nat"
    assert re.match(told, run_distributed(joining_fails, 1, said)[0])


def a_network_that_is_not_there():
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such"
    with pytest.raises(TrainingError) as raised:
        background_group()
    return str(raised.value)


def test_a_network_that_is_not_there_is_told_in_a_line():
    message = run_distributed(a_network_that_is_not_there, 1)[0]
    assert re.search("cannot meet the other ranks at .* find address for: no-such; see", message)
