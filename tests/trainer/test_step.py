"""The step: one teacher forward, and learners that do not affect each other."""

from __future__ import annotations

import dataclasses
from itertools import chain
from unittest import mock

import pytest
import torch

from data_pipeline import Batch
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.step import train_step

RANKS, ACCUMULATION, STEPS = 2, 2, 2
STAGES = (0, 3, 1)


def alone_and_together():
    """Of learners trained in different sets, and with one that diverges.

    By the set's title: the number of the teacher's forward passes, and the final weights.
    """
    company = {"all": (0, 1, 2), "first": (0, 1), "second": (0, 2), "nobody": (0,)}
    outcomes = {}
    for title, members in company.items():
        outcomes[title] = weights_after(members)
    outcomes["astray"] = weights_after((0, 1, 2), astray=2)
    return outcomes


def weights_after(members, astray=None):
    learners = tiny.learners(STAGES, 2, ACCUMULATION, members=members)
    forwards = []
    learners[0].engine.module.register_forward_hook(lambda *_: forwards.append(1))
    for step in range(STEPS):
        if astray is not None:  # before each step: ZeRO renews weights from its own copy
            with torch.no_grad():
                learners[astray].model.embeddings.word.weight.fill_(float("nan"))
        train_step(learners[0], learners[1:], tiny.my_rows(tiny.random_batch(step)), step)
    return len(forwards), {
        learner.name: (
            learner.counters.skipped_steps,
            {name: p.detach().clone() for name, p in learner.engine.module.named_parameters()},
        )
        for learner in learners
    }


def everything():
    with mock.patch.object(torch, "manual_seed", wraps=torch.manual_seed) as seeding:
        accompanied = dropout_losses(2)
    seeds = [call.args[0] for call in seeding.call_args_list]
    return alone_and_together(), (dropout_losses(0), accompanied), seeds


@pytest.fixture(scope="module")
def results():
    return run_distributed(everything, RANKS)


def test_one_teacher_forward_and_no_influence_between_learners(results):
    for counted, *_ in results:
        assert [forwards for forwards, _ in counted.values()] == [STEPS * ACCUMULATION] * 5
        outcomes = {title: outcome for title, (_, outcome) in counted.items()}
        everyone = outcomes.pop("all")
        astray = outcomes.pop("astray")
        for company in outcomes.values():
            for name, outcome in company.items():
                assert_same_bits(outcome, everyone[name])
        lost = astray.pop("students/tinybert")
        assert lost[0] == STEPS  # every step skipped, on both ranks alike
        for name, outcome in astray.items():
            assert_same_bits(outcome, everyone[name])


def assert_same_bits(ours, theirs):
    assert ours[0] == theirs[0] == 0
    for name, tensor in ours[1].items():
        assert torch.equal(tensor, theirs[1][name]), name


def dropout_losses(companions):
    members = range(1 + companions)
    learners = tiny.learners((0, 0, 0), 2, ACCUMULATION, dropout=0.1, members=members)
    batches = [tiny.my_rows(tiny.random_batch(step)) for step in range(STEPS)]
    return [
        train_step(learners[0], learners[1:], batch, step).losses[TEACHER]
        for step, batch in enumerate(batches)
    ]


def test_dropout_is_drawn_for_each_learner_by_itself(results):
    """The teacher drops the same units whichever students train; they change with every step."""
    alone, accompanied = results[0][1]
    assert alone == accompanied
    assert len(set(alone)) == STEPS


def test_dropout_is_drawn_anew_for_every_step_micro_batch_learner_and_rank(results):
    seeds = list(chain.from_iterable(rank[2] for rank in results))
    assert len(seeds) == len(set(seeds)) == STEPS * ACCUMULATION * 3 * RANKS


def views_trained() -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The teacher's terms where it reads its own view, and where that is the only view."""
    config = tiny.learner_configs((0, 0, 0))
    steps = [(tiny.random_batch(step), tiny.random_batch(step + 9, rows=8)) for step in range(2)]

    def terms(view: str, batches: list[Batch]) -> list[dict[str, float]]:
        shape = StepShape(tiny.STEPS, tiny.SEED, 4, 2)
        model = config[TEACHER].model
        teacher = Learner(TEACHER, dataclasses.replace(config[TEACHER], view=view), model, shape)
        name = student_key("tinybert")
        students = [Learner(name, config[name], model, shape)] if view == "wide" else []
        found = [train_step(teacher, students, one, step) for step, one in enumerate(batches)]
        return [one.terms[TEACHER] for one in found]

    both = [dataclasses.replace(narrow, views={"wide": wide}) for narrow, wide in steps]
    return terms("wide", both), terms("default", [wide for _, wide in steps])


def test_a_teacher_may_read_another_view_of_the_examples() -> None:
    """To the last bit, it learns as from that view alone, whatever its students read."""
    (found,) = run_distributed(views_trained, 1)
    assert found[0] == found[1]
