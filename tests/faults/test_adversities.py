"""Failing disks, shards, clocks and servers: the real job continues, or ends in one line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, command_environment
from tests.faults.jobs import (
    LIMIT,
    STOPPED,
    arguments,
    end,
    finish,
    losses,
    newest_step,
    reach,
    start,
    start_program,
    start_sabotaged,
)
from tests.faults.sabotaged import STEP
from tests.mounting import mounted
from tests.waiting import until
from trainer.checkpoint.folder import all_steps

pytestmark = pytest.mark.slow
STEPS = 300
LONG = (
    *(f"steps={STEPS}", "checkpoint.every=10", "evaluation.every=100"),
    *("students=null", "batch.micro_batch=4"),
)
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def calm(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("calm")
    finish(start(corpus, runs, *LONG))
    return losses(runs / "tiny")


def test_a_disk_without_room_for_a_checkpoint_costs_checkpoints_only(calm, corpus, tmp_path):
    """Once there is room again, saves succeed; the losses are not affected."""
    with mounted(tmp_path, "size=120m"):
        process = start(corpus, tmp_path, *LONG, "checkpoint.max_failures=1000")
        reach(process, tmp_path / "tiny", 40)
        ballast = tmp_path / "ballast"
        ballast.write_bytes(bytes(70_000_000))
        intact = all_steps(tmp_path / "tiny" / "checkpoints")
        reach(process, tmp_path / "tiny", 100)
        assert set(all_steps(tmp_path / "tiny" / "checkpoints")) >= set(intact[-1:])
        ballast.unlink()
        errors = finish(process)
        assert "Traceback" not in errors
        assert re.search(
            r"checkpoint of step \d+ was not written: .* GB free, the checkpoint needs", errors
        )
        assert all_steps(tmp_path / "tiny" / "checkpoints")[-1] == STEPS
        assert losses(tmp_path / "tiny") == calm


def fill(file: Path) -> None:
    """Fill up all free space."""
    with file.open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(2**20)):
            pass
    assert shutil.disk_usage(file.parent).free == 0


def test_a_disk_with_not_a_byte_free_between_checkpoints_ends_nothing(calm, corpus, tmp_path):
    """The rows of the metrics wait in memory, and in the end all of them are written."""
    with mounted(tmp_path, "size=120m"):
        process = start(corpus, tmp_path, *LONG, "checkpoint.max_failures=1000")
        reach(process, tmp_path / "tiny", 40)
        fill(tmp_path / "ballast")
        time.sleep(1.0)
        assert newest_step(tmp_path / "tiny") < STEPS
        (tmp_path / "ballast").unlink()
        errors = finish(process)
        assert re.search(
            r"metrics\.jsonl: No space left on device; its rows are kept in mem", errors
        )
        assert "Traceback" not in errors
        assert losses(tmp_path / "tiny") == calm


def start_on_terminal(nohup: bool, command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The job as session leader of its own terminal, and our end of the terminal."""
    ours, theirs = pty.openpty()

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=command_environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=prepare,
    )
    os.close(theirs)
    return process, ours


@pytest.mark.parametrize("nohup", [False, True], ids=["hang-up", "nohup"])
def test_a_terminal_that_vanishes_saves_the_job_or_is_not_missed(nohup, calm, corpus, tmp_path):
    words = [*arguments(corpus, tmp_path, *LONG), "--nproc", "2"]
    process, terminal = start_on_terminal(nohup, [sys.executable, "-m", "tandem", *words])

    def reached() -> bool:
        assert process.poll() is None
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 1 << 16)
        return newest_step(tmp_path / "tiny") >= 20

    until(reached, "step 20", LIMIT)
    os.close(terminal)
    assert process.wait(timeout=LIMIT) == (0 if nohup else STOPPED)
    if not nohup:
        saved = all_steps(tmp_path / "tiny/checkpoints")[-1]
        assert saved == newest_step(tmp_path / "tiny") < STEPS
        finish(start(corpus, tmp_path, *LONG))
    assert losses(tmp_path / "tiny") == calm


def test_too_many_failed_saves_in_a_row_end_the_run(corpus, tmp_path):
    with mounted(tmp_path, "size=60m"):
        code, errors = end(start(corpus, tmp_path, *LONG, "checkpoint.max_failures=2"))
        assert code == 1
        assert "Traceback" not in errors
        last = errors.strip().splitlines()[-1]
        assert re.match(r"tandem: 2 saves in a row failed: .* free some space", last)


def test_a_run_folder_that_cannot_be_written_is_one_line(corpus, tmp_path):
    with mounted(tmp_path, "ro"):
        code, errors = end(start(corpus, tmp_path))
    assert code == 1
    assert errors == (
        f"tandem: {tmp_path / 'tiny'}: Read-only file system; choose another folder\n"
    )


def test_a_shard_that_vanishes_is_one_line_and_comes_back_without_a_trace(calm, corpus, tmp_path):
    """Blocks already read are trained on; a job that must read the shard names it and exits."""
    mine = tmp_path / corpus.name  # after which its scores are called
    shutil.copytree(corpus, mine)
    process = start(mine, tmp_path, *LONG)
    reach(process, tmp_path / "tiny", 20)
    (shard,) = (mine / "train").glob("*.tar")
    shard.rename(mine / "elsewhere")
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == STOPPED
    code, errors = end(start(mine, tmp_path, *LONG))
    assert code == 1
    (line,) = errors.strip().splitlines()
    assert line.startswith("tandem: ")
    assert str(shard) in line
    (mine / "elsewhere").rename(shard)
    finish(start(mine, tmp_path, *LONG))
    assert losses(tmp_path / "tiny") == calm


def test_a_clock_that_jumps_changes_nothing(calm, corpus, tmp_path):
    """A year back on rank 0 and a year forward on the other, in the middle of training."""
    finish(start_sabotaged("jumps back@0,jumps@1", corpus, tmp_path, *LONG))
    assert losses(tmp_path / "tiny") == calm


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_saves_and_the_same_command_goes_on(
    number, calm, corpus, tmp_path
):
    process = start(corpus, tmp_path, *LONG)
    reach(process, tmp_path / "tiny", 20)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == STOPPED, errors
    (step,) = map(int, re.findall(r"stopped and saved at step (\d+); start it again", printed))
    assert step == newest_step(tmp_path / "tiny") == all_steps(tmp_path / "tiny/checkpoints")[-1]
    finish(start(corpus, tmp_path, *LONG))
    assert losses(tmp_path / "tiny") == calm


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_is_followed_within_the_step(kind, corpus, tmp_path):
    code, errors = end(start_sabotaged(f"{kind}@1", corpus, tmp_path))
    assert (code, errors) == (STOPPED, "")
    assert all_steps(tmp_path / "tiny/checkpoints")[-1] == STEP + 1


@pytest.mark.parametrize("answers", [True, False], ids=["silent", "unreachable"])
def test_a_tracking_server_that_does_not_answer_costs_nothing_but_a_line(
    answers, calm, corpus, tmp_path
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not answers:
            server.close()
        job = [*arguments(corpus, tmp_path, *LONG, "log.wandb=auto"), "--nproc", "2"]
        words = ["-m", "tandem", *job]
        process = start_program(words, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=address)
        said = finish(process).strip().splitlines()
    # On a busy machine a rank may be slow, which has nothing to do with it.
    lines = [line for line in said if " is slow: " not in line]
    assert len(lines) == 1, lines
    assert "Weights & Biases did not answer in time; metrics.jsonl has every row" in lines[0]
    assert losses(tmp_path / "tiny") == calm
