"""Trackers beside Weights & Biases: those shipped, read by their own readers, and a plugin's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import configs
from configs import ConfigError
from tests.conftest import TINY_JOB, tandem
from trainer.checkpoint.attempts import Attempt
from trainer.config import JobConfig
from trainer.run_folder import metrics
from trainer.run_folder.metrics import MetricsLog
from trainer.tracking import trackers
from trainer.tracking.kinds.mlflow import MLflow

PLUGIN = """
from pathlib import Path
from trainer.tracking.trackers import Tracker, register_tracker


@register_tracker("lines")
class Lines(Tracker):
    def __init__(self, folder, config):
        self._file = (folder / "lines.txt").open("w")
        self._file.write(f"{config['name']}\\n")

    def log(self, row):
        self._file.write(f"{row['step']:.0f} {row['tokens']:.0f}\\n")

    def close(self, completed):
        self._file.write(f"{completed}\\n")
        self._file.close()
"""


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves in TensorBoard's event files, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(event.step, event.value) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


def test_mlflow_has_each_row_once_after_a_kill_and_a_rollback(tmp_path, monkeypatch) -> None:
    """Rows 1 to 5, a kill, a rollback to step 3 and other rows 4 to 6: the run has six points."""
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient, MlflowException

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run = tmp_path / "tiny"
    (run / "attempts").mkdir(parents=True)
    (run / "attempts" / "000001.json").write_text('{"host": "a"}')
    config = {"log": {"project": "demo"}, "steps": 6, "students": {"small": {"lr": 0.1}}}
    killed = MLflow(run, config)
    for step in range(1, 6):
        killed.log({"step": step, "teacher/loss": 9.0 - step, "val/demo/teacher/loss": 8.0})
    killed.check()
    resumed = MLflow(run, config)
    killed.log({"step": 6, "teacher/loss": 1.0})
    with pytest.raises(MlflowException):
        killed.check()
    for step, loss in {1: 8.0, 2: 7.0, 3: 6.0, 4: 2.0, 5: 2.5, 6: 3.0}.items():
        resumed.log({"step": step, "teacher/loss": loss})
    resumed.close(completed=True)
    client = MlflowClient((run / "mlflow").as_uri())
    (tracked,) = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    points = client.get_metric_history(tracked.info.run_id, "teacher/loss")
    losses = [(1, 8.0), (2, 7.0), (3, 6.0), (4, 2.0), (5, 2.5), (6, 3.0)]
    assert [(point.step, point.value) for point in points] == losses
    assert (tracked.info.run_name, tracked.info.status) == ("tiny", "FINISHED")
    assert tracked.data.params == {"log.project": "demo", "steps": "6", "students.small.lr": "0.1"}


def test_a_slow_process_of_a_killed_attempt_replaces_no_copy(tmp_path) -> None:
    """It comes to opening the tracker only after the next attempt's process has opened it."""
    pytest.importorskip("tensorboardX")
    (tmp_path / "config.yaml").write_text("steps: 2\n")
    followers = []
    for signal_to_it in (signal.SIGSTOP, signal.SIGCONT):
        Attempt.begin(tmp_path)
        follower = trackers.start_tracker(tmp_path, "tensorboard")
        assert follower is not None
        os.kill(follower._follower.pid, signal_to_it)
        followers.append(follower)
    slow, newer = followers
    with MetricsLog(tmp_path / "metrics.jsonl") as file:
        file.append({"step": 1, "teacher/loss": 0.5})
    assert newer.finish(completed=True, seconds=60)
    os.kill(slow._follower.pid, signal.SIGCONT)
    assert not slow.finish(completed=False, seconds=60)
    assert scalars(tmp_path / "tensorboard")["teacher/loss"] == [(1, 0.5)]


@pytest.mark.slow
def test_other_trackers_have_every_row_of_a_resumed_run_once(corpus, tmp_path) -> None:
    """TensorBoard, and one of a plugin's, over two attempts on two ranks, and after a sync."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    words = [f"data.path={corpus}", f"output_dir={tmp_path}/runs", "log.every=1", "steps=8"]
    words += ["log.trackers=[tensorboard, lines]", f"plugins=[{tmp_path}/mine.py]"]
    for hours in (["hours=1e-9"], ["hours=null"]):
        done = tandem("train", TINY_JOB, *words, *hours, "--nproc", 2)
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
    (run / "lines.txt").unlink()  # a slow follower may have been ended: sync sends what it did not
    synced = tandem("sync", run, WANDB_MODE="disabled")
    assert synced.stdout.splitlines()[-1] == f"lines has every step of {run}/metrics.jsonl"
    rows = [row for row in metrics.read(run / "metrics.jsonl") if "teacher/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    drawn = scalars(run / "tensorboard")["teacher/loss"]
    assert [step for step, _ in drawn] == list(range(1, 9))
    assert [loss for _, loss in drawn] == pytest.approx([row["teacher/loss"] for row in rows])
    name, *lines, completed = (run / "lines.txt").read_text().splitlines()
    assert (name, completed) == ("tiny", "True")
    told = [f"{row['step']:.0f} {row['tokens']:.0f}" for row in rows]
    assert [*dict.fromkeys(lines)] == told


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as refused:
        configs.load(str(TINY_JOB), JobConfig, "job", ["data.path=c", f"log.trackers=[{name}]"])
    return str(refused.value)


def test_a_tracker_that_is_not_there_is_refused(monkeypatch) -> None:
    said = "log.trackers[0]: no tracker has the name tensorbord; did you mean tensorboard?"
    assert said in refusal("tensorbord")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs tensorboardX: pip install 'tandem-distill[tensorboard]'" in refusal("tensorboard")
