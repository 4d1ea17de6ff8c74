"""Heads without effect, and pruned, against models of `transformers` whose heads are silenced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from model import ModelError, build, from_pretrained, save_pretrained
from model.attention_heads import UNIFORM, ZERO, Head, disabled, heads_of, prune
from model.kinds.bilstm import BiLSTMConfig
from tests.trainer import tiny

HEADS = [Head(0, 1), Head(1, 0), Head(1, 3)]
SIZE = 8  # of a head


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    config = tiny.encoder(layers=2, initializer_range=0.5, mlm_head=False)
    save_pretrained(build(config, seed=1), folder)
    return folder


IDS = torch.arange(5, 21)[None] % tiny.VOCABULARY
MASK = (torch.arange(16) < 13).long()[None]


def silence(span: slice, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook: the module reads 0 in these columns."""
    read = given[0].clone()
    read[..., span] = 0
    return read, *given[1:]


def theirs(folder: Path, silent: Sequence[Head] = ()) -> Tensor:
    """The last states by `transformers`, with 0 where the output projections read these heads."""
    bert = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    for head in silent:
        span = slice(head.head * SIZE, (head.head + 1) * SIZE)
        output = bert.encoder.layer[head.weights].attention.output.dense
        output.register_forward_pre_hook(partial(silence, span))
    with torch.no_grad():
        return bert(input_ids=IDS, attention_mask=MASK).last_hidden_state[0, :13]


def ours(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.encode(IDS, torch.zeros_like(IDS), MASK).last_hidden_state[0, :13]


@pytest.mark.parametrize("heads", [HEADS[:1], HEADS])
def test_a_disabled_head_is_one_whose_output_is_zero(bert: Path, heads: list[Head]) -> None:
    model = from_pretrained(bert)
    whole, before = ours(model), {name: t.clone() for name, t in model.state_dict().items()}
    with disabled(model, heads):
        found = ours(model)
    torch.testing.assert_close(found, theirs(bert, heads), atol=1e-5, rtol=1e-5)
    assert (found - whole).abs().max() > 0.1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_uniform_head_gives_the_mean_of_its_values(bert: Path) -> None:
    model, one = from_pretrained(bert), Head(0, 2)
    span = slice(one.head * SIZE, (one.head + 1) * SIZE)
    read: list[Tensor] = []
    model.encoder.attention[0].output.register_forward_pre_hook(lambda _, x: read.append(x[0]))
    values: list[Tensor] = []
    model.encoder.attention[0].value.register_forward_hook(lambda *x: values.append(x[2]))
    with disabled(model, [one], UNIFORM):
        ours(model)
    mean = values[0][0, :13, span].mean(dim=0)
    torch.testing.assert_close(read[0][0, :13, span], mean.expand(13, SIZE))


@pytest.mark.parametrize("changes", [{}, {"attention_bias": False}, {"positions": "rotary"}])
def test_a_pruned_model_computes_what_it_does_with_the_heads_disabled(changes: dict) -> None:
    model = build(tiny.encoder(layers=2, **changes), seed=3)
    with disabled(model, HEADS, ZERO):
        expected = ours(model.eval())
    prune(model, HEADS)
    assert torch.equal(ours(model), expected)
    attention = model.encoder.attention[1]
    assert not attention.key.weight[:SIZE].any()
    assert attention.key.weight[SIZE : 2 * SIZE].all()


def test_a_pruned_folder_is_one_of_transformers(bert: Path, tmp_path: Path) -> None:
    model = from_pretrained(bert)
    prune(model, HEADS)
    assert save_pretrained(model, tmp_path) == ""
    torch.testing.assert_close(theirs(tmp_path), theirs(bert, HEADS), atol=1e-5, rtol=1e-5)


def test_shared_attention_has_its_heads_once() -> None:
    model = build(tiny.encoder(layers=3, sharing="all"), seed=1)
    assert heads_of(model) == [[Head(0, head) for head in range(4)]]
    model = build(BiLSTMConfig(vocab_size=tiny.VOCABULARY), seed=1)
    with pytest.raises(ModelError, match="a model of kind bilstm has no attention"):
        heads_of(model)
