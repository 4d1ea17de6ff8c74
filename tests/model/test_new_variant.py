"""The worked example of docs/architectures.md: a variant with one new part, from YAML to export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import configs
import model
from configs.section import read_types_again
from model import config as model_config
from model.accounting import describe
from model.parts import ACTIVATIONS

YAML = """
base: bert_tiny
activation: squared_relu
"""


def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0)^2`` (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


@pytest.fixture
def variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[model.EncoderConfig]:
    monkeypatch.setitem(ACTIVATIONS, "squared_relu", squared_relu)
    names = (*model_config.ACTIVATIONS, "squared_relu")
    monkeypatch.setattr(model_config, "ACTIVATIONS", names)
    read_types_again()
    path = tmp_path / "primer_tiny.yaml"
    path.write_text(YAML)
    yield configs.load(str(path), model.EncoderConfig, "model", ["vocab_size=50", "layers=1"])
    read_types_again()


def test_it_is_counted_trained_and_saved(variant: model.EncoderConfig, tmp_path: Path) -> None:
    plain = configs.load("bert_tiny", model.EncoderConfig, "model", ["vocab_size=50", "layers=1"])
    assert describe(variant) == describe(plain)
    built, ordinary = model.build(variant, seed=0), model.build(plain, seed=0)
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    assert not torch.equal(built.eval()(ids).logits, ordinary.eval()(ids).logits)
    built(ids).logits.sum().backward()
    assert all(p.grad is not None for p in built.encoder.feed_forward.parameters())
    reason = model.save_pretrained(built, tmp_path / "saved")
    assert reason == "transformers has no activation 'squared_relu'; saved in Tandem's own format"
    again = model.from_pretrained(tmp_path / "saved")
    assert again.config == variant
    assert torch.equal(again(ids).logits, built(ids).logits)


def test_what_a_family_has_never_heard_of_is_not_lost_silently(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A key that someone adds to EncoderConfig, but to no class of `transformers`."""
    plain = configs.load("bert_tiny", model.EncoderConfig, "model", ["vocab_size=50", "layers=1"])
    meaning = model.EncoderConfig.meaning
    monkeypatch.setattr(model.EncoderConfig, "new_key", True, raising=False)
    monkeypatch.setattr(
        model.EncoderConfig, "meaning", lambda self: {**meaning(self), "new_key": self is plain}
    )
    reason = model.save_pretrained((plain, model.build(plain, seed=0).state_dict()), tmp_path)
    assert reason.startswith("transformers' bert cannot express new_key: True")
