"""The process groups of a job: their timeouts, and the open files that they need."""

from __future__ import annotations

import os
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
from trainer.device import FILES, GRACE_SECONDS, allow_open_files, background_group, limit_waiting
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
