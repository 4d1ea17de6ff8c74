"""Weights & Biases offline, checked by reading its own transaction log back."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.wandb_files import history, offline_folder, records
from trainer.record import tracking
from trainer.record.metrics import MetricsLog, cut_back
from trainer.record.wandb_follower import Alerts, agrees

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-settings"))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("steps: 100\nteacher:\n  optimizer:\n    lr: 1e-4\n")
    return folder


def start(run, mode="offline"):
    follower = tracking.start(run, mode=mode, project="tandem", run_id="abcd1234")
    assert follower is not None
    return follower


def log(run, *rows):
    with MetricsLog(run / "metrics.jsonl") as file:
        for row in rows:
            file.append(row)


def test_every_row_reaches_wandb_at_its_step(run):
    follower = start(run)
    rows = [{"step": 10 * i, "teacher/loss": 1 / (i + 3), "tokens": 2**40 + i} for i in range(300)]
    log(run, *rows, {"step": 2990, "val/teacher/loss": 0.1 + 0.2})
    assert follower.finish(completed=True, seconds=60)
    logged = history(run)
    assert sorted(logged) == [row["step"] for row in rows]
    for row in rows:
        assert {key: logged[row["step"]][key] for key in row} == row
    assert logged[2990]["val/teacher/loss"] == 0.1 + 0.2


def test_config_table_and_non_finite_values(run):
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    follower = start(run, mode="auto")  # there is no key: offline
    log(run, {"step": 1, "teacher/loss": math.nan, "students/tiny/loss": math.inf})
    assert follower.finish(completed=True, seconds=60)
    assert history(run)[1]["students/tiny/loss"] == math.inf
    assert math.isnan(history(run)[1]["teacher/loss"])
    config, summary = {}, {}
    for record in records(offline_folder(run) / "run-abcd1234.wandb"):
        if record.HasField("run"):
            config.update({i.key: json.loads(i.value_json) for i in record.run.config.update})
            assert (record.run.project, record.run.display_name) == ("tandem", "demo")
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = item.value_json
    assert config["teacher"] == {"optimizer": {"lr": 1e-4}}
    assert json.loads(summary["final/students/tiny/retention"]) == 0.9
    (table,) = (offline_folder(run) / "files").rglob("*.table.json")
    assert json.loads(table.read_text())["data"][1][:2] == ["students/tiny", 10]


def test_a_resumed_run_has_each_step_once_and_none_of_the_abandoned_ones(run):
    first = start(run)
    log(run, *[{"step": step, "teacher/loss": 1.0} for step in range(8)])
    assert first.finish(completed=False, seconds=60)
    cut_back(run / "metrics.jsonl", 4)
    second = start(run)
    log(run, *[{"step": step, "teacher/loss": 2.0} for step in range(5, 10)])
    assert second.finish(completed=True, seconds=60)
    losses = {step: values["teacher/loss"] for step, values in history(run).items()}
    assert losses == {step: 1.0 if step <= 4 else 2.0 for step in range(10)}


TRAINER = """
import os, pathlib, signal, sys
from trainer.record import tracking
from trainer.record.metrics import MetricsLog
run = pathlib.Path(sys.argv[1])
tracking.start(run, mode="offline", project="tandem", run_id="abcd1234")
with MetricsLog(run / "metrics.jsonl") as log:
    for step in range(50):
        log.append({"step": step})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_loses_no_row(run):
    trainer = subprocess.run([sys.executable, "-c", TRAINER, str(run)], check=False)
    assert trainer.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while "exit" not in kinds(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert sorted(history(run)) == list(range(50))


def kinds(run):
    files = list((run / "wandb").glob("offline-run-*/*.wandb"))
    return {record.WhichOneof("record_type") for file in files for record in records(file)}


@pytest.fixture
def silent_server():
    """A host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_offline_opens_no_connection_even_with_a_key(run, monkeypatch, silent_server):
    address = f"http://127.0.0.1:{silent_server.getsockname()[1]}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, address)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    follower = start(run, mode="offline")
    log(run, {"step": 1})
    assert follower.finish(completed=True, seconds=60)
    silent_server.settimeout(0)
    with pytest.raises(BlockingIOError):
        silent_server.accept()
    assert_key_is_nowhere(run)


def test_a_server_that_does_not_answer_costs_the_run_nothing(run, monkeypatch, silent_server):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent_server.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    follower = start(run, mode="auto")
    log(run, {"step": 1})
    assert not follower.finish(completed=True, seconds=1)
    assert_key_is_nowhere(run)


def test_a_key_that_wandb_refuses_means_offline(run, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    follower = start(run, mode="auto")
    log(run, {"step": 1})
    assert follower.finish(completed=True, seconds=60)
    assert list(history(run)) == [1]
    assert b"not-a-key" not in everything(run)


def test_off_starts_nothing(run, monkeypatch):
    assert tracking.start(run, mode="disabled", project="tandem", run_id="abcd1234") is None
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.start(run, mode="auto", project="tandem", run_id="abcd1234") is None


def test_a_follower_that_dies_does_not_disturb(run):
    (run / "config.yaml").write_text("{")  # it cannot read this
    follower = start(run)
    log(run, {"step": 1})
    assert follower.finish(completed=True, seconds=60) is False
    (run / "logs" / "wandb.log").unlink()
    (run / "logs").rmdir()
    (run / "logs").write_text("not a folder")
    assert tracking.start(run, mode="offline", project="tandem", run_id="abcd1234") is None


def assert_key_is_nowhere(run):
    assert KEY.encode() not in everything(run)


def everything(run):
    return b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


EVALUATION = {
    "learners": {
        name: {
            "parameters": parameters,
            "loss": 3.0,
            "accuracy": 0.5,
            "retention": retention,
            "tokens_per_second": 1e4,
        }
        for name, parameters, retention in [("teacher", 20, None), ("students/tiny", 10, 0.9)]
    }
}


def test_axes_models_revision_and_report(run):
    (run / "config.yaml").write_text("# git revision: abc123\nsteps: 2\n")
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    (run / "report.html").write_text("<p>curves</p>")
    models = [{"learner": "teacher", "layers": 12}, {"learner": "students/tiny", "layers": 4}]
    follower = tracking.start(
        run, mode="offline", project="tandem", run_id="abcd1234", models=models
    )
    log(run, {"step": 1, "tokens": 10}, {"step": 2, "tokens": 20, "val/c/teacher/loss": 2.0})
    assert follower.finish(completed=True, seconds=60)
    assert list(history(run)) == [1, 2]  # tables and report have no row of their own
    found = list(records(next(offline_folder(run).glob("run-*.wandb"))))
    axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in found if r.metric}
    assert (axes["*"], axes["val/*"]) == ("step", "tokens")
    config = {
        item.key: json.loads(item.value_json)
        for record in found
        for item in record.run.config.update
    }
    assert config["git_revision"] == "abc123"
    files = offline_folder(run) / "files"
    tables = [json.loads(path.read_text()) for path in files.rglob("*.table.json")]
    assert ["students/tiny", 4] in [row for table in tables for row in table["data"]]
    assert [path.read_text() for path in files.rglob("*.html")] == ["<p>curves</p>"]


class FakeRun:
    def __init__(self):
        self.alerts = []

    def alert(self, title, text, level):
        self.alerts.append((title, text))


def alerted(run):
    return [json.loads(line)["title"] for line in (run / "alerts.jsonl").read_text().splitlines()]


def test_alerts_of_a_stall_and_a_spike(run):
    fake = FakeRun()
    alerts = Alerts(fake, run, stalled_after=0.0)
    alerts.saw({"step": 1})
    alerts.look()
    alerts.saw({"step": 2, "rollbacks": 1})
    alerts.saw({"step": 3, "rollbacks": 1})
    time.sleep(0.3)
    alerts.look()
    alerts.look()
    assert alerted(run) == ["spike", "stalled"]
    assert fake.alerts[0] == ("spike", "demo: rolled back after a spike; going on from 2")


def test_an_alert_of_a_crash_loop_is_recorded_offline(run):
    log(run, {"step": 5})
    for _ in range(4):
        assert start(run).finish(completed=False, seconds=60)
    assert alerted(run) == ["crash loop"]
    assert "alert" in kinds(run)


def test_what_agrees_with_the_file():
    assert agrees([1, 2], [1, 2, 3])
    assert agrees([], [1])
    for theirs in ([1, 3], [1, 2, 2], [1, 2, 3, 4], [2]):
        assert not agrees(theirs, [1, 2, 3])
