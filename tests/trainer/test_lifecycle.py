"""Students that are added, dropped and finished during a job, through the real loop."""

from __future__ import annotations

import dataclasses
import json
import time
import weakref

import pytest
import torch

from configs.errors import OptionError
from configs.runs import has_ended
from model import from_pretrained, select_layers
from tests.distributed import run_distributed
from tests.thorough import IS_THOROUGH
from tests.trainer.jobs import curve, finish, run, tiny_job, with_students
from trainer.checkpoint.attempts import published
from trainer.checkpoint.folder import scores_of, step_name
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.reader import Checkpoint
from trainer.errors import TrainingError
from trainer.evaluation.evaluations import Evaluations
from trainer.evaluation.finished import SavedLearners
from trainer.learner_life import BudgetConfig, InitConfig, StartConfig, ThresholdConfig
from trainer.learners.first_weights import model_state
from trainer.learners.learners import Learners
from trainer.learners.state import JobState, LearnerState, is_over, schedule_steps
from trainer.lifecycle.forking import fork
from trainer.optimizers.config import CheckpointAverage
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.schedules import schedule_config
from trainer.watch.guard import SPIKE, Guard, GuardConfig

EVERYONE = ("teacher", "students/tinybert", "students/late")
ALONE = ("copy", "tinybert", "late") if IS_THOROUGH else ("copy",)
SLOW = 0.5  # seconds of an evaluation


def students_of(job):
    """A narrow student, and one with half the teacher's layers that starts from random weights."""
    plain = {"schedule": schedule_config("linear"), "start": StartConfig()}
    narrow = dataclasses.replace(job.students["tinybert"], **plain)
    half = dataclasses.replace(job.students["distilbert"], **plain, init=narrow.init)
    return narrow, half


def edited_jobs(corpus, runs):
    """A job whose students were edited at step 4, and the same job without the edit."""
    job = tiny_job(corpus, runs, "name=undisturbed")
    narrow, half = students_of(job)
    late = dataclasses.replace(half, start=StartConfig(step=4))
    run(with_students(job, tinybert=narrow, late=late))
    edited = dataclasses.replace(job, name="edited")
    run(with_students(edited, distilbert=half, tinybert=narrow), stop_after=4)
    finish(run(with_students(edited, tinybert=narrow, late=half)))


def three_students(corpus, runs):
    """Budgets in steps and in tokens; weights from a folder and from the teacher's layers.

    Only one is at stage 3, where DeepSpeed computes linear layers in its own way.
    """
    job = tiny_job(corpus, runs, "name=limited", "steps=9", "teacher.zero_stage=1")
    narrow, half = students_of(job)
    return with_students(
        job,
        tinybert=dataclasses.replace(narrow, budget=BudgetConfig(tokens=768), zero_stage=3),
        late=dataclasses.replace(
            half,
            start=StartConfig(step=3),
            budget=BudgetConfig(steps=2),
            init=InitConfig(pretrained=str(runs / "edited" / "exports" / "late")),
        ),
        copy=dataclasses.replace(
            half,
            start=StartConfig(teacher=ThresholdConfig("loss", at_most=100.0)),
            init=InitConfig(teacher_layers=[0, 3]),
            zero_stage=3,
            guard=GuardConfig(window=4),
        ),
    )


def first_weights():
    """The weights of every learner that joins from here on, and of the teacher at that moment."""
    seen, admit = {}, Learners.admit

    def recording(learners, *arguments):
        joined = admit(learners, *arguments)
        for name in joined:
            both = learners.by_name[name].engine, learners.teacher.engine
            seen[name] = [model_state(full_state_dict(engine)) for engine in both]
        return joined

    Learners.admit = recording
    return seen


def let_go():
    """References to the modules of every learner that is released from here on."""
    modules, release = [], Learners.release_finished

    def remembering(learners):
        modules.extend(weakref.ref(one.engine.module) for one in learners.students
                       if one.counters.finished_at is not None)  # fmt: skip
        release(learners)

    Learners.release_finished = remembering
    return modules


def limited_jobs(corpus, runs):
    """Three students together, interrupted once they are done; and some of them alone."""
    job = three_students(corpus, runs)
    modules, joined = let_go(), first_weights()
    run(job, stop_after=6)
    alive = [module for module in modules if module() is not None]
    beats = finish(run(job))
    late = dataclasses.replace(job.students["late"], budget=BudgetConfig(steps=4))
    with pytest.raises(TrainingError) as too_late:
        run(with_students(job, late=late))
    assert str(too_late.value).startswith("students.late.budget: a larger budget comes too late")
    joined, count = dict(joined), len(modules)
    for name in ALONE:
        student = {name: job.students[name]}
        run(with_students(dataclasses.replace(job, name=f"only-{name}"), **student))
    return count, len(alive), joined, beats


def comes_back(corpus, runs):
    """Two students leave at step 4 and come back at step 6, the first of them wider.

    Returns the step at which the first is best; the weights of the second, its own and the mean of
    three checkpoints; and the results of the run, which ends when all budgets are used up.
    """
    words = ["name=back", "steps=20", "evaluation.final=best", "checkpoint.keep=1"]
    job = tiny_job(corpus, runs, *words)
    changed = ["students.tinybert.model.hidden_size=24", "students.tinybert.budget.steps=2"]
    wide = tiny_job(corpus, runs, *words, *changed, "teacher.budget.steps=8")
    narrow = job.students["tinybert"]
    mean = dataclasses.replace(narrow, average=CheckpointAverage(checkpoints=3))
    run(with_students(job, tinybert=narrow, mean=mean), stop_after=4)
    run(with_students(job), stop_after=6)
    mean = dataclasses.replace(mean, budget=BudgetConfig(steps=2))
    folder = run(with_students(wide, tinybert=wide.students["tinybert"], mean=mean))
    finish(folder)
    saved = SavedLearners(folder)
    weights = [which.weights("students/mean") for which in (saved, saved.averages())]
    best = saved.checkpoint_of("students/tinybert").step
    return best, weights, json.loads(folder.evaluation.read_text())


def test_students_that_come_back_have_nothing_of_those_that_left(corpus, tmp_path):
    ((best, (weights, averages), results),) = run_distributed(comes_back, 1, corpus, tmp_path)
    assert best == 8
    for name, tensor in weights.items():
        assert torch.equal(averages[name], tensor), name
    assert results["step"] == 8
    assert has_ended(results, steps=20, hours=None), "no learner is left to train"


def all_jobs(corpus, runs):
    edited_jobs(corpus, runs)
    return limited_jobs(corpus, runs)


@pytest.fixture(scope="module")
def launched(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("lifecycle")
    return runs, run_distributed(all_jobs, 2, corpus, runs)


@pytest.fixture(scope="module")
def runs(launched):
    return launched[0]


def state_at(folder, step):
    return JobState.from_json(Checkpoint(folder.checkpoints, step).trainer_state)


@pytest.mark.parametrize("name", EVERYONE)
def test_editing_the_students_of_a_run_changes_nobody_else(runs, name):
    """A student added later equals, bit for bit, one that was always configured to start then."""
    undisturbed = curve(RunFolder(runs / "undisturbed"), name)
    assert len(undisturbed) > 20
    assert curve(RunFolder(runs / "edited"), name) == undisturbed


def test_a_student_that_was_dropped_stays_in_old_checkpoints_only(runs):
    folder = RunFolder(runs / "edited")
    assert state_at(folder, 8).learners["students/late"].started_at == 4
    assert "students/distilbert" in Checkpoint(folder.checkpoints, 4).learners
    assert "students/distilbert" not in Checkpoint(folder.checkpoints, 8).learners
    assert sorted(path.name for path in folder.exports.iterdir()) == ["late", "teacher", "tinybert"]


def test_a_finished_student_costs_nothing_and_stays_in_every_checkpoint(launched):
    runs, results = launched
    for let_go_of, alive, *_ in results:
        assert (let_go_of, alive) == (2, 0)
    folder = RunFolder(runs / "limited")
    names = ("teacher", "students/tinybert", "students/late")
    steps = {name: [step for step, key, _ in curve(folder) if key == f"{name}/loss"]
             for name in names}  # fmt: skip
    # How many tokens a step has depends on Python's own prose, and so on its version.
    spent = min(step for step, key, tokens in curve(folder) if key == "tokens" and tokens >= 768)
    assert steps == {"teacher": [*range(1, 10)], "students/tinybert": [*range(1, spent + 1)],
                     "students/late": [4, 5]}  # fmt: skip
    last, before = Checkpoint(folder.checkpoints, 9), Checkpoint(folder.checkpoints, 6)
    last.verify()
    for name in names[1:]:
        for parameter, tensor in before.master_weights(name).items():
            assert (last.master_weights(name)[parameter] == tensor).all()
    results = json.loads(folder.evaluation.read_text())["learners"]
    assert [results[name]["finished_at"] for name in names] == [None, spent, 5]
    assert "Optimizer steps: 2" in (folder.exports / "late" / "README.md").read_text()


def test_while_rank_0_ends_the_run_the_others_hear_that_it_gets_on(launched):
    """At least one heartbeat for the scores, the comparison and the export of each student."""
    first, second = (beats for *_, beats in launched[1])
    assert first == second > 9


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("learner", ["student", "teacher"])
def test_a_student_and_its_teacher_are_what_they_are_without_two_others(runs, name, learner):
    """A step is compared with and without any student in tests/trainer/test_step.py."""
    key = name if learner == "student" else "teacher"
    together, alone = (curve(RunFolder(runs / run), key) for run in ("limited", f"only-{name}"))
    assert len(together) > 10
    assert alone == together


def test_first_weights_are_the_teachers_of_that_moment_or_the_folders(launched):
    """From a partitioned teacher, two steps after it began."""
    runs, results = launched
    joined = results[0][2]
    copied, teacher = joined["students/copy"]
    selected = select_layers(teacher, [0, 3])
    assert len(copied) > 20
    for name, tensor in copied.items():
        assert torch.equal(selected[name], tensor), name
    late, _ = joined["students/late"]
    stored = from_pretrained(runs / "edited" / "exports" / "late").state_dict()
    for name, tensor in late.items():
        assert torch.equal(stored[name], tensor), name


def test_a_fork_to_other_data_waits_for_scores_on_them(runs):
    folder = RunFolder(runs / "undisturbed")
    step = published(folder.checkpoints)[-1]
    assert state_at(folder, step).teacher_held_out is not None
    same = fork(folder, step, "same", ["steps=20"])
    assert state_at(same.folder, step).teacher_held_out == state_at(folder, step).teacher_held_out
    corpora = {state_at(run, step).corpora["data.path"] for run in (folder, same.folder)}
    assert len(corpora) == 1
    other = fork(folder, step, "other", ["data.sequence_length=16"])
    assert state_at(other.folder, step).teacher_held_out is None
    assert not state_at(other.folder, step).held_out


def scores_in(run, step):
    """What ranks and judges a checkpoint: the learners' scores and held-out losses."""
    healths = read_manifest(run.checkpoints / step_name(step)).health
    losses = {name: (one.evaluated_at, one.held_out) for name, one in healths.items()}
    return scores_of(run.checkpoints, step), losses


def ended_twice(corpus, runs):
    """`scores_in` the last checkpoint of a run that is stopped in its last step, and resumes."""
    job = with_students(tiny_job(corpus, runs, "name=twice", "steps=2"))
    return [scores_in(run(job, stop_after=step), 2) for step in (2, None)]


def test_a_run_that_resumes_at_its_end_keeps_the_scores_of_its_last_step(corpus, tmp_path):
    (((scores, losses), again),) = run_distributed(ended_twice, 1, corpus, tmp_path)
    assert scores["teacher"]["metric"] == "accuracy"
    assert losses["teacher"][0] == 2
    assert again == (scores, losses)


def slowly_scored(corpus, runs):
    """The training time in a row of metrics, and in the checkpoint after a slow evaluation."""
    score = Evaluations.run

    def slow(*arguments):
        time.sleep(SLOW)
        return score(*arguments)

    Evaluations.run = slow
    folder = run(with_students(tiny_job(corpus, runs, "name=slow")), stop_after=2)
    return metrics.read(folder.metrics)[1]["seconds"], state_at(folder, 2).seconds


def test_training_time_counts_an_evaluation_also_if_the_run_stops_after_it(corpus, tmp_path):
    ((row, stored),) = run_distributed(slowly_scored, 1, corpus, tmp_path)
    assert stored >= row + SLOW


def test_checkpoints_of_other_data_are_not_compared_with_the_one_that_was_forked(runs):
    folder = RunFolder(runs / "undisturbed")
    step = published(folder.checkpoints)[-1]
    scores, losses = scores_in(folder, step)
    assert scores
    assert losses.keys() == set(EVERYONE)
    assert all(None not in one for one in losses.values())
    same = fork(folder, step, "comparable", ["steps=20"])
    assert scores_in(same.folder, step) == (scores, losses)
    other = fork(folder, step, "elsewhere", ["data.masking.rate=0.6"])
    assert scores_in(other.folder, step) == ({}, dict.fromkeys(EVERYONE, (None, None)))


def spikes(run, step):
    """What each learner's guard says of a loss far above those before it, its window being full."""
    guards = {name: one.guard for name, one in state_at(run, step).learners.items()}
    return {
        name: one.judge(GuardConfig(window=3), 99.0, one.regime) for name, one in guards.items()
    }


def test_a_fork_to_other_data_calls_no_loss_on_them_a_spike(runs):
    folder = RunFolder(runs / "undisturbed")
    step = published(folder.checkpoints)[-1]
    same = fork(folder, step, "spiking", ["data.cache_gb=1.0"])
    assert spikes(same.folder, step) == spikes(folder, step) == dict.fromkeys(EVERYONE, SPIKE)
    other = fork(folder, step, "calm", ["data.masking.rate=0.6"])
    assert spikes(other.folder, step) == dict.fromkeys(EVERYONE)


def test_a_guard_that_forgets_its_losses_does_so_for_every_task_and_keeps_count():
    guard, config = Guard(), GuardConfig(window=2)
    for loss in (1.0, 1.1):
        guard.record_step(config, loss, "names")
    guard.record_skip(SPIKE)
    assert guard.judge(config, 9.0, "", "names") == SPIKE
    guard.forget()
    assert guard.judge(config, 9.0, "", "names") is None
    assert (guard.in_a_row, guard.skipped) == (0, {SPIKE: 1})


def test_a_fork_leaves_a_reshaped_students_curve_behind_and_keeps_its_teacher(runs):
    folder = RunFolder(runs / "undisturbed")
    step = published(folder.checkpoints)[-1]
    assert set(EVERYONE) <= state_at(folder, step).held_out.keys()
    words = ["students.late.encoder=frozen", "students.late.objective.cosine=null"]
    made = fork(folder, step, "frozen", words)
    assert made.begin_anew == ["students/late"]
    assert state_at(made.folder, step).held_out.keys() == {"teacher", "students/tinybert"}
    with pytest.raises(TrainingError, match=r"^teacher\.encoder: a fork keeps its teacher"):
        fork(folder, step, "third", ["teacher.encoder=frozen"])


def test_a_fork_that_cannot_be_made_says_why(runs):
    folder = RunFolder(runs / "undisturbed")
    step = published(folder.checkpoints)[-1]
    with pytest.raises(TrainingError, match=r"^name: set it with --name only"):
        fork(folder, step, "third", ["name=fourth"])
    for name in ("a/b", "../third", "", "a" * 201):
        with pytest.raises(OptionError, match=r"^--name: must be a plain folder name of at most"):
            fork(folder, step, name)
    with pytest.raises(TrainingError, match=rf"^steps: must be at least {step}, the step of the f"):
        fork(folder, step, "third", [f"steps={step - 1}"])
    with pytest.raises(FileNotFoundError, match="/proc/none"):  # its own words, not of a checkpoint
        fork(folder, step, "third", ["output_dir=/proc/none"])
    assert not (runs / "third").exists()
    assert not (runs / "fourth").exists()


def test_a_schedule_runs_over_the_budget(runs):
    """To zero, by the fraction of the steps or of the tokens used."""
    rows = [row for row in metrics.read(runs / "limited" / "metrics.jsonl") if "memory" in row]
    late = metrics.series(rows, "students/late/lr")[1]
    assert [rate / late[0] for rate in late] == pytest.approx([1.0, 0.5])
    narrow, tokens = (metrics.series(rows, key)[1] for key in ("students/tinybert/lr", "tokens"))
    used = [0.0, *(count / 768 for count in tokens)]
    expected = [1 - share for share in used[: len(narrow)]]
    assert [rate / narrow[0] for rate in narrow] == pytest.approx(expected)


def test_the_first_budget_that_is_used_up_ends_a_student():
    budget = BudgetConfig(steps=10, tokens=1000)
    assert not is_over(budget, LearnerState(5, tokens=999), 14, seconds=1e6)
    assert is_over(budget, LearnerState(5, tokens=999), 15, seconds=0.0)
    assert is_over(budget, LearnerState(5, tokens=1000), 9, seconds=0.0)
    assert schedule_steps(budget, LearnerState(5, tokens=800), 9, last=100) == 5
    assert schedule_steps(budget, LearnerState(5, tokens=100), 9, last=100) == 10
    assert schedule_steps(budget, LearnerState(5), 5, last=9) == 4
    with pytest.raises(ValueError, match="tokens: must be at least 1"):
        BudgetConfig(tokens=0)
