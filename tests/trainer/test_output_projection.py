"""The vocabulary projection that a learner hands to others, made of partitioned parameters too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model import build
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.tasks.pretraining import MaskedLanguageModelling

NARROW = {"embedding_size": 8, "embedding_projection": "word"}  # than its input, as MobileBERT's


def projections(stage: int) -> list[tuple[Tensor, Tensor | None]]:
    """That of a learner, and its model's as it was built."""
    encoder = tiny.encoder(pooler="none", pair_head=False, **NARROW)
    objective = ObjectiveConfig(mlm=MaskedLanguageModelling())
    config = LearnerConfig(model=encoder, objective=objective, zero_stage=stage)
    whole = build(encoder, seed=1)
    weights = {name: one.detach().clone() for name, one in whole.state_dict().items()}
    learner = Learner(TEACHER, config, encoder, StepShape(20, 3, 4, 2), weights=weights)
    weight, bias = whole.output_projection()
    assert bias is not None
    found = learner.output_projection()
    return [(found.weight, found.bias), (weight.detach(), bias.detach())]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_projection_of_several_parameters_is_whole_at_every_stage(stage: int) -> None:
    for (weight, bias), (whole_weight, whole_bias) in run_distributed(projections, 2, stage):
        assert weight.shape[1] > NARROW["embedding_size"]
        torch.testing.assert_close(weight, whole_weight, rtol=0, atol=0)
        torch.testing.assert_close(bias, whole_bias, rtol=0, atol=0)
