"""The model under DeepSpeed: each parameter is used by the module that owns it, or gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import model
from tests.distributed import run_distributed
from tests.model.chunked import chunked_cross_entropy
from tests.model.test_mechanics import built, ids, loss_of
from tests.thorough import IS_THOROUGH
from trainer.objectives.vocabulary import chunked_kl_divergence


class Root(nn.Module):
    """Encoder and losses in one module, as a trainer builds it."""

    def __init__(self, encoder: model.MaskedLanguageModel) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.tensor([1, 5, 14, 0])
        capture = model.Capture((0, 2), (1, 3))
        found = self.encoder.features(tokens, masked_positions=positions, capture=capture)
        weight, bias = self.encoder.output_projection()
        loss, _ = chunked_cross_entropy(
            found.vocabulary_input, weight, bias, torch.tensor([7, 8, 9, -100])
        )
        teacher = torch.linspace(-1, 1, weight.numel()).view_as(weight)
        soft, _ = chunked_kl_divergence(
            found.vocabulary_input, (weight, bias), found.vocabulary_input, (teacher, None), 2.0
        )
        captured = sum(loss_of(found.attention[i].k) for i in (1, 3))
        return loss + soft + captured + loss_of(found.hidden_states[2])


def _root(family: str) -> Root:
    root = Root(built(family, dropout=0.0, attention_dropout=0.0))
    root.encoder.encoder.checkpoint_activations = family in ("bert", "modernbert", "deberta")
    return root


def _step_under_zero(stage: int, families: list[str]) -> dict[str, dict[str, Tensor]]:
    import deepspeed

    torch.set_num_threads(1)
    found = {}
    for family in families:
        root = _root(family)
        engine, *_ = deepspeed.initialize(
            model=root,
            optimizer=torch.optim.SGD(root.parameters(), lr=0.01),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # its default is 1
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 10000},
            },
        )
        for _ in range(2):
            engine.backward(engine(ids()))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(root.parameters())):
            found[family] = {n: p.detach().clone() for n, p in root.named_parameters()}
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_steps_equal_plain_torch(stage: int) -> None:
    families = ["albert", "modernbert", "deberta", *(["bert", "mobilebert"] if IS_THOROUGH else [])]
    ranks = run_distributed(_step_under_zero, 2, stage, families)
    for family in families:
        root = _root(family)
        optimizer = torch.optim.SGD(root.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            root(ids()).backward()
            optimizer.step()
        for name, parameter in root.named_parameters():
            torch.testing.assert_close(
                ranks[0][family][name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name
            )
