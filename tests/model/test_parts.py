"""Parts of newer models against `transformers`, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

import model
from model.attention_heads import Head, disabled, prune
from model.attention_kernel import PLAIN, AttentionPattern
from model.encoder import Attention, rotary_angles
from tests.model.test_mechanics import FAMILIES, SMALL, built, ids


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_norms_of_queries_and_keys_with_grouped_heads_are_qwen3s(kv_heads: int) -> None:
    theirs_config = Qwen3Config(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=6,
        rms_norm_eps=1e-5, rope_theta=10000.0, attn_implementation="eager", attention_bias=True,
    )  # fmt: skip
    theirs = Qwen3Attention(theirs_config, 0).eval()
    config = model.EncoderConfig(
        hidden_size=24, heads=4, kv_heads=kv_heads, qk_norm=True, norm_eps=1e-5,
        positions="rotary", norm_placement="pre",
    )  # fmt: skip
    ours = Attention(config, is_first=True).eval()
    generator = torch.Generator().manual_seed(0)
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    names |= {"query_norm": "q_norm", "key_norm": "k_norm"}
    for mine, yours in names.items():
        for name, parameter in getattr(ours, mine).named_parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
            getattr(getattr(theirs, yours), name).data = parameter.data.clone()
    x = torch.randn(2, 9, 24, generator=generator)
    position = Qwen3RotaryEmbedding(theirs_config)(x, torch.arange(9)[None])
    with torch.no_grad():
        expected, _ = theirs(x, position, torch.zeros(1, 1, 9, 9))
        angles = rotary_angles(9, 6, 10000.0, x.device)
        got, _, k, v = ours(x, AttentionPattern(PLAIN), angles)
    torch.testing.assert_close(got - x, expected, rtol=1e-5, atol=1e-5)
    assert k.shape == v.shape == (2, 4, 9, 6)


def test_pruning_a_head_leaves_the_keys_that_others_read() -> None:
    ours = built("eurobert").eval()
    with torch.no_grad():
        with disabled(ours, [Head(0, 1)]):
            expected = ours(ids()).logits
        assert not torch.equal(ours(ids()).logits, expected)
        prune(ours, [Head(0, 1)])
        torch.testing.assert_close(ours(ids()).logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3, "heads": 4}, "kv_heads: 3 does not divide the 4 heads"),
        (
            {**FAMILIES["albert"], "head_transform": False},
            "head_transform: must be true where word vectors have another width",
        ),
        (
            {**FAMILIES["mobilebert"], "tied_decoder": False},
            "tied_decoder: must be true with embedding_projection: word",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_named(changes, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        model.EncoderConfig(**{**SMALL, **changes})
