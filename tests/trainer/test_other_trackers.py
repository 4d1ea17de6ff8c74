"""Trackers beside Weights & Biases: TensorBoard, read by its own reader, and a plugin's."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from configs import ConfigError
from tests.conftest import TINY_JOB, tandem
from trainer.config import JobConfig
from trainer.run_folder import metrics

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


def test_other_trackers_have_every_row_of_a_resumed_run_once(corpus, tmp_path) -> None:
    """TensorBoard, and one of a plugin's, over two attempts on two ranks."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    words = [f"data.path={corpus}", f"output_dir={tmp_path}/runs", "log.every=1", "steps=8"]
    words += ["log.trackers=[tensorboard, lines]", f"plugins=[{tmp_path}/mine.py]"]
    for hours in (["hours=1e-9"], ["hours=null"]):
        done = tandem("train", TINY_JOB, *words, *hours, "--nproc", 2)
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
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
