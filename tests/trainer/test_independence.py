"""A learner's metrics do not depend, to the last bit, on the other learners or their order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.thorough import IS_THOROUGH
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.batches import to_device
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.run_folder.metrics import encode
from trainer.step import train_step

ROWS, STEPS = 6, 2  # rows divide by 1, 2 and 3 ranks
PRECISIONS = ("fp32", "bf16", "fp16")
# Two objectives in each precision, at the ZeRO stages in turn.
STUDENTS = [
    (objective, precision, number % 4)
    for number, (precision, objective) in enumerate(
        (precision, objective)
        for precision in ("bf16", "fp32", "fp16")
        for objective in ("distilbert", "tinybert")
    )
]
COMPANIES = {
    "everyone": (0, 1, 2, 3, 4, 5),
    "in another order": (5, 4, 3, 2, 1, 0),
    "two, exchanged": (3, 1),
}
if IS_THOROUGH:
    COMPANIES |= {"without the first": (1, 2, 3, 4, 5), "nobody": ()}


def rows_in_all_companies(precision):
    """The metric rows of every learner, by set of learners; `precision` is the teacher's."""
    return {title: metric_rows(precision, students) for title, students in COMPANIES.items()}


def metric_rows(precision, students):
    learners = started(precision, students)
    rows = {learner.name: [] for learner in learners}
    for step in range(STEPS):
        batch = tiny.my_rows(tiny.random_batch(step, rows=ROWS))
        result = train_step(learners[0], learners[1:], batch, step)
        for learner in learners:
            held_out = torch.cat(learner.evaluate(to_device(batch, torch.device("cpu")))).tolist()
            row = {
                **result.terms[learner.name],
                **{f"val/{number}": value for number, value in enumerate(held_out)},
                "step": step,
                "loss": result.losses[learner.name],
                "grad_norm": learner.gradient_norm,
                "skipped_steps": learner.counters.skipped_steps,
                "loss_scale": learner.loss_scale.value,
            }
            rows[learner.name].append(encode(row))
    return rows


def started(precision, students):
    configs = tiny.learner_configs((0, 0, 0))
    micro_batch = ROWS // dist.get_world_size()
    learners = {TEACHER: dataclasses.replace(configs[TEACHER], precision=precision)}
    for number in students:
        objective, own, stage = STUDENTS[number]
        learners[student_key(f"{objective}-{own}")] = dataclasses.replace(
            configs[student_key(objective)], precision=own, zero_stage=stage
        )
    return [
        Learner(name, config, configs[TEACHER].model, StepShape(STEPS, tiny.SEED, micro_batch, 1))
        for name, config in learners.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "precision"),
    [(ranks, precision) for ranks in (1, 2, 3) for precision in PRECISIONS],
)
def test_no_metric_depends_on_who_else_is_trained(ranks, precision):
    for companies in run_distributed(rows_in_all_companies, ranks, precision):
        everyone = companies["everyone"]
        for title, rows in companies.items():
            for name, found in rows.items():
                assert found == everyone[name], (title, name)
