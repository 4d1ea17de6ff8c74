"""Layers that share weights: held once, and normed wherever a layer of the group needs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import model
from tests.model.test_mechanics import FAMILIES, SMALL, built, ids


def test_layers_that_share_weights_hold_them_once() -> None:
    given = built("albert", groups=2, layers=4)
    assert len(given.encoder.attention) == 2
    assert given.encoder.attention_plan == [0, 0, 1, 1]
    selected = model.select_layers(given.state_dict(), [0, 3], given.config)
    shallow = model.build(
        model.EncoderConfig(**{**SMALL, **FAMILIES["albert"], "layers": 2, "groups": 2}), 0
    )
    shallow.load_state_dict(selected)
    assert torch.equal(
        shallow.encoder.attention[1].key.weight, given.encoder.attention[1].key.weight
    )


@pytest.mark.parametrize("sharing", ["all", "attention", "ffn", "none"])
@pytest.mark.parametrize(
    "changes", [{}, {"embedding_projection": "sum", "embedding_size": 8}, {"embedding_norm": False}]
)
def test_every_attention_of_a_pre_norm_model_reads_normed_states(changes, sharing) -> None:
    """The embedding norm does it for the first, if nothing is between and no other shares it."""
    given = built("modernbert", sharing=sharing, **changes).eval()
    read: list[Tensor] = []
    for one in given.encoder.attention:
        one.query.register_forward_hook(lambda module, args, output: read.append(args[0]))
    given.encode(ids())
    assert len(read) == given.config.layers
    for states in read:
        assert states.var(dim=-1, unbiased=False).detach() == pytest.approx(1.0, abs=0.05)
    unnormed = [one for one in given.encoder.attention if one.norm is None]
    assert len(unnormed) == (not changes and sharing in ("ffn", "none"))
