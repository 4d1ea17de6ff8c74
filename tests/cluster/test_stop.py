"""`tandem stop` for a run that has jobs in SLURM's queue."""

import contextlib
import json
import os
import threading
import time

import pytest
from click.testing import CliRunner

import tandem
from tests.cluster.folders import Folder
from trainer.checkpoint.attempts import send_heartbeat


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The output of squeue; scancel records its arguments."""
    file = tmp_path / "queue"
    for name, text in {"squeue": f"cat {file}", "scancel": 'echo "$*" >>"$0.calls"'}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    (tmp_path / "bin/scancel.calls").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return file


def stop(tmp_path, run="demo"):
    said = CliRunner().invoke(tandem.main, ["stop", run, "--wait", "0.2"])
    return said.exit_code, said.output, (tmp_path / "bin/scancel.calls").read_text().split()


def chain(tmp_path, name="demo"):
    folder = Folder(tmp_path / "runs", name)
    folder.submit("7", "8", "9")
    return folder


@contextlib.contextmanager
def sending_heartbeats(record):
    ended = threading.Event()

    def beat():
        while not ended.wait(0.1):
            send_heartbeat(record)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_a_chain_ends_as_a_whole(tmp_path, queue, monkeypatch):
    monkeypatch.setattr("trainer.checkpoint.attempts.SILENT_SECONDS", 1.0)
    folder = chain(tmp_path)
    (folder.path / "attempts").mkdir()
    record = {"host": "n1", "process": 1, "machine": "", "started": 0, "time": time.time()}
    file = folder.path / "attempts/000001.json"
    file.write_text(json.dumps({**record, "ended": False}))
    lines = ["7|7|RUNNING|None|x", "8|8|PENDING|Dependency|x"]
    queue.write_text("\n".join([*lines, "9|9|PENDING|Dependency|x", "10|10|PENDING||x"]))
    with sending_heartbeats(file):
        code, said, cancelled = stop(tmp_path)
    assert cancelled == ["8", "9"]
    assert "runs/demo: cancelled before it started: job 8, 9\n" in said
    assert (code, "has not answered" in said) == (1, True), "there is no rank here"


def test_a_queue_that_cannot_be_read_keeps_no_run_from_being_stopped(tmp_path, queue):
    (tmp_path / "bin/squeue").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    chain(tmp_path)
    code, said, cancelled = stop(tmp_path)
    assert (code, cancelled) == (1, [])
    assert (
        "runs/demo: queued jobs are not cancelled, SLURM's queue cannot be read: squeue: no" in said
    )
    assert "no job is running in it" in said
    (tmp_path / "runs/local").mkdir()
    (tmp_path / "runs/local/config.yaml").write_text("steps: 10\n")
    assert "queue" not in stop(tmp_path, "runs/local")[1], "nothing of it was ever submitted"


def test_a_job_that_waits_to_start_again_is_cancelled(tmp_path, queue):
    chain(tmp_path)
    queue.write_text("7|7|PENDING|BeginTime|x\n")
    code, said, cancelled = stop(tmp_path)
    assert (code, cancelled) == (0, ["7"])
    assert said == "runs/demo: cancelled before it started: job 7\n"


def test_a_job_that_has_started_but_does_not_train_yet_is_cancelled(tmp_path, queue):
    """It is importing, or its node checks the GPUs: no process of it reads requests."""
    chain(tmp_path)
    queue.write_text("7|7|RUNNING|None|x\n8|8|PENDING|Dependency|x\n")
    code, said, cancelled = stop(tmp_path)
    assert (code, cancelled) == (0, ["8", "7"])
    assert "runs/demo: cancelled job 7; what it has done stays\n" in said


def test_a_run_that_never_began_can_be_stopped(tmp_path, queue):
    folder = chain(tmp_path)
    (folder.path / "config.yaml").unlink()
    queue.write_text("7|7|PENDING|Priority|x\n")
    assert stop(tmp_path)[0] == 0


def test_the_waiting_tasks_of_an_array_are_cancelled(tmp_path, queue):
    folder = chain(tmp_path, "sweep")
    (folder.path / "config.yaml").unlink()
    (folder.path / "submissions/001/seeds").write_text("1\n2\n")
    queue.write_text("7_0|70|RUNNING|None|x\n7_[1]|7|PENDING|Resources|x\n")
    code, said, cancelled = stop(tmp_path, "sweep")
    assert (code, cancelled) == (0, ["7_[1]"])
    assert "job 7_0 keeps running; stop each run: runs/sweep-seedN" in said


def test_nothing_to_stop_is_one_line(tmp_path, queue):
    chain(tmp_path)
    queue.write_text("")
    code, said, cancelled = stop(tmp_path)
    assert (code, cancelled) == (1, [])
    assert "runs/demo: no job is running in it" in said
