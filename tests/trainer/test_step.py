"""The step on several ranks, at every ZeRO stage, against one process with the whole batch."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batches import Counts, count, to_device
from trainer.knowledge import Decoder, detach, union
from trainer.learner import TEACHER, LearnerModule, Workload, _model
from trainer.objectives import Objective
from trainer.seeds import derive

RANKS, ACCUMULATION = 2, 2
CPU = torch.device("cpu")
STAGES = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 0), (3, 0, 2)]


def rank_gradients(stages):
    """Every parameter's gradient after one step's backward passes, and 20 steps of losses."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    from trainer.step import train_step

    learners = tiny.learners(stages, micro_batch=2, accumulation=ACCUMULATION)
    rows = 8 // dist.get_world_size()
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    gradients = {}
    for learner in learners:
        take = learner.update

        def update(step, finite, learner=learner, take=take):
            if step == 0:
                gradients[learner.name] = {
                    name: safe_get_full_grad(parameter).clone()
                    for name, parameter in learner.engine.module.named_parameters()
                    if safe_get_full_grad(parameter) is not None
                }
            take(step, finite)

        learner.update = update
    losses = []
    for step in range(tiny.STEPS):
        batch = tiny.random_batch(step).rows(mine.start, mine.stop)
        result = train_step(learners[0], learners[1:], batch, step)
        losses.append(result.losses)
    return gradients, losses


def full_batch():
    """The same first step in plain torch: one process, one batch, no DeepSpeed."""
    configs = tiny.learner_configs((0, 0, 0))
    workload = Workload(tiny.STEPS, 3, 8, 1)
    teacher = configs[TEACHER].model
    modules = {}
    for name, config in configs.items():
        objective = Objective(config.objective, config.model, teacher, derive(3, name, "objective"))
        modules[name] = LearnerModule(_model(name, config, workload, None), objective, "fp32")
    batch = tiny.random_batch(0)
    totals = Counts(*torch.tensor(count(batch)).float())
    micro = to_device(batch, CPU)
    teacher_module = modules.pop(TEACHER)
    capture = union(module.objective.teacher_capture for module in modules.values())
    loss, _, features = teacher_module(micro, totals, None, capture)
    loss.backward()
    losses = {TEACHER: loss.item()}
    knowledge = detach(features, Decoder(*(p.detach() for p in teacher_module.model.decoder())))
    for name, module in modules.items():
        loss, _, _ = module(micro, totals, knowledge, module.objective.student_capture)
        loss.backward()
        losses[name] = loss.item()
    modules[TEACHER] = teacher_module
    gradients = {
        name: {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        for name, module in modules.items()
    }
    return gradients, losses


@pytest.mark.parametrize("stages", STAGES)
def test_gradients_and_losses_equal_the_full_batch(stages):
    reference, losses = full_batch()
    for gradients, curve in run_distributed(rank_gradients, RANKS, stages):
        for learner, expected in reference.items():
            assert curve[0][learner] == pytest.approx(losses[learner], rel=1e-6)
            for name, gradient in expected.items():
                if name.endswith("key.bias"):
                    continue
                distance = (gradients[learner][name] - gradient).norm() / gradient.norm()
                assert distance < 1e-5, (learner, name)
