"""Fused losses of states and of attention are the others, in value and in gradient."""

from __future__ import annotations

import pytest
import torch

from trainer.fusion import fusing
from trainer.objectives.terms import attention, states

MASK = torch.arange(6) < torch.tensor([[6], [4], [1]])
OF_STATES = [
    states.cosine_distance,
    states.hidden_mse,
    states.patient_mse,
    states.feature_map_mse,
    states.mean_difference,
    states.variance_difference,
]
OF_ATTENTION = [
    attention.attention_mse,
    attention.attention_cross_entropy,
    attention.relation_kl,
]


@pytest.mark.parametrize("loss", [*OF_STATES, *OF_ATTENTION], ids=lambda loss: loss.__name__)
def test_a_fused_loss_is_the_other(loss, monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 6 * 6 * 2)  # a block for each row
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, 6, 4) if loss in OF_ATTENTION else (3, 6, 4)
    ours = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(2)]
    theirs = [torch.randn(shape, generator=generator) for _ in range(2)]
    pair = (ours, theirs) if loss in OF_ATTENTION else (ours[0] + ours[1], theirs[0])
    results = []
    for options in (None, {"backend": "aot_eager", "dynamic": False}):
        with fusing(options):
            total, count = loss(*pair, MASK)
        results.append((total, count, *torch.autograd.grad(total, ours, retain_graph=True)))
    torch.testing.assert_close(*results)
