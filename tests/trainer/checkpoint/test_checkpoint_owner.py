"""Whether the owner of an attempt is alive, seen from its own machine and from others."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import training
from tests.waiting import until
from trainer.checkpoint import attempts
from trainer.checkpoint.attempts import Attempt, Owner, live_owner, send_heartbeat
from trainer.errors import CheckpointError

ELSEWHERE = {"host": "n9", "machine": "another boot pid:[1]"}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    (tmp_path / "attempts").mkdir()
    return tmp_path / "attempts" / "000001.json"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "SILENT_SECONDS", 2.0)


def write(record: Path, someone: Owner) -> None:
    record.write_text(json.dumps({"attempt": 1, **vars(someone), "checkpoints": []}))


@pytest.fixture
def neighbour(record: Path) -> Iterator[int]:
    """Another process on this machine, which is in the record."""
    child = os.fork()
    if child == 0:
        write(record, Owner.here())
        signal.pause()
    until(lambda: Owner.of(record) is not None, "the record", 60)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_on_its_own_machine_the_process_table_decides_at_once(record, tmp_path, neighbour):
    assert live_owner(tmp_path) == Owner.of(record)
    with pytest.raises(CheckpointError, match=rf"process {neighbour} on .*, since "):
        Attempt.begin(tmp_path)
    os.kill(neighbour, signal.SIGKILL)
    os.waitid(os.P_PID, neighbour, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    assert live_owner(tmp_path) is None
    assert Attempt.begin(tmp_path).number == 2


def test_another_process_with_the_number_of_a_dead_one_is_not_mistaken_for_it(record, tmp_path):
    me = Owner.here()
    write(record, dataclasses.replace(me, started=me.started - 1))
    assert live_owner(tmp_path) is None


@pytest.mark.usefixtures("impatient")
def test_on_another_machine_its_heart_decides(record, tmp_path):
    someone = dataclasses.replace(Owner.here(), **ELSEWHERE)
    write(record, someone)
    assert live_owner(tmp_path) is None  # it does not beat
    over = threading.Event()
    send_heartbeat(record)

    def live() -> None:
        while not over.wait(0.3):
            send_heartbeat(record)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        assert live_owner(tmp_path) == someone
        with pytest.raises(CheckpointError, match=r"already running \(process \d+ on n9, since"):
            Attempt.begin(tmp_path)
    finally:
        over.set()
        thread.join(60)


@pytest.mark.usefixtures("impatient")
def test_one_that_was_silent_for_long_is_not_waited_for(record, tmp_path, monkeypatch):
    write(record, dataclasses.replace(Owner.here(), **ELSEWHERE))
    os.utime(record, (time.time() - 60,) * 2)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it was waited for"))
    assert live_owner(tmp_path) is None


def test_one_that_has_ended_is_not_waited_for(tmp_path, monkeypatch):
    attempt = Attempt.begin(tmp_path, dataclasses.replace(Owner.here(), **ELSEWHERE))
    attempt.end()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it was waited for"))
    assert live_owner(tmp_path) is None
    assert json.loads(attempt.record.read_text())["checkpoints"] == []


def test_a_requeued_job_does_not_wait_for_its_own_earlier_copy(record, tmp_path):
    first = dataclasses.replace(Owner.here(job="77"), **ELSEWHERE)
    write(record, first)
    assert "SLURM job 77, process" in str(first)
    assert Attempt.begin(tmp_path, Owner.here(job="77", restart=1)).number == 2


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_refused_start_leaves_the_folder_that_another_process_begins(
    tmp_path, monkeypatch, is_alive
):
    def begin(*_: object, **__: object) -> int:
        (tmp_path / "run").mkdir()
        attempt = Attempt.begin(tmp_path / "run")
        if not is_alive:
            attempt.end()
        return 1

    monkeypatch.setattr(training, "launch_ranks", begin)
    job = SimpleNamespace(output_dir=str(tmp_path), name="run")
    assert training.run_ranks(job, [], 1) == 1
    assert (tmp_path / "run").exists() is is_alive
