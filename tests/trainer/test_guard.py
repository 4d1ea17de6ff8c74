"""Bad losses: the affected learner skips the step on all ranks, and no other learner changes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.trainer import tiny
from tests.trainer.jobs import curve, run, tiny_job, with_students
from trainer.batch_config import StepShape
from trainer.checkpoint import writer
from trainer.checkpoint.attempts import published
from trainer.checkpoint.reader import Checkpoint
from trainer.errors import CheckpointError, TrainingError
from trainer.learner_config import LearnerConfig
from trainer.learner_life import BudgetConfig, StartConfig
from trainer.learners.learner import Learner
from trainer.learners.module import build_objective
from trainer.learners.state import LearnerState
from trainer.objectives import ObjectiveConfig
from trainer.objectives.task import ScoredByReferences
from trainer.run_folder.folder import RunFolder
from trainer.schedules import schedule_config
from trainer.tasks.reranking import Reranking
from trainer.tasks.span import Span
from trainer.watch.guard import GRADIENT, LOSS, SPIKE, Guard, GuardConfig

WAVES = GuardConfig(sigmas=3.0, window=4, max_consecutive_skips=2)


def test_a_spike_stands_out_from_the_losses_that_were_learnt_from():
    guard = Guard()
    for loss in (2.0, 1.0, 2.0, 1.0, 2.0):  # the first leaves the window: mean 1.5, sigma 0.5
        assert guard.judge(WAVES, loss, "mlm") is None
        guard.record_step(WAVES, loss)
    assert guard.losses == [1.0, 2.0, 1.0, 2.0]
    assert guard.judge(WAVES, 2.99, "mlm") is None
    assert guard.judge(WAVES, 3.01, "mlm") == SPIKE
    guard.record_skip(SPIKE)
    assert guard.judge(WAVES, 3.01, "mlm") == SPIKE  # it has not become usual by having happened
    assert guard.judge(WAVES, math.nan, "mlm") == LOSS
    assert guard.judge(dataclasses.replace(WAVES, sigmas=None), 99.0, "mlm") is None
    assert guard.judge(WAVES, 99.0, "another objective") is None
    assert guard.judge(WAVES, math.inf, "another objective") == LOSS


def test_losses_that_do_not_vary_are_no_scale():
    guard, config = Guard(), GuardConfig(window=4)
    for _ in range(4):
        guard.record_step(config, 0.0)
    assert guard.judge(config, 1e-7, "") is None


def test_a_window_that_is_not_full_says_nothing():
    guard = Guard()
    for loss in (1.0, 1.0, 1.0):
        guard.record_step(WAVES, loss)
    assert guard.judge(WAVES, 100.0, "") is None


def test_runs_of_bad_steps_are_counted_by_reason():
    guard = Guard()
    for reason in (SPIKE, SPIKE, GRADIENT):
        guard.record_skip(reason)
    assert guard.in_a_row == 3
    guard.record_step(WAVES, 1.0)
    assert (guard.in_a_row, guard.skipped) == (0, {SPIKE: 2, GRADIENT: 1})


def test_one_that_is_done_skips_no_more():
    counters = LearnerState(0)
    assert not counters.is_skipping
    counters.guard.record_skip(SPIKE)
    assert counters.is_skipping
    counters.finish(9, 1.0)
    assert not counters.is_skipping, "the run would not be saved any more"


def regime(task: ScoredByReferences, name: str) -> str:
    """That of the losses of a learner of this task."""
    config = LearnerConfig(model=tiny.encoder(), objective=ObjectiveConfig(**{name: task}))
    learner: Any = SimpleNamespace(
        config=config,
        objective=build_objective(config, config.model, 0),
        own_step=lambda step: step,
        step_shape=StepShape(8, 0, 1, 1),
        _teacher_layers=4,
        _peers=(),
    )
    return Learner._regime(learner, 0, tiny.random_batch(0))


def test_losses_of_a_run_that_has_moved_compare_with_those_before(tmp_path):
    """It has its examples in another folder, which tasks of answers know."""
    tasks = {"span": Span(), "reranking": Reranking()}
    for name, task in tasks.items():
        known = {regime(task.scored_on(tmp_path / place), name) for place in ("here", "there")}
        assert len(known) == 1
        assert regime(dataclasses.replace(task, weight=2.0), name) not in known


@pytest.mark.parametrize("wrong", [{"sigmas": 0}, {"window": 1}, {"max_consecutive_skips": -1}])
def test_limits_without_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: must"):
        GuardConfig(**wrong)


def sabotage(name, steps, factor):
    """Falsify rank 0's share of a learner's loss at these steps (from 0); returns the undo."""
    take_sums = Learner.take_sums

    def take(learner):
        is_hit = learner.name == name and learner.engine.global_steps in steps
        sums = take_sums(learner)
        sums[:-1] *= factor if is_hit and dist.get_rank() == 0 else 1.0
        return sums

    Learner.take_sums = take
    return lambda: setattr(Learner, "take_sums", take_sums)


def full_disk(step):
    """Make the save of this step fail on every rank; returns the undo."""
    publish = writer.publish

    def publish_or_not(unit, *rest):
        if unit.step == step:
            raise CheckpointError("the disk is full")
        publish(unit, *rest)

    writer.publish = publish_or_not
    return lambda: setattr(writer, "publish", publish)


def job_of_new_conditions(corpus, runs):
    """At step 4 pairs begin; at step 6 the teacher is done, and a student listens in full."""
    pairs = ["data.phases=[{from_step: 4, packing: sentence_pair}]", "teacher.objective.nsp={}"]
    gate = "students.tinybert.objective.soft_kl.min_lead=0.5"
    shape = [gate, "teacher.model.segment_types=2", "teacher.model.pooler=tanh"]
    others = ["teacher.budget.steps=6", "checkpoint.keep=4"]
    job = tiny_job(corpus, runs, "name=conditions", *pairs, *shape, *others)
    student = dataclasses.replace(job.students["tinybert"], start=StartConfig())
    return with_students(job, tinybert=student)


def jobs(corpus, runs):
    """A student with two bad losses, interrupted or not, and a teacher with too many.

    Another student finishes when the first bad loss occurs, or when a save fails. Before that, a
    weight jumps.
    """
    random = "teacher.dropout=0.1"
    job = tiny_job(corpus, runs, "name=quiet", "steps=10", "evaluation.every=20", random)
    leap = "teacher.objective.mlm.weight={0: 1.0, 5: 1.0, 6: 9.0}"
    run(tiny_job(corpus, runs, "name=leap", "students=null", leap, "teacher.guard.window=3"))
    run(job_of_new_conditions(corpus, runs))
    plain = {"schedule": schedule_config("linear"), "guard": WAVES}
    student = dataclasses.replace(job.students["tinybert"], **plain)
    brief = dataclasses.replace(student, budget=BudgetConfig(steps=6))
    job = with_students(job, tinybert=student, brief=brief)
    repair = full_disk(6)
    run(job)
    repair()
    repair = sabotage("students/tinybert", (5, 6), 10.0)
    run(dataclasses.replace(job, name="hit"))
    stopped = dataclasses.replace(job, name="stopped")
    run(stopped, stop_after=6)
    run(stopped)
    repair()
    repair = sabotage("teacher", range(5, 99), math.nan)
    teacher = dataclasses.replace(job.teacher, guard=WAVES)
    try:
        run(dataclasses.replace(job, name="lost", teacher=teacher))
    except TrainingError as error:
        return str(error)
    finally:
        repair()
    return None


@pytest.fixture(scope="module")
def launched(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("guard")
    return runs, run_distributed(jobs, 2, corpus, runs)


def test_the_one_that_is_hit_sits_out_and_nobody_else_notices(launched):
    quiet, hit = (RunFolder(launched[0] / name) for name in ("quiet", "hit"))
    assert curve(hit, "teacher") == curve(quiet, "teacher")
    skipped = {step: value for step, key, value in curve(hit, "tinybert/skipped_steps")}
    assert [skipped[step] for step in (5, 6, 7, 10)] == [0, 1, 2, 2]
    own, calm = ({(s, k): v for s, k, v in curve(run, "tinybert/mlm")} for run in (hit, quiet))
    assert own[5, "students/tinybert/mlm"] == calm[5, "students/tinybert/mlm"]
    assert own[10, "students/tinybert/mlm"] != calm[10, "students/tinybert/mlm"]


def test_one_that_is_done_waits_as_it_is_for_a_checkpoint(launched):
    """Until no learner skips any more, or until a save succeeds; one failed save ends nothing."""
    quiet, hit = (RunFolder(launched[0] / name) for name in ("quiet", "hit"))
    assert curve(hit, "brief") == curve(quiet, "brief")
    assert max(step for step, _, _ in curve(hit, "brief")) == 6
    assert published(quiet.checkpoints)[-2:] == [8, 10]
    then, last = (Checkpoint(hit.checkpoints, step) for step in published(hit.checkpoints)[-2:])
    for checkpoint in (then, last, Checkpoint(quiet.checkpoints, 8)):
        for name, tensor in checkpoint.master_weights("students/brief").items():
            assert (tensor == last.master_weights("students/brief")[name]).all()
        assert checkpoint.trainer_state["learners"]["students/brief"]["finished_at"] == 6


def test_a_leap_of_a_scheduled_weight_is_no_spike(launched):
    rows = curve(RunFolder(launched[0] / "leap"), "teacher/")
    losses = {step: value for step, key, value in rows if key == "teacher/loss"}
    assert losses[7] > 5 * losses[6]
    assert not any(value for _, key, value in rows if key == "teacher/skipped_steps")


def test_losses_of_other_conditions_are_not_compared(launched):
    """Each checkpoint holds those since the conditions changed, and none from before.

    A student with `min_lead` hears its teacher as before when the teacher's budget ends at step 6.
    """
    folder = RunFolder(launched[0] / "conditions").checkpoints
    states = [Checkpoint(folder, step).trainer_state["learners"] for step in (4, 6, 8)]
    counts = {
        name: [len(state[name]["guard"]["losses"]) for state in states]
        for name in ("teacher", "students/tinybert")
    }
    assert counts == {"teacher": [4, 2, 2], "students/tinybert": [4, 2, 4]}


def test_a_restart_between_two_bad_steps_changes_no_bit(launched):
    stopped, hit = (RunFolder(launched[0] / name) for name in ("stopped", "hit"))
    assert curve(stopped) == curve(hit)


def test_too_many_in_a_row_end_the_job_with_the_checkpoint_before_them(launched):
    """Steps 6, 7 and 8 are bad; without the skips, step 6 would have been saved."""
    runs, errors = launched
    assert errors[0] == errors[1]
    assert "teacher skipped 3 steps in a row (loss not finite at step 8)" in errors[0]
    assert "\n" not in errors[0]
    assert published(RunFolder(runs / "lost").checkpoints)[-1] == 4
    rows = {step: value for step, key, value in curve(RunFolder(runs / "lost"), "skipped_steps")}
    assert max(rows) == 8
