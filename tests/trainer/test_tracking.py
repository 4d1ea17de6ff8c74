"""Weights & Biases: offline from its own transaction log, online from what reaches a server."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.waiting import until
from tests.wandb_files import history, offline_folder, records
from tests.wandb_server import WandbServer
from trainer.checkpoint.attempts import Attempt
from trainer.config import LogConfig
from trainer.run_folder.metrics import MetricsLog, resume
from trainer.tracking import trackers
from trainer.tracking.trackers import Tail, current_id, first_id

KEY = "0123456789abcdef0123456789abcdef01234567"


def forget_account(monkeypatch, folder):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(folder / "wandb-settings"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(folder / "wandb-cache"))


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    forget_account(monkeypatch, tmp_path)


def new_run(folder):
    run = folder / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        "# git revision: abc123\nsteps: 100\nteacher:\n  optimizer:\n    lr: 1e-4\n"
    )
    return run


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path)


ABOUT = LogConfig(
    entity="lab", group="sweep", job_type="pretrain", tags=["a", "b"], notes="why"
).wandb_run


def start(run, mode="offline", run_id="abcd1234", **how):
    follower = trackers.start(run, mode=mode, about=ABOUT, run_id=run_id, **how)
    assert follower is not None
    return follower


def log(run, *rows):
    with MetricsLog(run / "metrics.jsonl") as file:
        for row in rows:
            file.append(row)


ROWS = [{"step": 10 * i, "teacher/loss": 1 / (i + 3), "tokens": 2**40 + i} for i in range(300)]
LAST = {"step": 2990, "val/teacher/loss": 0.1 + 0.2, "a": math.nan, "b": math.inf}
MODELS = [{"learner": "teacher", "layers": 12}, {"learner": "students/tiny", "layers": 4}]


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A run followed to its end, with everything that a run can have."""
    folder = tmp_path_factory.mktemp("followed")
    run = new_run(folder)
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    (run / "report.html").write_text("<p>curves</p>")
    with pytest.MonkeyPatch.context() as monkeypatch:
        forget_account(monkeypatch, folder)
        follower = start(run, mode="auto", models=MODELS)  # there is no key: offline
        log(run, *ROWS, LAST)
        assert follower.finish(completed=True, seconds=300)
    return run


def test_every_row_reaches_wandb_at_its_step(followed):
    """Tables and the report have no row of their own."""
    logged = history(followed)
    assert sorted(logged) == [row["step"] for row in ROWS]
    for row in ROWS:
        assert {key: logged[row["step"]][key] for key in row} == row
    assert logged[2990]["val/teacher/loss"] == 0.1 + 0.2
    assert logged[2990]["b"] == math.inf
    assert math.isnan(logged[2990]["a"])


def test_tables_wait_in_the_run_folder_for_their_upload(run, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null/no-home")
    staged = []
    for _ in range(2):
        follower = start(run, models=MODELS)
        log(run, LAST)
        assert follower.finish(completed=True, seconds=300)
        staged.append([*(run / "wandb/artifacts/staging").iterdir()])
    assert [len(files) for files in staged] == [2, 2]  # the table, and the list of its files
    assert set(staged[0]).isdisjoint(staged[1])


def test_name_config_axes_and_results(followed):
    config, summary, axes = {}, {}, {}
    for record in records(offline_folder(followed) / "run-abcd1234.wandb"):
        if record.HasField("run"):
            config.update({i.key: json.loads(i.value_json) for i in record.run.config.update})
            told = record.run
            assert (told.project, told.display_name) == ("tandem", "demo")
            assert (told.entity, told.run_group, told.job_type) == ("lab", "sweep", "pretrain")
            assert (list(told.tags), told.notes) == (["a", "b"], "why")
        if record.HasField("metric"):
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = item.value_json
    assert config["teacher"] == {"optimizer": {"lr": 1e-4}}
    assert config["git_revision"] == "abc123"
    assert (axes["*"], axes["val/*"]) == ("step", "tokens")
    assert json.loads(summary["final/students/tiny/retention"]) == 0.9


def test_tables_and_the_report_go_along(followed):
    files = offline_folder(followed) / "files"
    tables = [json.loads(path.read_text()) for path in files.rglob("*.table.json")]
    rows = [row for table in tables for row in table["data"]]
    assert ["students/tiny", 4] in rows
    assert ["students/tiny", 10] in [row[:2] for row in rows]
    assert [path.read_text() for path in files.rglob("*.html")] == ["<p>curves</p>"]


@pytest.mark.slow
def test_a_resumed_run_has_each_step_once_and_none_of_the_abandoned_ones(run):
    first = start(run)
    log(run, *[{"step": step, "teacher/loss": 1.0} for step in range(8)])
    assert first.finish(completed=False, seconds=300)
    assert "preempting" in kinds(run)  # so that W&B does not call the run failed
    resume(run / "metrics.jsonl", 4)
    second = start(run)
    log(run, *[{"step": step, "teacher/loss": 2.0} for step in range(5, 10)])
    assert second.finish(completed=True, seconds=300)
    losses = {step: values["teacher/loss"] for step, values in history(run).items()}
    assert losses == {step: 1.0 if step <= 4 else 2.0 for step in range(10)}


def test_a_file_that_a_resumed_run_replaced_is_read_from_the_start(run):
    tail = Tail(run / "metrics.jsonl")
    log(run, *[{"step": step} for step in range(8)])
    assert [row["step"] for row in tail.rows()] == list(range(8))
    log(run, {"step": 8})
    assert [row["step"] for row in tail.rows()] == [8]
    resume(run / "metrics.jsonl", 4)
    log(run, *[{"step": step} for step in range(5, 12)])
    assert [row["step"] for row in tail.rows()] == list(range(12))


TRAINER = """
import os, pathlib, signal, sys
from trainer.tracking import trackers
from trainer.run_folder.metrics import MetricsLog
run = pathlib.Path(sys.argv[1])
trackers.start(run, mode="offline", about={"project": "tandem"}, run_id="abcd1234")
with MetricsLog(run / "metrics.jsonl") as log:
    for step in range(50):
        log.append({"step": step})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_loses_no_row(run):
    trainer = subprocess.run([sys.executable, "-c", TRAINER, str(run)], check=False, timeout=120)
    assert trainer.returncode == -signal.SIGKILL
    until(lambda: "exit" in kinds(run), "the end of its follower", 300)
    assert sorted(history(run)) == list(range(50))


def kinds(run):
    files = list((run / "wandb").glob("offline-run-*/*.wandb"))
    return {record.WhichOneof("record_type") for file in files for record in records(file)}


SILENT = "127.77.0.1"  # where no other process of this machine looks for a port that it was given


@pytest.fixture
def silent_server():
    """A host that accepts connections and never answers."""
    with socket.create_server((SILENT, 0)) as server:
        yield server


def test_offline_opens_no_connection_even_with_a_key(run, monkeypatch, silent_server):
    address = f"http://{SILENT}:{silent_server.getsockname()[1]}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, address)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    follower = start(run, mode="offline")
    log(run, {"step": 1})
    assert follower.finish(completed=True, seconds=300)
    silent_server.settimeout(0)
    with pytest.raises(BlockingIOError):
        silent_server.accept()
    assert_key_is_nowhere(run)


def test_a_server_that_does_not_answer_costs_the_run_nothing(run, monkeypatch, silent_server):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://{SILENT}:{silent_server.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    follower = start(run, mode="auto")
    log(run, {"step": 1})
    assert not follower.finish(completed=True, seconds=1)
    assert_key_is_nowhere(run)


@pytest.mark.slow
def test_a_key_that_wandb_refuses_means_offline(run, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    follower = start(run, mode="auto")
    log(run, {"step": 1})
    assert follower.finish(completed=True, seconds=300)
    assert list(history(run)) == [1]
    assert b"not-a-key" not in everything(run)


def test_off_starts_nothing(run, monkeypatch):
    assert trackers.start(run, mode="disabled", about=ABOUT, run_id="abcd1234") is None
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert trackers.start(run, mode="auto", about=ABOUT, run_id="abcd1234") is None


def test_a_follower_that_dies_does_not_disturb(run, caplog):
    (run / "config.yaml").write_text("{")  # it cannot read this
    follower = start(run)
    log(run, {"step": 1})
    follower._follower.wait(300)
    follower.check()
    assert f"Weights & Biases ended early, see {run}/logs/wandb.log" in caplog.text
    caplog.clear()
    follower.check()
    assert follower.finish(completed=True, seconds=300) is False
    assert not caplog.text
    (run / "logs" / "wandb.log").unlink()
    (run / "logs").rmdir()
    (run / "logs").write_text("not a folder")
    assert trackers.start(run, mode="offline", about=ABOUT, run_id="abcd1234") is None


def assert_key_is_nowhere(run):
    assert KEY.encode() not in everything(run)


def everything(run):
    return b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


EVALUATION = {
    "columns": [{"name": "loss"}, {"name": "accuracy"}],
    "learners": {
        name: {
            "parameters": parameters,
            "loss": 3.0,
            "accuracy": 0.5,
            "retention": retention,
            "tokens_per_second": 1e4,
        }
        for name, parameters, retention in [("teacher", 20, None), ("students/tiny", 10, 0.9)]
    },
}


def alerted(run):
    return [json.loads(line)["title"] for line in (run / "alerts.jsonl").read_text().splitlines()]


def test_alerts_of_a_stall_and_a_spike(run):
    from trainer.tracking.wandb_tracker import Alerts

    sent = []
    now = 0.0
    alerts = Alerts(lambda *told: sent.append(told), run, clock=lambda: now)
    now = 400.0  # a slow start
    alerts.check_stall()
    alerts.add_row({"step": 1})
    alerts.check_stall()
    alerts.add_row({"step": 2, "rollbacks": 1})
    alerts.add_row({"step": 3, "rollbacks": 1})
    now += 5000.0
    alerts.check_stall()
    alerts.check_stall()
    assert alerted(run) == ["spike", "stalled"]
    assert sent[0] == ("spike", "demo: rolled back after a spike; resumed at step 2")


def test_no_stall_is_alerted_while_batches_are_scored(run):
    from trainer.tracking.wandb_tracker import Alerts

    now = 0.0
    alerts = Alerts(print, run, clock=lambda: now)
    alerts.add_row({"step": 1})
    now = 5000.0
    log(run, {"step": 1})  # touched just now, as rank 0 does
    alerts.check_stall()
    assert not (run / "alerts.jsonl").exists()
    os.utime(run / "metrics.jsonl", (time.time() - 400,) * 2)
    alerts.check_stall()
    assert alerted(run) == ["stalled"]


@pytest.mark.slow
def test_an_alert_of_a_crash_loop_is_recorded_offline(run):
    """In the third attempt in a row without a new step; the first two are on record."""
    from trainer.tracking.wandb_tracker import Alerts

    log(run, {"step": 5})
    (run / "wandb").mkdir()
    for expected in ([5, 0], [5, 1], [5, 2]):
        Alerts(print, run).check_crash_loop(5)
        assert json.loads((run / "wandb/attempts.json").read_text()) == expected
    assert not (run / "alerts.jsonl").exists()
    assert start(run).finish(completed=False, seconds=300)
    assert alerted(run) == ["crash loop"]
    assert "alert" in kinds(run)


@pytest.mark.parametrize("left", [b"", b"\0\0", b"[5", b"[5]", b"[1, Infinity]", b"{}", b"\xff"])
def test_files_that_a_crash_has_torn_count_as_missing(run, left):
    """An empty ``attempts.json`` ended W&B and its alerts at every later start."""
    from trainer.tracking.wandb_tracker import Alerts

    (run / "wandb").mkdir()
    (run / "wandb/attempts.json").write_bytes(left)
    Alerts(print, run).check_crash_loop(5)
    assert json.loads((run / "wandb/attempts.json").read_text()) == [5, 0]


@pytest.mark.parametrize("left", [b"", b"\n", b"\0\0"])
def test_an_empty_id_counts_as_missing(run, left):
    """W&B refuses a run without an id."""
    (run / "wandb").mkdir()
    (run / "wandb/id").write_bytes(left)
    assert current_id(run, "abcd1234") == "abcd1234"


def test_online_a_requeued_run_goes_on_and_sync_puts_it_right(run, monkeypatch):
    """The real client with a stand-in for the server, which stores the steps that it receives.

    A requeued run repeats steps with other values. W&B keeps each step once, in order, with the
    first values. `sync` then sends the file's values; a second `sync` has nothing to do.
    """
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)

        def attempt(steps=(), loss=0.0, completed=False, **how):
            follower = start(run, mode="auto", run_id=current_id(run, "abcd1234"), **how)
            log(run, *[row(step, loss) for step in steps])
            assert follower.finish(completed=completed, seconds=300)

        def steps_and_losses(name):
            return [(row["_step"], row["teacher/loss"]) for row in server.history(name)]

        attempt(range(1, 9), loss=1.0)
        resume(run / "metrics.jsonl", 4)
        attempt(range(5, 12), loss=2.0)
        assert steps_and_losses("abcd1234") == [(i, 1.0 if i <= 8 else 2.0) for i in range(1, 12)]
        attempt(verify=True)
        truth = [(i, 1.0 if i <= 4 else 2.0) for i in range(1, 12)]
        assert steps_and_losses("abcd1234-2") == truth
        assert server.runs["abcd1234"]["tags"] == ["a", "b", "superseded"]
        (run / "evaluation.json").write_text(json.dumps(EVALUATION))
        attempt(verify=True, completed=True, models=MODELS)
        assert steps_and_losses("abcd1234-2") == truth
        assert len(server.lines) == 2
    assert_key_is_nowhere(run)


def row(step, loss):
    return {"step": step, "tokens": 10 * step, "teacher/loss": loss, "students/a/loss": math.nan}


def test_what_agrees_with_the_file():
    from trainer.tracking.wandb_tracker import by_step, is_prefix

    def theirs(*steps, loss=0.5):
        return [{"_step": step, "step": step, "loss": loss} for step in steps]

    ours = by_step({"step": step} | more for step in (3, 1, 2) for more in ({}, {"loss": 0.5}))
    assert is_prefix(theirs(1, 2), ours)
    assert is_prefix([], ours)
    for steps in ([1, 3], [1, 2, 2], [1, 2, 3, 4], [2]):
        assert not is_prefix(theirs(*steps), ours)
    assert not is_prefix(theirs(1, loss=0.25), ours)
    assert not is_prefix([{"_step": 1, "step": 1}], ours)
    assert is_prefix([{"_step": 1, "step": 1, "a": "NaN"}], [{"step": 1, "a": math.nan}])


def test_the_first_id_stays_when_the_attempt_has_ended(tmp_path):
    attempt = Attempt.begin(tmp_path)
    before = first_id(tmp_path)
    attempt.end()
    attempt.finish()
    assert first_id(tmp_path) == before


def test_trackers_that_do_not_answer_are_waited_for_at_the_same_time(tmp_path, caplog):
    silent = [
        trackers.Tracking(subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE), log)
        for log in (tmp_path / "one", tmp_path / "two", tmp_path / "three")
    ]
    began = time.monotonic()
    trackers.finish_all(silent, completed=False, seconds=0.5)
    assert time.monotonic() - began < 1.0
    assert caplog.text.count("did not answer in time") == 3
