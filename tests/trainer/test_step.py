"""The step on several ranks, at every ZeRO stage, against one process with the whole batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batches import Counts, count, to_device
from trainer.knowledge import Decoder, detach, union
from trainer.learner import TEACHER, build_module
from trainer.step import train_step

ROWS, RANKS, ACCUMULATION = 8, 2, 2
STAGES = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 0), (3, 0, 2)]


def full_batch(**changes):
    """The first step in plain torch: one process, the whole batch, no DeepSpeed.

    `changes` are made to every learner's configuration.
    """
    configs = tiny.learner_configs((0, 0, 0))
    teacher_config = configs[TEACHER].model
    modules = {
        name: build_module(name, dataclasses.replace(config, **changes), teacher_config, tiny.SEED)
        for name, config in configs.items()
    }
    batch = tiny.random_batch(0)
    totals = Counts(*torch.tensor(count(batch)).float())
    micro = to_device(batch, torch.device("cpu"))
    teacher = modules[TEACHER]
    capture = union(module.objective.teacher_capture(0) for module in modules.values())
    loss, _, features = teacher(micro, totals, None, capture)
    loss.backward()
    losses = {TEACHER: loss.item()}
    knowledge = detach(features, Decoder(*(p.detach() for p in teacher.model.decoder())))
    for name, module in list(modules.items())[1:]:
        loss, _, _ = module(micro, totals, knowledge, module.objective.student_capture(0))
        loss.backward()
        losses[name] = loss.item()
    gradients = {
        name: {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        for name, module in modules.items()
    }
    return gradients, losses


def trained(stages, steps=tiny.STEPS):
    """20 steps on however many ranks there are: the first gradients, and the curve of losses."""
    learners = tiny.learners(stages, ROWS // dist.get_world_size() // ACCUMULATION, ACCUMULATION)
    gradients = {learner.name: record_first_gradients(learner) for learner in learners}
    curve = [
        train_step(learners[0], learners[1:], tiny.my_rows(tiny.random_batch(step)), step).losses
        for step in range(steps)
    ]
    return gradients, curve


def record_first_gradients(learner):
    """A dict that holds the whole gradients once the learner has taken its first step."""
    from deepspeed.utils import safe_get_full_grad

    gradients, update = {}, learner.update

    def recording_update(step, *judged):
        if not gradients:
            for name, parameter in learner.engine.module.named_parameters():
                gradient = safe_get_full_grad(parameter)
                if gradient is not None:
                    gradients[name] = gradient.clone()
        update(step, *judged)

    learner.update = recording_update
    return gradients


def trained_at_all_stages():
    return [trained(stages) for stages in STAGES]


@pytest.fixture(scope="module")
def reference_curve():
    """The losses of one process that takes each batch whole."""
    return run_distributed(trained, 1, (0, 0, 0))[0][1]


def test_ranks_and_accumulation_equal_the_full_batch_at_every_stage(reference_curve):
    gradients, losses = full_batch()
    for ours in run_distributed(trained_at_all_stages, RANKS):
        for stages, (found, curve) in zip(STAGES, ours, strict=True):
            assert curve[0] == pytest.approx(losses, rel=1e-6), stages
            assert_gradients_equal(found, gradients, stages)
            for step, (mine, whole) in enumerate(zip(curve, reference_curve, strict=True)):
                assert mine == pytest.approx(whole, rel=1e-6), (stages, step)


def assert_gradients_equal(found, expected, stages):
    for learner, gradients in expected.items():
        for name, gradient in gradients.items():
            if name.endswith("key.bias"):  # its true gradient is zero
                continue
            distance = (found[learner][name] - gradient).norm() / gradient.norm()
            assert distance < 1e-5, (stages, learner, name)


def counted_forwards(students):
    """How often the teacher runs forward in one step with so many students."""
    learners = tiny.learners((1, 0, 2), 2, ACCUMULATION)[: 1 + students]
    calls = []
    learners[0].engine.module.register_forward_hook(lambda *_: calls.append(1))
    train_step(learners[0], learners[1:], tiny.my_rows(tiny.random_batch(0)), 0)
    return len(calls)


def alone_and_together():
    """Final weights of everyone trained in different company, and with one who goes astray."""
    company = {"all": (0, 1, 2), "first": (0, 1), "second": (0, 2), "nobody": (0,)}
    outcomes = {}
    for title, members in company.items():
        outcomes[title] = weights_after(members)
    outcomes["astray"] = weights_after((0, 1, 2), astray=2)
    return outcomes


def weights_after(members, astray=None, steps=3):
    everyone = tiny.learners((0, 1, 2), 2, ACCUMULATION)
    if astray is not None:
        with torch.no_grad():
            everyone[astray].model.embeddings.word.weight.fill_(float("nan"))
    learners = [everyone[number] for number in members]
    for step in range(steps):
        train_step(learners[0], learners[1:], tiny.my_rows(tiny.random_batch(step)), step)
    return {
        learner.name: (
            learner.counters.skipped_steps,
            {name: p.detach().clone() for name, p in learner.engine.module.named_parameters()},
        )
        for learner in learners
    }


def together():
    return [counted_forwards(students) for students in (0, 1, 2)], alone_and_together()


def test_one_teacher_forward_and_no_influence_between_learners():
    for forwards, outcomes in run_distributed(together, RANKS):
        assert forwards == [ACCUMULATION] * 3
        everyone = outcomes.pop("all")
        astray = outcomes.pop("astray")
        for company in outcomes.values():
            for name, outcome in company.items():
                assert_same_bits(outcome, everyone[name])
        lost = astray.pop("students/tinybert")
        assert lost[0] == 3  # every step skipped, on both ranks alike
        for name, outcome in astray.items():
            assert_same_bits(outcome, everyone[name])


def assert_same_bits(ours, theirs):
    assert ours[0] == theirs[0] == 0
    for name, tensor in ours[1].items():
        assert torch.equal(tensor, theirs[1][name]), name


def dropout_losses(companions):
    learners = tiny.learners((0, 0, 0), 2, ACCUMULATION, dropout=0.1)[: 1 + companions]
    batches = [tiny.my_rows(tiny.random_batch(step)) for step in range(3)]
    return [
        train_step(learners[0], learners[1:], batch, step).losses[TEACHER]
        for step, batch in enumerate(batches)
    ]


def test_dropout_is_drawn_for_each_learner_by_itself():
    """The teacher drops the same units whoever trains beside it, and others at every step."""
    (alone, accompanied), _ = run_distributed(both_dropouts, RANKS)
    assert alone == accompanied
    assert len(set(alone)) == 3


def both_dropouts():
    return dropout_losses(0), dropout_losses(2)
