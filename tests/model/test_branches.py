"""Branches after every layer: their form and size, and examples that leave early (FastBERT)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

import configs
import model
from configs import ConfigError, typed
from model import Capture, EncoderConfig, TaskHeadConfig, with_task_head
from model.accounting import flops_per_token, flops_to_leave
from model.heads import Branch
from trainer.footprint.work import KERNELS

HEAD = TaskHeadConfig(labels=["a", "b", "c"], pooling="first", transform="none", branches=True)
LAYERS, ROWS, LENGTH = 4, 12, 9
SMALL = EncoderConfig(
    vocab_size=50, hidden_size=16, layers=LAYERS, heads=2, ffn_size=24, max_positions=16,
    mlm_head=False, initializer_range=0.2,
)  # fmt: skip
SOME = 0.3  # a speed at which examples leave at three different layers


def branched(config: EncoderConfig = SMALL) -> EncoderConfig:
    return with_task_head(config, "task", HEAD)


def parameters(part: nn.Module) -> int:
    return sum(one.numel() for one in part.parameters())


def test_the_sizes_are_those_of_the_original() -> None:
    base = configs.load("bert_base", EncoderConfig, "model", ["mlm_head=false"])
    ours = model.describe(branched(base))
    assert ours.head_parameters == 12 * (
        (768 * 128 + 128) + 4 * (128 * 128 + 128) + (128 * 128 + 128) + (128 * 3 + 3)
    )
    assert ours.parameters == 109_482_240 - (768 * 768 + 768)  # BERT without its pooler


def in_plain_torch(branch: Branch, states: Tensor, lengths: Tensor) -> Tensor:
    """The branch with torch's own attention, at every token."""
    attention = nn.MultiheadAttention(128, 2, batch_first=True)
    parts = [branch.query, branch.key, branch.value]
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([one.weight for one in parts]))
        attention.in_proj_bias.copy_(torch.cat([one.bias for one in parts]))
        attention.out_proj.load_state_dict(branch.output.state_dict())
    x = torch.tanh(branch.narrow(states))
    hidden = torch.arange(states.shape[1]) >= lengths[:, None]
    mixed, _ = attention(x, x, x, key_padding_mask=hidden)
    return branch.linear(torch.tanh(branch.dense(mixed)[:, 0]))


@torch.no_grad()
def built(config: EncoderConfig = SMALL) -> model.Model:
    """With branches of large weights, so that examples leave at different layers."""
    ours = model.build(branched(config), seed=1).eval()
    for parameter in ours.task_heads.parameters():
        parameter.mul_(4.0)
    return ours


@pytest.fixture
def ours() -> model.Model:
    return built()


@pytest.fixture
def texts() -> tuple[Tensor, Tensor]:
    """Token ids and lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 50, (ROWS, LENGTH), generator=generator)
    return ids, torch.randint(3, LENGTH + 1, (ROWS,), generator=generator)


@torch.no_grad()
def all_logits(ours: model.Model, ids: Tensor, lengths: Tensor) -> Tensor:
    """Of every layer: [layers, B, labels]."""
    capture = Capture(heads=("task",), branches=("task",))
    found = ours.features(ids, None, lengths, capture=capture)
    return torch.cat([found.branches["task"], found.heads["task"][None]])


def test_a_branch_is_what_plain_torch_says(ours, texts) -> None:
    ids, lengths = texts
    states = ours(ids, None, lengths, output_hidden_states=True).hidden_states
    wanted = [
        in_plain_torch(branch, one, lengths)
        for branch, one in zip(ours.task_heads["task"], states[1:], strict=True)
    ]
    torch.testing.assert_close(all_logits(ours, ids, lengths), torch.stack(wanted).detach())


def test_branches_do_not_train_the_layers(ours, texts) -> None:
    found = ours.features(*texts[:1], capture=Capture(branches=("task",)))
    found.branches["task"].sum().backward()
    trained = {name for name, one in ours.named_parameters() if one.grad is not None}
    assert trained
    assert all(name.startswith("task_heads.task.branches.") for name in trained)


@pytest.mark.parametrize("speed", [0.0, SOME, 1.1])
@pytest.mark.parametrize("is_padded", [False, True])
def test_leaving_early_is_running_all_layers_and_choosing_afterwards(
    ours, texts, speed, is_padded
) -> None:
    ids, lengths = texts[0], texts[1] if is_padded else None
    with torch.inference_mode():
        found = ours.leave_early("task", speed, ids, None, lengths)
    every = all_logits(ours, ids, lengths)
    p = every.softmax(dim=-1)
    certain = torch.distributions.Categorical(probs=p).entropy() / math.log(3) < speed
    certain[-1] = True
    first = certain.int().argmax(dim=0)
    assert found.layers.tolist() == (first + 1).tolist()
    torch.testing.assert_close(found.logits, every[first, torch.arange(ROWS)])
    layers = set(found.layers.tolist())
    assert len(layers) > 2 if speed == SOME else layers == {LAYERS if speed == 0.0 else 1}


def test_examples_leave_a_model_with_local_windows_and_a_final_norm_too(texts) -> None:
    words = (
        "layers=4 heads=2 hidden_size=16 ffn_size=24 vocab_size=50 max_positions=16 local_window=4 "
        "pad_token_id=0 mlm_head=false initializer_range=0.3"
    )
    ours = built(configs.load("modernbert_base", EncoderConfig, "model", words.split()))
    every = all_logits(ours, *texts)
    with torch.inference_mode():
        found = ours.leave_early("task", 0.5, texts[0], None, texts[1])
    assert len(set(found.layers.tolist())) > 2
    expected = every[found.layers - 1, torch.arange(ROWS)]
    torch.testing.assert_close(
        found.logits, expected, rtol=1e-4, atol=1e-4
    )  # batches of other sizes


def test_at_speed_0_everybody_gets_the_last_layers_logits_to_the_bit(ours, texts) -> None:
    with torch.inference_mode():
        found = ours.leave_early("task", 0.0, texts[0], None, texts[1])
        whole = ours.features(texts[0], None, texts[1], capture=Capture(heads=("task",)))
    assert torch.equal(found.logits, whole.heads["task"])


def make_certain_at(ours: model.Model, layer: int) -> None:
    """Let every example leave at this layer, from 1."""
    for number, branch in enumerate(ours.task_heads["task"], start=1):
        nn.init.zeros_(branch.linear.weight)
        branch.linear.bias.copy_(torch.tensor([99.0 * (number == layer), 0.0, 0.0]))


@pytest.mark.parametrize("sizes", [{}, {"sharing": "all"}, {"embedding_size": 8}])
def test_flops_to_each_layer_are_those_that_torch_counts(texts, sizes) -> None:
    projected = {"embedding_projection": "sum"} if "embedding_size" in sizes else {}
    config = branched(dataclasses.replace(SMALL, **sizes, **projected))
    ours = model.build(config, seed=1).eval().requires_grad_(False)
    one = texts[0][:1]

    def counted(run: Callable[[], object]) -> int:
        with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
            run()
        return counter.get_total_flops()

    for layer in range(1, LAYERS + 1):
        make_certain_at(ours, layer)
        wanted = flops_to_leave(config, HEAD, layer, LENGTH)
        assert counted(lambda: ours.leave_early("task", 0.5, one)) == wanted
    whole = counted(lambda: ours.features(one, capture=Capture(heads=("task",))))
    assert whole == round(LENGTH * flops_per_token(config, LENGTH, 0.0))


def test_a_model_with_branches_is_saved_whole_and_unknown_to_transformers(
    tmp_path: Path, ours, texts
) -> None:
    why = model.save_pretrained(ours, tmp_path)
    assert "transformers has no class with a classifier after every layer" in why
    again = model.from_pretrained(tmp_path)
    assert again.config == ours.config
    assert torch.equal(all_logits(again, *texts), all_logits(ours, *texts))
    with pytest.raises(ValueError, match="tandem"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "regression", "labels": []}, "branches: are for kind: classification"),
        ({"layers": [1]}, "layers: branches read one layer each"),
        ({"pooling": "pooler"}, "pooling: must be first where branches"),
        ({"transform": "tanh"}, "transform: must be none where branches"),
    ],
)
def test_heads_that_cannot_have_branches(changes, message) -> None:
    tree = {**dataclasses.asdict(HEAD), **changes}
    with pytest.raises(ConfigError, match=message):
        typed.build(tree, TaskHeadConfig)


def test_a_bilstm_has_no_branches() -> None:
    tree = {"kind": "bilstm", "task_heads": {"task": dataclasses.asdict(HEAD)}}
    with pytest.raises(ConfigError, match="kind bilstm cannot let examples leave after any"):
        configs.validate(tree, model.ModelConfig, "model")
