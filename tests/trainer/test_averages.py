"""Averaged weights are their formula, change nothing else, resume exactly, and are exported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForMaskedLM

import configs
from configs import ConfigError
from model import from_pretrained
from tests.distributed import run_distributed
from tests.trainer.jobs import curve, finish, run, tiny_job
from trainer.checkpoint.attempts import published
from trainer.checkpoint.folder import step_name
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.snapshot import AVERAGE
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.evaluation.export import export_learner
from trainer.evaluation.finished import SavedLearners
from trainer.learners.learner import Learner
from trainer.lifecycle.forking import fork
from trainer.lifecycle.in_progress import Saving
from trainer.optimizers.config import ExponentialAverage
from trainer.optimizers.gated import GatedOptimizer
from trainer.run_folder.folder import RunFolder

STEPS, STOP, WINDOW = 7, 5, 3
TEACHER, DISTILBERT, TINYBERT = "teacher", "students/distilbert", "students/tinybert"
AVERAGES = [
    "teacher.average={kind: ema, decay: 0.9}",
    f"students.distilbert.average={{kind: last, checkpoints: {WINDOW}}}",
    "students.distilbert.start={}",
    "students.tinybert.average={kind: ema, decay: 0.5}",
]
WORDS = [f"steps={STEPS}", "checkpoint.keep=1", "checkpoint.keep_best=0", "evaluation.every=1"]
LEARNERS = ("teacher", "students.distilbert", "students.tinybert")
STAGES, MOVED = (
    [f"{learner}.zero_stage={stage}" for learner, stage in zip(LEARNERS, stages, strict=True)]
    for stages in ((2, 3, 1), (3, 1, 0))
)


def test_the_moving_average_is_torchs_with_a_decay_that_rises_and_follows_taken_steps_only():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    config = ExponentialAverage(decay=0.25)
    taken = 0

    def by_hand(mean: Tensor, weights: Tensor, count: Tensor | int) -> Tensor:
        decay = min(0.25, (1 + int(count)) / (10 + int(count)))
        return decay * mean + (1 - decay) * weights

    theirs = AveragedModel(model, avg_fn=by_hand)
    optimizer = GatedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(8):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.mean_kept = config.kept(taken)
        optimizer.gradient_factor = None if step in (2, 5) else 1.0
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.gradient_factor is not None:
            theirs.update_parameters(model)
            taken += 1
    for parameter, mean in zip(model.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[parameter][AVERAGE], mean.data)
        assert not torch.equal(mean, parameter)
    optimizer.forget()  # moments, but no weights
    optimizer.step()
    assert all(state[AVERAGE].any() for state in optimizer.state.values())


def averaged_jobs(corpus: Path, runs: Path) -> None:
    """A run without averages, one with them, and one that is stopped and resumed."""
    words = [*WORDS, *STAGES]
    run(tiny_job(corpus, runs, "name=plain", *words, AVERAGES[2]))
    finish(run(tiny_job(corpus, runs, "name=straight", *words, *AVERAGES)))
    run(tiny_job(corpus, runs, "name=stopped", *words, *AVERAGES), stop_after=STOP)
    run(tiny_job(corpus, runs, "name=stopped", *words, *AVERAGES))


def stopped_jobs(corpus: Path, runs: Path) -> None:
    """A run with averages that is stopped."""
    words = [*WORDS, *STAGES]
    run(tiny_job(corpus, runs, "name=moved", *words, *AVERAGES), stop_after=STOP)


def on_one_rank(corpus: Path, runs: Path) -> None:
    """The run from its start in one process, and the rest of the one that was stopped."""
    words = [*WORDS, *AVERAGES]
    run(tiny_job(corpus, runs, "name=alone", *words))
    run(tiny_job(corpus, runs, "name=moved", *words, *MOVED))


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages")
    run_distributed(averaged_jobs, 2, corpus, folder)
    return folder


def weights(run: Path, learner: str, step: int = STEPS, state: str = "master") -> dict[str, Tensor]:
    return Checkpoint(run / "checkpoints", step).master_weights(learner, state)


@pytest.mark.slow
@pytest.mark.parametrize("learner", [TEACHER, DISTILBERT, TINYBERT])
def test_averages_change_nothing_and_are_equal_however_they_came_about(runs, learner):
    own = weights(runs / "straight", learner)
    straight, stopped = (weights(runs / n, learner, state=AVERAGE) for n in ("straight", "stopped"))
    for key, weight in weights(runs / "plain", learner).items():
        assert torch.equal(weight, own[key])
        assert torch.equal(stopped[key], straight[key])
    assert any(not torch.equal(straight[key], own[key]) for key in own)


@pytest.mark.slow
def test_averages_are_those_of_one_rank_also_at_other_stages(runs, corpus):
    run_distributed(stopped_jobs, 2, corpus, runs)
    run_distributed(on_one_rank, 1, corpus, runs)
    for learner in (TEACHER, DISTILBERT, TINYBERT):
        straight = weights(runs / "straight", learner, state=AVERAGE)
        for name in ("moved", "alone"):
            for key, mean in weights(runs / name, learner, state=AVERAGE).items():
                torch.testing.assert_close(mean, straight[key], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_mean_of_checkpoints_is_theirs_and_they_are_kept(runs):
    steps = (4, 6, 7)  # every second, and the last
    parts = [weights(runs / "straight", DISTILBERT, step) for step in steps]
    mean = weights(runs / "stopped", DISTILBERT, state=AVERAGE)  # step 5 does not count
    for key, tensor in mean.items():
        expected = torch.stack([part[key].double() for part in parts]).mean(0).float()
        torch.testing.assert_close(tensor, expected)


@pytest.mark.slow
def test_averages_are_scored_and_exported_beside_the_weights(runs, tmp_path):
    folder = RunFolder(runs / "straight")
    results = json.loads(folder.evaluation.read_text())
    assert {"average_loss", "average_accuracy"} <= {one["name"] for one in results["columns"]}
    last = {key: value for step, key, value in curve(folder) if step == STEPS}
    for learner in (TEACHER, DISTILBERT, TINYBERT):
        assert results["learners"][learner]["average_loss"] != results["learners"][learner]["loss"]
        scored = next(last[key] for key in last if key.endswith(f"/{learner}/average_loss"))
        assert scored == pytest.approx(results["learners"][learner]["average_loss"], rel=1e-5)
        exported = from_pretrained(folder.export(learner, average=True)).state_dict()
        mean = weights(folder.path, learner, state=AVERAGE)
        assert all(torch.equal(exported[key], mean[f"model.{key}"]) for key in exported)
    saved = SavedLearners(folder)
    export_learner(saved.averages(), "teacher", tmp_path / "teacher")
    AutoModelForMaskedLM.from_pretrained(tmp_path / "teacher")
    card = (tmp_path / "teacher" / "README.md").read_text()
    assert f"{results['learners'][TEACHER]['average_loss']:.4f}" in card
    plain = SavedLearners(RunFolder(runs / "plain")).averages()
    with pytest.raises(TrainingError, match="teacher has no averaged weights"):
        export_learner(plain, "teacher", tmp_path / "none")


def late_save(corpus: Path, runs: Path) -> None:
    """A run whose student is done at step 5, which is not saved, as when the teacher skips it."""
    words = ["students.tinybert=null", AVERAGES[1], "steps=6"]
    config = tiny_job(corpus, runs, *words, "students.distilbert.budget.steps=3")
    due = Saving.is_due

    def late(saving: Saving, requested: bool) -> bool:
        return saving._state.step != 5 and due(saving, requested)

    with mock.patch.object(Saving, "is_due", late):
        run(config)


@pytest.mark.slow
def test_a_student_that_is_saved_after_its_end_has_its_last_weights_in_its_mean(corpus, tmp_path):
    run_distributed(late_save, 1, corpus, tmp_path)
    parts = [weights(tmp_path / "tiny", DISTILBERT, step) for step in (4, 6)]
    for key, tensor in weights(tmp_path / "tiny", DISTILBERT, 6, AVERAGE).items():
        expected = torch.stack([part[key].double() for part in parts]).mean(0).float()
        torch.testing.assert_close(tensor, expected)


def skipping_jobs(corpus: Path, runs: Path) -> list[list[tuple[float, str, float]]]:
    """The students' curves of two runs whose teacher skips the fourth step, a student's last.

    The second run is stopped and resumed after that step.
    """
    words = [*AVERAGES[1:3], f"steps={STEPS}", "checkpoint.keep_best=0", "evaluation.every=1"]
    words.append("students.tinybert.budget.steps=4")
    sums = Learner.take_sums

    def spoiled(learner: Learner) -> Tensor:
        is_hit = learner.name == TEACHER and learner.engine.global_steps == 3
        return sums(learner) * (math.nan if is_hit else 1.0)

    with mock.patch.object(Learner, "take_sums", spoiled):
        straight = run(tiny_job(corpus, runs, "name=straight", *words))
        run(tiny_job(corpus, runs, "name=stopped", *words), stop_after=4)
        stopped = run(tiny_job(corpus, runs, "name=stopped", *words))
    return [curve(folder, "students/") for folder in (straight, stopped)]


def test_a_stop_while_a_learner_skips_steps_changes_no_mean_and_no_score(corpus, tmp_path):
    curves = run_distributed(skipping_jobs, 1, corpus, tmp_path)[0]
    assert curves[0] == curves[1]
    assert max(step for step, key, _ in curves[0] if "val/data/students/tinybert" in key) == 4
    straight, stopped = (
        weights(tmp_path / name, DISTILBERT, state=AVERAGE) for name in ("straight", "stopped")
    )
    parts = [weights(tmp_path / "straight", DISTILBERT, step) for step in (2, 6, STEPS)]
    for key, mean in straight.items():
        assert torch.equal(stopped[key], mean)
        expected = torch.stack([part[key].double() for part in parts]).mean(0).float()
        torch.testing.assert_close(mean, expected)


def damaged_jobs(corpus: Path, runs: Path) -> None:
    """A stopped run of whose checkpoints an earlier one loses a byte before it resumes."""
    words = ["students.tinybert=null", *AVERAGES[1:3], f"steps={STEPS}", "checkpoint.keep_best=0"]
    config = tiny_job(corpus, runs, *words)
    run(config, stop_after=STOP)
    for file in (RunFolder.of(config).checkpoints / step_name(4) / DISTILBERT).glob("rank-*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    run(config)


def test_a_mean_is_without_a_damaged_checkpoint_which_is_said_once(corpus, tmp_path, capfd):
    run_distributed(damaged_jobs, 1, corpus, tmp_path)
    parts = [weights(tmp_path / "tiny", DISTILBERT, step) for step in (6, STEPS)]
    for key, tensor in weights(tmp_path / "tiny", DISTILBERT, state=AVERAGE).items():
        expected = torch.stack([part[key].double() for part in parts]).mean(0).float()
        torch.testing.assert_close(tensor, expected)
    told = capfd.readouterr()
    assert (told.out + told.err).count("averages are without step 4") == 1


def test_a_teacher_whose_training_ends_before_the_job_has_no_average(corpus, tmp_path):
    for other in ("teacher.budget.steps=3", "stop.patience=2"):
        with pytest.raises(ConfigError, match=r"keeps no(ne| average)"):
            tiny_job(corpus, tmp_path, AVERAGES[0], other)


STILL = ["teacher.optimizer.learning_rate=1e-30", "teacher.schedule.warmup_steps=0"]


def patient_job(corpus: Path, runs: Path) -> None:
    """A teacher without students, with an average, which does not learn and is out of patience.

    The job is started once more after its end.
    """
    words = ["students=null", "steps=20", "stop.patience=2", "evaluation.every=1"]
    config = tiny_job(corpus, runs, AVERAGES[0], *words, *STILL)
    run(config)
    finish(run(config))


def test_a_teacher_out_of_patience_is_told_and_keeps_its_average(corpus, tmp_path, capfd):
    run_distributed(patient_job, 1, corpus, tmp_path)
    told = capfd.readouterr()
    assert "step 3: teacher has not done better than accuracy " in told.out + told.err
    saved = SavedLearners(RunFolder(tmp_path / "tiny"))
    assert saved.checkpoint.step == 3
    assert saved.has_average(TEACHER)
    assert saved.checkpoint.has_state(TEACHER, "exp_avg"), "a fork can continue with its moments"
    assert (tmp_path / "tiny" / "exports" / "teacher.average").is_dir()


def forked_jobs(corpus: Path, runs: Path) -> list[list[tuple[float, str, float]]]:
    """The curves of a run and its fork at step 6; the best of the teacher was before."""
    words = ["students.tinybert=null", f"steps={STEPS}", *AVERAGES[1:3], *STILL]
    source = run(tiny_job(corpus, runs, "name=source", *words, "evaluation.final=best"))
    first = source.checkpoints / step_name(4) / "manifest.json"
    intact = first.read_bytes()
    first.write_bytes(intact[:-1])
    fork(source, 6, "damaged")
    first.write_bytes(intact)
    forked = configs.load(str(fork(source, 6, "forked").folder.config), JobConfig, "job", [])
    return [curve(source), curve(run(forked))]


def test_a_fork_averages_and_chooses_among_the_checkpoints_of_its_source(corpus, tmp_path):
    curves = run_distributed(forked_jobs, 1, corpus, tmp_path)[0]
    assert curves[0] == curves[1]
    source, forked = (RunFolder(tmp_path / name) for name in ("source", "forked"))
    assert SavedLearners(source).checkpoint_of(TEACHER).step == 2
    assert SavedLearners(forked).checkpoint_of(TEACHER).step == 2
    means = [weights(folder.path, DISTILBERT, state=AVERAGE) for folder in (source, forked)]
    assert all(torch.equal(mean, means[1][key]) for key, mean in means[0].items())
    earlier = Checkpoint(forked.checkpoints, 4).trainer_state
    assert earlier["wandb_id"] == Checkpoint(forked.checkpoints, 6).trainer_state["wandb_id"]
    assert published(RunFolder(tmp_path / "damaged").checkpoints) == [2, 6]
