"""A fork of a run at a constant rate begins the decay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TINY_JOB, tandem
from trainer.run_folder import metrics

PLUGIN = '''
from dataclasses import dataclass
from typing import Annotated

from configs.rules import OneOf
from trainer.schedules import KIND, Progress, ScheduleConfig, register_schedule


@register_schedule
@dataclass
class Halving(ScheduleConfig):
    """Halves with each step."""

    kind: Annotated[str, OneOf("halving"), KIND] = "halving"

    def fraction(self, progress: Progress) -> float:
        return 0.5**progress.step
'''
STABLE = [
    "students=null", "teacher.schedule={kind: constant, warmup_steps: 0}", "steps=4",
    "teacher.optimizer.learning_rate=1e-3", "evaluation.every=8",
]  # fmt: skip


def rates(run: Path) -> list[float]:
    rows = metrics.read(run / "metrics.jsonl")
    return [row["teacher/lr"] for row in rows if "teacher/lr" in row]


@pytest.mark.slow
def test_a_fork_of_a_stable_run_decays_and_another_has_a_users_schedule(
    tmp_path: Path, corpus: Path
) -> None:
    places = [TINY_JOB, f"data.path={corpus}", f"output_dir={tmp_path}"]
    (tmp_path / "halving.py").write_text(PLUGIN)
    stable = tandem("train", *places, "name=stable", *STABLE)
    assert stable.returncode == 0, stable.stderr
    assert rates(tmp_path / "stable") == [1e-3] * 4
    decay = ["teacher.schedule.kind=wsd", "teacher.schedule.decay_steps=4", "steps=6"]
    users = [f"plugins=[{tmp_path}/halving.py]", "teacher.schedule.kind=halving"]
    for name, words in (("decayed", decay), ("halved", users)):
        fork = tandem("fork", tmp_path / "stable", "--step", 2, "--name", name, *words)
        assert fork.returncode == 0, fork.stderr
        ended = tandem("train", tmp_path / name / "config.yaml")
        assert ended.returncode == 0, ended.stderr
    falling = [1e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    assert rates(tmp_path / "decayed") == pytest.approx(falling)
    assert rates(tmp_path / "halved") == pytest.approx([1e-3, 1e-3, 0.25e-3, 0.125e-3])
