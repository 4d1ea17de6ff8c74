"""Offline distillation: a frozen teacher in the same step, loop, checkpoints and report."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist

import configs
from configs import ConfigError
from model import Capture, from_pretrained, import_folder
from tests.distributed import run_distributed
from tests.trainer import tiny
from tests.trainer.jobs import curve, finish, run, tiny_job
from trainer.batch_config import MicroStep, StepShape
from trainer.batches import to_device
from trainer.checkpoint.attempts import published
from trainer.checkpoint.folder import scores_of
from trainer.config import JobConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.record.gauges import Gauges
from trainer.run_folder.folder import RunFolder

FROZEN = ["teacher.objective=null", "teacher.optimizer=null", "teacher.schedule=null",
          "teacher.frozen=true", "teacher.zero_stage=0"]  # fmt: skip
STEPS = "steps=5"
STUDENTS = ("students/distilbert", "students/tinybert")


def offline_and_online(corpus, runs, teacher):
    """Students of a teacher that is frozen, partly frozen, or at learning rate 0."""
    if dist.get_rank() == 0:
        import_folder(teacher, runs / "imported")
    dist.barrier()
    pretrained = f"teacher.init.pretrained={teacher}"
    standing = "teacher.optimizer.learning_rate=1e-30"
    run(tiny_job(corpus, runs, "name=online", STEPS, pretrained, standing))
    offline = tiny_job(corpus, runs, "name=offline", STEPS, pretrained, *FROZEN)
    counted = counted_in_mfu()
    finish(run(offline))
    assert counted == {"teacher", *STUDENTS}
    imported = f"teacher.init.pretrained={runs / 'imported'}"
    parts = tiny_job(
        corpus, runs, "name=parts", STEPS, imported, *FROZEN, "teacher.zero_stage=3",
        f"teacher.model={runs / 'imported' / 'model.yaml'}",
    )  # fmt: skip
    run(parts, stop_after=3)
    if dist.get_rank() == 0:
        shutil.rmtree(runs / "imported")
    dist.barrier()
    finish(run(configs.load(str(runs / "parts" / "config.yaml"), JobConfig, "job")))


def counted_in_mfu():
    """The names of the learners whose FLOPs are counted from here on."""
    names, read = set(), Gauges.read

    def noting(gauges, step, tokens_per_second, learners):
        names.update(one.name for one in learners)
        return read(gauges, step, tokens_per_second, learners)

    Gauges.read = noting
    return names


@pytest.fixture(scope="module")
def teacher(finished):
    return finished[0] / "exports" / "teacher"


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory, teacher):
    folder = tmp_path_factory.mktemp("offline")
    run_distributed(offline_and_online, 2, corpus, folder, teacher)
    return folder


@pytest.mark.parametrize("name", STUDENTS)
def test_students_learn_what_they_learn_online_from_a_teacher_that_stands_still(runs, name):
    offline, online = (curve(RunFolder(runs / run), name) for run in ("offline", "online"))
    assert len(offline) > 20
    assert offline == online


def test_partitioned_interrupted_and_without_the_folder_it_came_from(runs):
    """A ZeRO-3 teacher, a stop at step 3, and the imported folder removed before the restart."""
    assert curve(RunFolder(runs / "parts")) == curve(RunFolder(runs / "offline"))


def test_the_teacher_is_scored_exported_and_unchanged(runs, teacher):
    before = from_pretrained(teacher).state_dict()
    for run_name in ("offline", "parts"):
        folder = RunFolder(runs / run_name)
        after = from_pretrained(folder.exports / "teacher").state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert "not recorded" in (folder.exports / "teacher" / "README.md").read_text()
        assert "finished" in (folder.exports / "tinybert" / "README.md").read_text()
        scores = {key: value for _, key, value in curve(folder, "/teacher/")}
        assert scores["val/data/teacher/loss"] > 0
        assert not [key for _, key, _ in curve(folder) if key.startswith("teacher/")]


@pytest.mark.parametrize(
    ("key", "value"), [("objective", {"mlm": {}}), ("clip_each_parameter", True), ("zero_stage", 1)]
)
def test_what_a_frozen_teacher_would_ignore_is_refused(key, value):
    with pytest.raises(ValueError, match=f"^{key}"):
        LearnerConfig(frozen=True, init=InitConfig(pretrained="somewhere"), **{key: value})


def states_in_steps(dropout):
    """Last hidden states of a frozen teacher in steps 0, 1 and 0, and its scores, read twice."""
    config = LearnerConfig(
        tiny.encoder(), frozen=True, init=InitConfig(pretrained="it"), dropout=dropout
    )
    teacher = Learner(TEACHER, config, config.model, StepShape(2, tiny.SEED, 8, 1))
    batch = to_device(tiny.random_batch(0), torch.device("cpu"))
    capture, states, scores = Capture(last_hidden_state=True), [], []
    for step in (0, 1, 0):
        found = teacher.accumulate(batch, {}, MicroStep(step, 0, True), capture=capture)
        states.append(found.last_hidden_state.clone())
        scores.append([reading.clone() for reading in teacher.evaluate(batch)])
    return states, scores


def with_and_without_dropout():
    return states_in_steps(0.3), states_in_steps(0.0)


def test_a_frozen_teacher_with_dropout_is_in_training_mode_in_steps_only():
    """As in TinyBERT's code; its dropout is a function of seed and step, and scores have none."""
    (dropped, scores), (plain, plain_scores) = run_distributed(with_and_without_dropout, 1)[0]
    assert torch.equal(dropped[0], dropped[2])
    assert not torch.equal(dropped[0], dropped[1])
    assert all(torch.equal(states, plain[0]) for states in plain)
    for readings in (*scores, *plain_scores):
        assert all(map(torch.equal, readings, plain_scores[0]))


def test_stored_predictions_have_no_dropout():
    config = {"frozen": True, "init": {"pretrained": "it"}, "dropout": 0.1, "stored": {"path": "p"}}
    with pytest.raises(ConfigError, match="dropout: must be 0 where predictions are stored"):
        configs.validate(config, LearnerConfig, "learner")


def test_another_model_than_the_folder_has_is_named(teacher, corpus, tmp_path):
    from tests.conftest import TINY_JOB, tandem
    from tests.failing import one_line

    places = [f"data.path={corpus}", f"output_dir={tmp_path}", f"teacher.init.pretrained={teacher}"]
    failed = tandem("train", TINY_JOB, *places, *FROZEN, "teacher.model.norm_eps=1e-9")
    assert failed.returncode == 1
    assert "teacher.model.norm_eps: is 1e-09, but" in one_line(failed.stderr)
    failed = tandem("train", TINY_JOB, *places, *FROZEN, "students=null")
    assert "students: a frozen teacher needs at least one" in one_line(failed.stderr)


def test_a_teacher_that_stands_still_has_no_best_checkpoint_and_its_students_have(runs):
    def ranked(run):
        checkpoints = RunFolder(runs / run).checkpoints
        return {name for step in published(checkpoints) for name in scores_of(checkpoints, step)}

    assert "teacher" not in ranked("offline")
    assert ranked("online") == {"teacher"} | ranked("offline")
    assert ranked("offline")
