"""Teachers of single tasks, and the mean of several, in a job of several tasks (MT-DNN)."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from model import build, from_pretrained, save_pretrained
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_joint_tasks import (  # noqa: F401 - fixtures
    EXAMPLES,
    job_of_several,
    load,
)
from trainer.batches import to_device
from trainer.checkpoint.attempts import Owner
from trainer.control import RunContext
from trainer.errors import TrainingError
from trainer.footprint.demands import demands
from trainer.job import Job
from trainer.lifecycle.start import start_run
from trainer.measure import Startup
from trainer.step import train_step
from trainer.watch.ranks import on_rank_0

STEPS = 8
SOFT = "{teacher: mean, tasks: [moods, alike], loss: cross_entropy, weight: 0.5}"
HARD = "{moods: {single_sentence: {weight: 0.5}}, alike: {sentence_pair: {weight: 0.5}}}"


@pytest.fixture(scope="module")
def words(job, corpus, tmp_path_factory) -> list[str]:
    """A teacher of all tasks, one of `moods`, one of `alike`, each untrained; their student."""
    folder = tmp_path_factory.mktemp("teachers")
    every = load(job).students["cut"].architecture
    for seed, heads in enumerate((EXAMPLES, ["moods"], ["alike"])):
        chosen = {name: every.task_heads[name] for name in heads}
        model = build(dataclasses.replace(every, task_heads=chosen), seed)
        save_pretrained(model, folder / "_".join(heads), corpus / "tokenizer")
    further = {"of_moods": folder / "moods", "of_alike": folder / "alike"}
    return [
        "teacher=null", "teacher.frozen=true",
        f"teacher.init.pretrained={folder / '_'.join(EXAMPLES)}",
        *(
            f"teachers.{name}={{frozen: true, init: {{pretrained: {path}}}}}"
            for name, path in further.items()
        ),
        f"students.small.objective={{soft_labels: {SOFT}, tasks: {HARD}}}",
    ]  # fmt: skip


def told(folder: str | Path, batch, task: str) -> torch.Tensor:
    with torch.no_grad():
        model = from_pretrained(folder).eval()
        return model(batch.input_ids, batch.segment_ids, batch.attention_mask).heads[task]


def in_plain_torch(config, student, batch, task: str) -> dict[str, float]:
    """The student's terms of a batch of this task, as the paper has them."""
    labels = batch.targets[task].labels
    ours = student(batch.input_ids, batch.segment_ids, batch.attention_mask).heads[task]
    if task == "names":
        return {}
    own = config.other_teachers[f"teachers/of_{task}"].init.pretrained
    theirs = [told(one, batch, task) for one in (config.teacher.init.pretrained, own)]
    if task == "alike":
        mean = torch.stack(theirs).mean(0)
        terms = F.mse_loss(ours[:, 0], labels), F.mse_loss(ours, mean)
    else:
        mean = torch.stack([one.softmax(-1) for one in theirs]).mean(0)
        terms = F.cross_entropy(ours, labels), F.cross_entropy(ours, mean)
    return dict(zip((task, f"soft_labels_{task}"), (one.item() for one in terms), strict=True))


def steps(path: Path, overrides: list[str]) -> list[tuple[dict, dict, float, list[str]]]:
    """Of each step the student's terms, those of plain torch, the loss, and who ran."""
    config = load(path, *overrides, f"name=taught_{dist.get_world_size()}")
    attempt = on_rank_0(lambda: start_run(config, Owner.here())).attempt
    around = RunContext.of(config, attempt, dist.get_rank(), lambda: False, Startup())
    found: list[tuple[dict, dict, float, list[str]]] = []
    ran: list[str] = []
    with Job(config, torch.device("cpu"), around) as one:
        one.admit_students()
        teachers, students = one.learners.teachers, one.learners.students
        student = students[0]
        for learner in teachers:
            learner.engine.module.register_forward_hook(
                lambda *_, name=learner.name: ran.append(name)
            )
        for step in range(STEPS):
            batch, before = one.batches.take(), copy.deepcopy(student.model).eval()
            task = next(name for name in EXAMPLES if name in batch.targets)
            plain = in_plain_torch(config, before, to_device(batch, torch.device("cpu")), task)
            ran.clear()
            result = train_step(teachers[0], students, batch, step, others=teachers[1:])
            terms = result.terms[student.name]
            found.append((terms, plain, result.losses[student.name], sorted(set(ran))))
    return found


def task_of(terms: dict[str, float]) -> str:
    return next(name for name in EXAMPLES if name in terms)


@pytest.fixture(scope="module")
def alone(job, words):
    return run_distributed(steps, 1, job, words)[0]


@pytest.mark.slow
def test_soft_labels_are_the_mean_of_the_teachers_that_have_the_task(alone) -> None:
    seen = set()
    for terms, plain, loss, _ in alone:
        assert terms == pytest.approx({**terms, **plain}, rel=1e-4)
        task = task_of(terms)
        seen.add(task)
        if task == "names":
            assert [*terms] == ["names"]
            assert loss == pytest.approx(terms["names"])
        else:
            assert loss == pytest.approx((terms[task] + terms[f"soft_labels_{task}"]) / 2)
    assert seen == set(EXAMPLES)


@pytest.mark.slow
def test_a_teacher_runs_only_in_the_steps_of_its_tasks(alone) -> None:
    for terms, _, _, ran in alone:
        task = task_of(terms)
        assert ran == ([] if task == "names" else ["teacher", f"teachers/of_{task}"])


@pytest.mark.slow
def test_two_ranks_take_the_same_steps(job, words, alone) -> None:
    for (ours, *_), (theirs, *_) in zip(
        alone, run_distributed(steps, 2, job, words)[0], strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def whole(path: Path, overrides: list[str]) -> str:
    run = jobs.run(load(path, *overrides, "name=taught"), stop_after=3)
    run = jobs.run(load(path, *overrides, "name=taught"))
    jobs.finish(run)
    return str(run.evaluation)


@pytest.mark.slow
def test_the_job_resumes_ends_and_is_planned(job, words) -> None:
    assert Path(run_distributed(whole, 1, job, words)[0]).is_file()
    assert len(demands(load(job, *words)).learners) == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["soft_labels.tasks=[moods, names]"], "teachers.of_alike.init.pretrained: it has no head"),
        (["soft_labels.tasks=[]", "main"], "names: no teacher has a head for it; fine-tune one"),
    ],
)
def test_a_teacher_that_cannot_teach_is_named(job, words, changed, message) -> None:
    of_moods = words[3].removeprefix("teachers.of_moods={frozen: true, init: {pretrained: ")
    main = f"teacher.init.pretrained={of_moods.removesuffix('}}')}"
    more = [main if one == "main" else f"students.small.objective.{one}" for one in changed]
    with pytest.raises(TrainingError, match=message):
        load(job, *words, *more)
