"""NeoBERT against an independent writing of the class that its checkpoint on the Hub brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import configs
import model
from model.hugging_face.neobert import NEOBERT
from tests.conftest import tandem

SIZES = {
    "model_type": "neobert", "architectures": ["NeoBERTLMHead"], "hidden_size": 36,
    "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 50, "vocab_size": 97,
    "pad_token_id": 0, "max_length": 64, "norm_eps": 1e-5, "hidden_act": "SwiGLU",
    "rms_norm": True, "rope": True, "ngpt": False,
}  # fmt: skip
HEADS, WIDTH, HEAD, GATED = 3, 36, 12, 40  # 40: 33, two thirds of 50, as a multiple of 8


def turned(x: Tensor) -> Tensor:
    """Rotary positions on x [B, L, A, D] as products of complex numbers, as Llama's first code."""
    frequencies = 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    by_angle = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(pairs * by_angle).flatten(-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        gates, output = nn.Linear(WIDTH, 2 * GATED, bias=False), nn.Linear(GATED, WIDTH, bias=False)
        self.ffn = nn.ModuleDict({"w12": gates, "w3": output})
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        fused = self.qkv(self.attention_norm(x)).unflatten(-1, (HEADS, 3 * HEAD))
        q, k, v = fused.chunk(3, dim=-1)
        q, k, v = (part.transpose(1, 2) for part in (turned(q), turned(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = x + self.wo(mixed)
        gate, up = self.ffn["w12"](self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.ffn["w3"](F.silu(gate) * up)


class NeoBERT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(97, WIDTH)
        self.transformer_encoder = nn.ModuleList(Block() for _ in range(3))
        self.layer_norm = nn.RMSNorm(WIDTH, 1e-5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.encoder(ids)
        for block in self.transformer_encoder:
            x = block(x, mask[:, None, None].bool())
        return self.layer_norm(x)


class NeoBERTLMHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = NeoBERT()
        self.decoder = nn.Linear(WIDTH, 97)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.decoder(self.model(ids, mask))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[NeoBERTLMHead, Path]:
    torch.manual_seed(0)
    made, folder = NeoBERTLMHead().eval(), tmp_path_factory.mktemp("neobert")
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.3)
    save_file(made.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES))
    return made, folder


def test_logits_are_those_of_the_published_class(theirs, tmp_path: Path) -> None:
    made, folder = theirs
    imported = tandem("import", folder, "--out", tmp_path / "ours")
    assert imported.returncode == 0, imported.stderr
    ours = model.from_pretrained(tmp_path / "ours").eval()
    ids, lengths = torch.randint(1, 97, (3, 17)), torch.tensor([17, 9, 1])
    mask = torch.arange(17) < lengths[:, None]
    with torch.no_grad():
        expected = made(ids, mask.long())[mask]
        for given in (mask.long(), lengths):
            logits = ours(ids, attention_mask=given).logits[mask]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_an_encoder_without_head_is_read(theirs, tmp_path: Path) -> None:
    made, _ = theirs
    save_file(made.model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    ours, ids = model.from_pretrained(tmp_path).eval(), torch.randint(1, 97, (2, 11))
    assert ours.head is None
    with torch.no_grad():
        states = ours.encode(ids).last_hidden_state
        expected = made.model(ids, torch.ones_like(ids))
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_the_shipped_model_is_the_published_one() -> None:
    published = {"model_type": "neobert", "max_length": 4096}  # the class's defaults else
    read = model.EncoderConfig(**NEOBERT.read(published, ()))
    shipped = configs.load("neobert", model.ModelConfig, "model")
    assert shipped.meaning() == read.meaning()


def test_another_variant_is_refused(theirs, tmp_path: Path) -> None:
    _, folder = theirs
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"ngpt": True}))
    with pytest.raises(model.ModelError, match=r"ngpt: True is not supported \(only False\)"):
        model.from_pretrained(tmp_path)
