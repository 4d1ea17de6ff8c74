"""Each learner's best checkpoint: kept, exported and scored; learners that stop by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import configs
from commands import api
from configs.errors import OptionError
from configs.runs import has_ended
from model import from_pretrained
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_sentence_tasks import (  # noqa: F401 - a fixture
    LABELS,
    job_of_moods,
    lines,
)
from trainer.checkpoint.attempts import published
from trainer.config import JobConfig
from trainer.evaluation.finished import SavedLearners
from trainer.learners.state import JobState, LearnerState
from trainer.lifecycle.in_progress import Saving
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

SCORE = "single_sentence_accuracy"
BEST = ["evaluation={every: 2, final: best}", "checkpoint={every: 100, keep: 1}"]
# So fast that scores rise and fall.
UNSTEADY = [
    "students.small.optimizer.learning_rate=0.05",
    "students.lstm.optimizer.learning_rate=0.1",
]
LAST = 25
LEARNERS = ("teacher", "students/small", "students/lstm")


def finished(job: Path, *words: str) -> str:
    """The folder of the finished run. Collective."""
    run = jobs.run(jobs.load(job, *words))
    jobs.finish(run)
    return str(run.path)


def stopped_and_resumed(job: Path, *words: str) -> list[tuple[float, str, float]]:
    """The record of a run that stops twice and resumes. Collective."""
    config = jobs.load(job, *words)
    for step in (5, 9):
        jobs.run(config, stop_after=step)
    return jobs.curve(jobs.run(config))


def scores(run: RunFolder, learner: str) -> dict[int, float]:
    """The validation scores of a learner, by step."""
    column = f"val/single_sentence/{learner}/{SCORE}"
    return {row["step"]: row[column] for row in metrics.read(run.metrics) if column in row}


def best_step(by_step: dict[int, float]) -> int:
    return max(by_step, key=lambda step: (by_step[step], -step))


@pytest.fixture(scope="module", name="run")
def run_that_keeps_the_best(job) -> RunFolder:
    words = ["name=best", f"steps={LAST}", *BEST, *UNSTEADY]
    return RunFolder(Path(run_distributed(finished, 2, job, *words)[0]))


def test_each_learner_is_scored_and_exported_as_it_was_at_its_best(run) -> None:
    results = json.loads(run.evaluation.read_text())
    best = {name: best_step(scores(run, name)) for name in LEARNERS}
    assert max(scores(run, "teacher")) == LAST, "the last step is evaluated too"
    assert len(set(best.values())) > 1
    assert min(best.values()) < LAST
    assert results["step"] == LAST
    assert published(run.checkpoints) == sorted({*best.values(), LAST})
    rows = [line.split("\t") for line in lines(21, 400)]
    labels = torch.tensor([LABELS.index(label) for _, label in rows])
    for name, step in best.items():
        facts = results["learners"][name]
        assert facts["step"] == step
        assert facts[SCORE] == pytest.approx(scores(run, name)[step])
        if name == "students/lstm":
            continue  # has no class in transformers
        folder = run.export(name)
        theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        read = AutoTokenizer.from_pretrained(folder)([text for text, _ in rows], padding=True)
        with torch.no_grad():
            logits = theirs(
                torch.tensor(read.input_ids), attention_mask=torch.tensor(read.attention_mask)
            ).logits
        assert (logits.argmax(-1) == labels).float().mean().item() == pytest.approx(facts[SCORE])


def test_a_checkpoint_is_chosen_at_the_export(run, tmp_path) -> None:
    by_step = scores(run, "students/small")
    best = best_step(by_step)
    weights = {}
    for step in ("best", "last", best):
        out = tmp_path / str(step)
        words = ["export", run.path, "--learner", "small", "--out", out, "--step", step]
        ended = tandem(*words)
        assert ended.returncode == 0, ended.stderr
        assert f"after {LAST if step == 'last' else best} steps" in ended.stdout
        weights[step] = from_pretrained(out).state_dict()
        card = (out / "README.md").read_text()
        assert f"{by_step[LAST if step == 'last' else best]:.4g}"[:5] in card
    assert all(torch.equal(one, weights[best][key]) for key, one in weights["best"].items())
    assert not all(torch.equal(one, weights[best][key]) for key, one in weights["last"].items())
    words = ["export", run.path, "--learner", "small", "--out", tmp_path / "none", "--step"]
    missing, wrong = tandem(*words, 3), tandem(*words, "first")
    assert missing.returncode == 1
    assert "no checkpoint of step 3; there are: " in missing.stderr
    assert wrong.returncode == 2
    assert "neither best, last nor a step" in wrong.stderr
    with pytest.raises(OptionError, match=r"^--step: '1' is neither best, last nor a step$"):
        api.export(run.path, "small", tmp_path / "none", step="1")


def patient(job: Path, runs: Path, *words: str) -> list[str]:
    """Overrides for a frozen teacher and students that stop when they do not get better."""
    return [
        f"output_dir={runs}", "steps=60", *BEST, *UNSTEADY, "stop.patience=3",
        "teacher=null", "teacher.frozen=true",
        f"teacher.init.pretrained={job.parent / 'runs' / 'best' / 'exports' / 'teacher'}", *words,
    ]  # fmt: skip


@pytest.mark.slow
def test_students_of_a_frozen_teacher_stop_when_they_do_not_get_better(job, run, tmp_path) -> None:
    words = patient(job, tmp_path)
    two = RunFolder(Path(run_distributed(finished, 2, job, "name=two", *words)[0]))
    (again, _) = run_distributed(stopped_and_resumed, 2, job, "name=again", *words)
    assert again == jobs.curve(two)
    saved = SavedLearners(two)
    assert saved.checkpoint.step < 60, "the job ends with the last of them"
    for name in LEARNERS[1:]:
        by_step = scores(two, name)
        counters = saved.state.learners[name]
        best, last = best_step(by_step), counters.finished_at
        assert last == best + 2 * 3 == max(by_step)
        assert saved.checkpoint_of(name).step == best == counters.best.step
        trained = [row["step"] for row in metrics.read(two.metrics) if f"{name}/lr" in row]
        assert max(trained) == last
    facts = json.loads(two.evaluation.read_text())
    assert has_ended(facts, steps=60, hours=None), "it is not started again"
    assert saved.checkpoint.step == max(saved.state.learners[n].finished_at for n in LEARNERS[1:])
    (one,) = run_distributed(finished, 1, job, "name=one", *words)
    results = [json.loads((Path(path) / "evaluation.json").read_text()) for path in (one, two.path)]
    facts = [{name: of["step"] for name, of in one["learners"].items()} for one in results]
    assert facts[0] == facts[1]


def test_a_new_best_is_saved_also_while_a_learner_skips_steps(tmp_path) -> None:
    words = ["evaluation.final=best", "checkpoint.every=2"]
    state, learner = JobState(""), SimpleNamespace(counters=LearnerState(0))
    bests = {"has_best_at": lambda step: step == 3, "has_finished_at": lambda step: False}
    learners: Any = SimpleNamespace(teacher=learner, active=[], **bests)
    nothing: Any = None
    around = nothing, nothing, learners, state, nothing, nothing
    saving = Saving(jobs.tiny_job(tmp_path, tmp_path, *words), *around)
    due = {}
    for learner.counters.guard.in_a_row in (0, 1):
        for state.step in (1, 2, 3):
            due[learner.counters.guard.in_a_row, state.step] = saving.is_due(requested=False)
    assert [key for key in due if due[key]] == [(0, 2), (0, 3), (1, 3)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["evaluation.final=best", "checkpoint.keep_best=0"], "checkpoint.keep_best: must be 1"),
        (["evaluation.final=first"], "evaluation.final: must be one of"),
        (["stop.patience=0"], "stop.patience: must be at least 1"),
        (["stop.patience=2", "teacher.stacking.steps=[1]"], "stop.patience: is for a teacher of"),
    ],
)
def test_what_cannot_be_meant_is_refused(job, words, why) -> None:
    with pytest.raises(configs.ConfigError) as refused:
        configs.load(str(job), JobConfig, "job", words)
    assert why in str(refused.value)
