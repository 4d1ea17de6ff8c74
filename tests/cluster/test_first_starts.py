"""`tandem status` and `tandem stop` of a first start, which has no ``config.yaml`` yet."""

import json
import os

import pytest
from click.testing import CliRunner

import tandem
from cluster.status import read_run, read_runs, to_json
from tests.cluster.folders import Folder
from trainer.checkpoint.attempts import Attempt


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Folder(tmp_path / "runs")
    (folder.path / "config.yaml").unlink()
    (folder.path / "logs").mkdir()
    (folder.path / "logs/rank-000.log").touch()
    return folder


def said(*words):
    done = CliRunner().invoke(tandem.main, words)
    return done.exit_code, " ".join(done.output.split())


def test_a_start_that_was_refused_says_why(run):
    run.attempt(2**22, since=1000.0)  # more than any process's id
    failure = {"rank": 2, "error": "batch: 16 sequences do not divide\nover 3 ranks"}
    (run.path / "attempts/000001.failure").write_text(json.dumps(failure))
    status = read_run(run.path, None)
    reason = "batch: 16 sequences do not divide over 3 ranks"
    assert (status.state, status.reason) == ("failed", reason)
    assert (status.step, status.steps, status.attempts) == (0, None, 1)
    assert read_runs(run.path.parent, None) == [status]
    assert json.loads(to_json([status]))[0]["steps"] is None
    for words in (["status", "demo"], ["status"]):
        code, out = said(*words)
        assert code == 0
        assert f"demo failed: {reason}" in out
        assert "0 of ?" in out
        assert "demo logs to runs/demo/logs/rank-000.log" in out
    code, out = said("stop", "demo")
    assert (code, "no job is running in it" in out) == (1, True)


def test_a_start_that_is_loading_runs_and_can_be_stopped(run):
    Attempt.begin(run.path)  # by this process
    status = read_run(run.path, None)
    assert (status.state, status.reason, status.steps) == ("running", "", None)
    code, out = said("stop", "demo", "--wait", "0.2")
    assert (code, "has not answered" in out, "the request stays" in out) == (1, True, True)
    assert (run.path / "requests/stop.json").exists()


def test_the_reason_of_an_earlier_attempt_is_not_that_of_the_newest(run):
    run.attempt(2**22, since=1000.0)
    (run.path / "attempts/000001.failure").write_text('{"error": "old"}')
    run.attempt(os.getpid(), number=2)
    assert read_run(run.path, None).state == "running"
    run.attempt(2**22, number=2, since=2000.0)
    assert read_run(run.path, None).reason == "it ended before it logged a step; see its log"


def test_a_folder_without_a_job_is_no_run(run):
    for words in (["status", "demo"], ["stop", "demo"]):
        code, out = said(*words)
        assert (code, "demo: not a run: no job has begun in demo or runs/demo" in out) == (1, True)
