"""The teacher's loss with a term on a student's predictions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import configs
from data_pipeline import MASKED
from tests.distributed import run_distributed
from tests.thorough import IS_THOROUGH
from tests.trainer import tiny
from tests.trainer.jobs import tiny_job
from trainer.batch_config import StepShape
from trainer.batches import to_device
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.learners.module import build_module
from trainer.objectives.terms.predictions import FromStudent
from trainer.step import train_step

ADVICE = FromStudent(weight=0.5, student="tinybert", temperature=2.0)
STAGES = [(0, 0, 0), (2, 1, 3), *([(3, 0, 3)] if IS_THOROUGH else [])]


def two_way(stages):
    found = tiny.learner_configs(stages)
    objective = dataclasses.replace(found[TEACHER].objective, from_student=ADVICE)
    return {**found, TEACHER: dataclasses.replace(found[TEACHER], objective=objective)}


def expected():
    """The term at the first step, from plain torch in one process on the whole batch."""
    found = two_way((0, 0, 0))
    batch = to_device(tiny.random_batch(0), torch.device("cpu"))
    logits = []
    for name in (TEACHER, "students/tinybert"):
        module = build_module(name, found[name], found[TEACHER].model, tiny.SEED).eval()
        output = module.model(batch.input_ids, batch.segment_ids, batch.attention_mask)
        logits.append(output.logits.flatten(0, 1)[batch.masked_positions] / 2.0)
    teacher, student = logits
    losses = F.kl_div(
        teacher.log_softmax(-1), student.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    asked = batch.targets[MASKED].labels >= 0
    return (2.0**2 * losses[asked].mean()).item()


def trained(stages, members, steps=3):
    """The values of the term and the students' losses; `members` are the students' numbers."""
    found = two_way(stages)
    rows = 8 // dist.get_world_size()
    step_shape = StepShape(tiny.STEPS, tiny.SEED, rows // 2, 2)
    everyone = [
        Learner(name, dataclasses.replace(config, dropout=0.1 if name != TEACHER else 0.0),
                found[TEACHER].model, step_shape)
        for name, config in found.items()
    ]  # fmt: skip
    learners = [everyone[0], *(everyone[number] for number in members)]
    return [
        train_step(everyone[0], learners[1:], tiny.my_rows(tiny.random_batch(step)), step).terms
        for step in range(steps)
    ]


def runs():
    by_stage = [trained(stages, (1, 2)) for stages in STAGES]
    return by_stage, trained(STAGES[0], (2,)), trained(STAGES[0], (1,)), trained(STAGES[0], ())


@pytest.fixture(scope="module")
def results():
    return run_distributed(runs, 2)[0]


@pytest.mark.slow
def test_the_term_is_what_it_says_at_every_stage(results):
    by_stage = results[0]
    loss = expected()
    for stages, steps in zip(STAGES, by_stage, strict=True):
        # A small difference of large numbers: each is rounded, and not alike on every CPU.
        found = steps[0][TEACHER]["from_student"]
        assert found == pytest.approx(loss, rel=1e-5, abs=1e-6), stages
        for ours, theirs in zip(steps, by_stage[0], strict=True):
            # Linear layers in parts round differently too.
            assert ours[TEACHER] == pytest.approx(theirs[TEACHER], rel=1e-5, abs=1e-6), stages


@pytest.mark.slow
def test_another_student_leaves_the_teacher_unchanged(results):
    """Neither does the peer's dropout: its predictions are made without it."""
    by_stage, alone, _, _ = results
    for ours, both in zip(alone, by_stage[0], strict=True):
        assert ours[TEACHER] == both[TEACHER]
        assert ours["students/tinybert"] == both["students/tinybert"]


@pytest.mark.slow
def test_while_the_student_is_not_there_the_teacher_is_as_ever(results):
    """With another student or none, the term is off and the bits are the same."""
    _, _, other, nobody = results
    for ours, theirs in zip(other, nobody, strict=True):
        assert ours[TEACHER] == theirs[TEACHER]
        assert ours[TEACHER]["from_student"] == 0.0


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["teacher.objective.from_student={student: half}"], "no student 'half'; there are:"),
        (
            [
                "teacher.objective.from_student={student: tinybert}",
                "students.tinybert={objective: {rtd: {}, mlm: {}}, generator: teacher}",
            ],
            "teacher.objective.from_student.student: tinybert reads the teacher's samples",
        ),
        (["teacher.objective={from_student: {}}"], "teacher.objective.from_student.student: "),
        (
            ["teacher.objective={from_student: {student: tinybert}, mlm: null}"],
            "needs another term beside it, such as mlm",
        ),
        (
            ["students.tinybert.objective.from_student={student: tinybert}"],
            "from_student: is for the teacher",
        ),
        (
            [
                "teacher.objective.from_student={student: tinybert}",
                "students.tinybert.objective={soft_kl: null, mlm: null}",
                "students.tinybert.model.mlm_head=false",
            ],
            "students.tinybert.model.mlm_head must be true, since it is read",
        ),
    ],
)
def test_who_cannot_advise_is_refused(corpus, tmp_path, overrides, reason):
    with pytest.raises(configs.ConfigError) as failed:
        tiny_job(corpus, tmp_path, *overrides)
    assert reason in str(failed.value)
