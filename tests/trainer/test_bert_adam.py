"""BERT's Adam with frozen position embeddings, at every stage on two ranks.

The expected weights come from plain torch on the whole batch, updated by the formula.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from model import EncoderConfig
from tests.distributed import run_distributed
from tests.thorough import zero_stages
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.batches import to_device
from trainer.checkpoint.layout import full_state_dict
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.learners.module import Train, always_captured, build_module
from trainer.optimizers.config import optimizer_config
from trainer.schedules import schedule_config
from trainer.step import train_step

STEPS, ROWS, RATE, CLIPPING = 5, 8, 1e-3, 0.5
EACH = 0.02  # some parameters' gradients are larger, others smaller
STAGES = zero_stages(1)
POSITIONS = "model.embeddings.position.weight"


def config(stage: int, each: bool = False) -> LearnerConfig:
    """A teacher's config with a constant learning rate; `each`: parameters are clipped apart."""
    teacher = tiny.learner_configs((stage, 0, 0))[TEACHER]
    return dataclasses.replace(
        teacher,
        optimizer=optimizer_config(
            learning_rate=RATE, epsilon=1e-6, weight_decay=0.1, bias_correction=False
        ),
        schedule=schedule_config("constant", warmup_steps=teacher.schedule.warmup_steps),
        gradient_clipping=EACH if each else CLIPPING,
        clip_each_parameter=each,
        freeze_positions=True,
    )


def trained(stage: int, each: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after some steps, and the gradient norm of each step."""
    step_shape = StepShape(STEPS, tiny.SEED, ROWS // 4, 2)
    learner = Learner(TEACHER, config(stage, each), config(stage).model, step_shape)
    norms = []
    for step in range(STEPS):
        train_step(learner, [], tiny.my_rows(tiny.random_batch(step, ROWS)), step)
        norms.append(learner.gradient_norm)
    whole = full_state_dict(learner.engine)
    return {name: tensor.clone() for name, tensor in whole.items()}, norms


def all_stages() -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    return [trained(stage, each) for stage in STAGES for each in (False, True)]


def plain(each: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """The initial weights, the weights after the steps, and the gradient norms."""
    module = build_module(TEACHER, config(0), config(0).model, tiny.SEED)
    first = {name: p.detach().clone() for name, p in module.named_parameters()}
    learnt = {name: p for name, p in module.named_parameters() if name != POSITIONS}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in learnt.items()}
    norms = []
    for step in range(STEPS):
        batch = tiny.random_batch(step, ROWS)
        totals = tiny.totals_of(batch)
        micro, capture = to_device(batch, torch.device("cpu")), always_captured(TEACHER, config(0))
        loss, _, _ = module(Train(totals, {}, capture, step), micro)
        loss.backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(learnt.values(), math.inf if each else CLIPPING).item()
        )
        for p in learnt.values() if each else ():
            torch.nn.utils.clip_grad_norm_(p, EACH)
        for name, p in learnt.items():
            update(p, *moments[name])
        module.zero_grad()
    return first, {name: p.detach() for name, p in module.named_parameters()}, norms


@torch.no_grad()
def update(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    """AdamWeightDecayOptimizer of google-research/bert; vectors do not decay."""
    assert w.grad is not None
    m.copy_(0.9 * m + 0.1 * w.grad)
    v.copy_(0.999 * v + 0.001 * w.grad**2)
    w -= RATE * (m / (v.sqrt() + 1e-6) + (0.1 if w.ndim > 1 else 0.0) * w)


@pytest.mark.slow
def test_every_stage_is_the_formula_on_the_whole_batch():
    references = [plain(each) for each in (False, True)]
    names = next(iter(references))[0]
    assert any(not torch.allclose(references[0][1][name], references[1][1][name]) for name in names)
    cases = [(stage, *reference) for stage in STAGES for reference in references]
    for case, (weights, norms) in zip(cases, run_distributed(all_stages, 2)[0], strict=True):
        stage, first, expected, expected_norms = case
        assert norms == pytest.approx(expected_norms, rel=1e-5), stage
        assert torch.equal(weights[POSITIONS], first[POSITIONS]), stage
        for name, tensor in expected.items():
            # A gradient that is zero but for rounding, as a key bias's, moves by less than this.
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
            assert (name == POSITIONS) == torch.equal(weights[name], first[name]), name


def test_a_model_without_position_embeddings_has_none_to_freeze():
    with pytest.raises(ValueError, match=r"^freeze_positions: .*rotary"):
        LearnerConfig(model=EncoderConfig(positions="rotary"), freeze_positions=True)
