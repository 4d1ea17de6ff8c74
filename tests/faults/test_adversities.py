"""Disks, shards, clocks and servers that fail under the real job: it goes on, or says one line."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.jobs import arguments, losses, reach, run, start, start_sabotaged, tandem_command
from trainer.checkpoint.folder import all_steps

pytestmark = pytest.mark.slow
STEPS = 300
LONG = (
    *(f"steps={STEPS}", "checkpoint.every=10", "evaluation.every=100"),
    *("students=null", "batch.micro_batch=4"),
)
KEY = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A small file system of its own at `folder`; skips where none can be had."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if subprocess.run(command).returncode:
        pytest.skip("this machine does not let root mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def calm(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("calm")
    process = start(corpus, runs, *LONG)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return losses(runs / "tiny")


def test_a_disk_without_room_for_a_checkpoint_costs_checkpoints_only(calm, corpus, tmp_path):
    """Once there is room again, saves succeed again; the losses never notice."""
    with mounted(tmp_path, "size=120m"):
        process = start(corpus, tmp_path, *LONG, "checkpoint.max_failures=1000")
        reach(process, tmp_path / "tiny", 40)
        ballast = tmp_path / "ballast"
        ballast.write_bytes(bytes(70_000_000))
        intact = all_steps(tmp_path / "tiny" / "checkpoints")
        reach(process, tmp_path / "tiny", 100)
        assert set(all_steps(tmp_path / "tiny" / "checkpoints")) >= set(intact[-1:])
        ballast.unlink()
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert re.search(
            r"checkpoint of step \d+ not written: .* GB free, the checkpoint needs", errors
        )
        assert all_steps(tmp_path / "tiny" / "checkpoints")[-1] == STEPS
        assert losses(tmp_path / "tiny") == calm


def test_too_many_failed_saves_in_a_row_end_the_run(corpus, tmp_path):
    with mounted(tmp_path, "size=60m"):
        process = start(corpus, tmp_path, *LONG, "checkpoint.max_failures=2")
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "Traceback" not in errors
        last = errors.strip().splitlines()[-1]
        assert re.match(r"tandem: 2 saves in a row failed: .* free some space", last)


def test_a_run_folder_that_cannot_be_written_is_one_line(corpus, tmp_path):
    with mounted(tmp_path, "ro"):
        process = start(corpus, tmp_path)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors == (
        f"tandem: {tmp_path / 'tiny'}: Read-only file system; make room or choose another folder\n"
    )


def test_a_shard_that_vanishes_is_one_line_and_comes_back_without_a_trace(calm, corpus, tmp_path):
    """What has been read of it is trained on; a job that must read it names it, and ends."""
    mine = tmp_path / "corpus"
    shutil.copytree(corpus, mine)
    process = start(mine, tmp_path, *LONG)
    reach(process, tmp_path / "tiny", 20)
    (shard,) = (mine / "train").glob("*.tar")
    shard.rename(mine / "elsewhere")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    without = start(mine, tmp_path, *LONG)
    _, errors = without.communicate(timeout=600)
    assert without.returncode == 1
    (line,) = errors.strip().splitlines()
    assert line.startswith("tandem: ")
    assert str(shard) in line
    (mine / "elsewhere").rename(shard)
    again = start(mine, tmp_path, *LONG)
    _, errors = again.communicate(timeout=600)
    assert again.returncode == 0, errors
    assert losses(tmp_path / "tiny") == calm


def test_a_clock_that_jumps_changes_nothing(calm, corpus, tmp_path):
    """A year forward on one rank, in the middle of training."""
    process = start_sabotaged("jumps@1", corpus, tmp_path, *LONG)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert losses(tmp_path / "tiny") == calm


def test_a_tracking_server_that_never_answers_costs_nothing_but_a_line(calm, corpus, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = run(
            tandem_command(*arguments(corpus, tmp_path, *LONG, "log.wandb=auto")),
            WANDB_API_KEY=KEY,
            WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
        )
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    (line,) = errors.strip().splitlines()
    assert "Weights & Biases did not answer in time; metrics.jsonl has every row" in line
    assert losses(tmp_path / "tiny") == calm
