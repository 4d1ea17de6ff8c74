"""The run folder, requests and the heartbeat, as seen by one rank, without a job."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.jobs import tiny_job
from tests.waiting import until
from trainer import control
from trainer.checkpoint.attempts import Attempt, Owner
from trainer.control import CHECKPOINT, STOP, Heartbeat, RequestBox, RunContext, answer_to, ask
from trainer.errors import StaleAttempt, TrainingError
from trainer.lifecycle import start
from trainer.measure import Startup
from trainer.run_folder.folder import RunFolder
from trainer.watch.ranks import FirstFailure, HangWatch


def away(*arguments: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_request_is_followed_once_however_long_its_save_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.0)
    box = RequestBox(tmp_path, reads=True)
    first = ask(tmp_path, CHECKPOINT)
    assert box.look() == {CHECKPOINT}
    answer = box.answer_after_save(5)
    assert box.look() == set(), "it is being saved, and the request is still on the disk"
    answer(None)
    assert answer_to(tmp_path, CHECKPOINT, first) == {"id": first, "step": 5, "error": None}
    assert ask(tmp_path, CHECKPOINT) != first
    assert box.look() == {CHECKPOINT}


def test_a_run_that_ends_elsewhere_while_it_is_asked_to_stop_says_so(tmp_path, monkeypatch):
    """Its record does, and nobody waits for a heartbeat."""
    monkeypatch.setattr(control, "UNSEEN_SECONDS", 0.5)
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    record = {"host": "n7", "process": 1, "machine": "other", "started": 1, "time": time.time()}
    (attempts / "000001.json").write_text(json.dumps(record))
    owner = Owner.of(attempts / "000001.json")
    monkeypatch.setattr(control, "live_owner", lambda run: owner)

    def end_soon() -> None:
        time.sleep(0.3)
        (attempts / "000001.json").write_text(json.dumps({**record, "ended": True}))

    thread = threading.Thread(target=end_soon)
    thread.start()
    with pytest.raises(TrainingError, match="the job ended before it could stop"):
        control.ask_and_wait(RunFolder(tmp_path), STOP, 60.0)
    thread.join()


def test_an_answer_that_another_node_sees_later_than_the_end_is_one(tmp_path, monkeypatch):
    """As over NFS: the record of the attempt is read anew, and the answer's name is cached."""
    owner = SimpleNamespace(is_on_this_machine=False, has_process=False)
    unseen = iter([None, None, {"error": None, "step": 5}])
    monkeypatch.setattr(control, "live_owner", lambda _: owner)
    monkeypatch.setattr(control, "owner_has_ended", lambda _: True)
    monkeypatch.setattr(control, "answer_to", lambda *_: next(unseen))
    answer = control.ask_and_wait(RunFolder(tmp_path), STOP, 60.0)
    assert answer == f"{tmp_path}: saved at step 5 and ended"


def test_a_partly_written_request_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.0)
    (tmp_path / "checkpoint.json").write_text('{"id": "7a')
    box = RequestBox(tmp_path, reads=True)
    assert box.look() == set()
    request = ask(tmp_path, CHECKPOINT)
    assert box.look() == {CHECKPOINT}
    box.answer_after_save(5)(None)
    assert answer_to(tmp_path, CHECKPOINT, request) is not None


def test_a_disk_that_is_away_for_a_moment_asks_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.0)
    box = RequestBox(tmp_path, reads=True)
    ask(tmp_path, CHECKPOINT)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", away)
        assert box.look() == set()
    assert box.look() == {CHECKPOINT}


@pytest.mark.parametrize("answers", [True, False])
def test_an_answer_is_heard_of_a_job_that_ends_right_behind_it(tmp_path, monkeypatch, answers):
    run = RunFolder(tmp_path)
    owner = SimpleNamespace(is_on_this_machine=True, has_process=True)

    def end_between_two_looks(seconds: float) -> None:
        box = RequestBox(run.requests, reads=True)
        if answers:
            assert box.look() == {STOP}
            box.answer_after_save(5)(None)
        owner.has_process = False

    monkeypatch.setattr(control, "live_owner", lambda _: owner if owner.has_process else None)
    monkeypatch.setattr(control.time, "sleep", end_between_two_looks)
    if answers:
        assert control.ask_and_wait(run, STOP, 60.0) == f"{run.path}: saved at step 5 and ended"
    else:
        with pytest.raises(TrainingError, match="the job ended before it could stop"):
            control.ask_and_wait(run, STOP, 60.0)


def test_the_heart_goes_on_after_the_disk_was_away(tmp_path, monkeypatch):
    """Afterwards it notices that a newer attempt has begun."""
    monkeypatch.setattr(control, "HEARTBEAT_SECONDS", 0.01)
    attempt, watch = Attempt.begin(tmp_path), HangWatch(tmp_path / "log", 60.0)
    known = FirstFailure(attempt, 0), watch, tmp_path / "metrics.jsonl"
    with Heartbeat(attempt, 0, *known) as heart:
        with monkeypatch.context() as patch:
            patch.setattr(Attempt, "check", away)
            time.sleep(0.1)
        Attempt.begin(tmp_path)
        with pytest.raises(StaleAttempt, match="attempt 2 of this run has begun"):
            for_a_while(heart.check)


def test_progress_between_two_rows_touches_the_metrics(tmp_path, monkeypatch):
    """Such as a batch that is scored; not the mere life of rank 0."""
    monkeypatch.setattr(control, "HEARTBEAT_SECONDS", 0.01)
    config = tiny_job(tmp_path, tmp_path)
    folder = RunFolder.of(config)
    folder.path.mkdir()
    folder.metrics.touch()
    os.utime(folder.metrics, (0, 0))
    context = RunContext.of(config, Attempt.begin(folder.path), 0, lambda: False, Startup())
    with context.heartbeat:
        time.sleep(0.1)
        assert folder.metrics.stat().st_mtime == 0
        context.hang_watch.heartbeat()
        until(lambda: folder.metrics.stat().st_mtime > 0)


def for_a_while(action: Callable[[], None]) -> None:
    for _ in range(1000):
        action()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("content", "revision"),
    [(b"# git revision: 1a2b3c4\nname: a\n", "1a2b3c4"), (b"PK\x03\x04\xf7\x00", "")],
)
def test_the_revision_is_empty_where_the_config_is_damaged(tmp_path, content, revision):
    folder = RunFolder(tmp_path)
    folder.config.write_bytes(content)
    assert folder.revision() == revision


def test_the_revision_of_an_installed_package_is_its_version(tmp_path, monkeypatch):
    """Also where it lies inside a checkout of the user's."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    package = tmp_path / "venv" / "trainer" / "lifecycle"
    package.mkdir(parents=True)
    monkeypatch.setattr(start, "__file__", str(package / "start.py"))
    monkeypatch.setattr(start, "version", lambda name: f"version of {name}")
    assert start._git_revision() == "version of tandem-distill"
    (tmp_path / "venv" / "REVISION").write_text("1a2b3c4\n")
    assert start._git_revision() == "1a2b3c4"
