"""BERT against `transformers`: outputs and files."""

from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForPreTraining

import model
from configs.rules import OneOf

torch.set_num_threads(1)

NORMS = next(
    rule.choices
    for rule in get_type_hints(model.EncoderConfig, include_extras=True)["norm"].__metadata__
    if isinstance(rule, OneOf)
)


def reference(**sizes: int) -> BertForPreTraining:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=97,
        max_position_embeddings=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    found = BertForPreTraining(config).eval()
    for parameter in found.parameters():
        parameter.data.normal_(0, 0.3)
    return found


def test_a_saved_model_loads_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    theirs = reference(
        hidden_size=36, num_hidden_layers=3, num_attention_heads=3, intermediate_size=50
    )
    theirs.save_pretrained(tmp_path / "theirs")
    ours = model.from_pretrained(tmp_path / "theirs")
    assert model.save_pretrained(ours, tmp_path / "ours") == ""
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    ids = torch.randint(1, 97, (3, 17))
    with torch.no_grad():
        expected = theirs(ids).prediction_logits
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_masked_positions_choose_rows_of_the_full_logits() -> None:
    ours = model.build(model.EncoderConfig(97, 32, 2, 2, 48), seed=1).eval()
    ids, positions = torch.randint(0, 97, (2, 8)), torch.tensor([3, 9, 15, 3])
    with torch.no_grad():
        every = ours(ids).logits.flatten(0, 1)
        torch.testing.assert_close(ours(ids, masked_positions=positions).logits, every[positions])


def test_initial_weights_depend_on_the_seed_only() -> None:
    config = model.EncoderConfig(97, 32, 2, 2, 48)
    first = model.build(config, seed=1).state_dict()
    torch.manual_seed(7)
    again, other = model.build(config, seed=1).state_dict(), model.build(config, seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embeddings.word.weight"], other.embeddings.word.weight)
    assert first["embeddings.word.weight"].abs().max() <= 0.04


@pytest.mark.parametrize("initializer", ["truncated_normal", "normal"])
def test_initial_weights_have_the_stated_distribution(initializer: str) -> None:
    config = model.EncoderConfig(2000, 64, 2, 2, 256, initializer=initializer)
    weight = model.build(config, seed=3).embeddings.word.weight.detach()
    cut = initializer == "truncated_normal"
    assert abs(weight.mean()) < 2e-4
    # A normal cut at two deviations keeps 0.8796 of its deviation.
    assert abs(weight.std() - 0.02 * (0.8796 if cut else 1.0)) < 2e-4
    assert (weight.abs().max() <= 0.04) == cut
    assert bool(weight[0].any()) == cut  # RoBERTa and DistilBERT zero the padding's vector


@pytest.mark.parametrize("norm", NORMS)
def test_every_kind_of_norm_begins_with_weights_of_one(norm: str) -> None:
    found = model.build(model.EncoderConfig(97, 32, 2, 2, 48, norm=norm), seed=3)
    norms = {name: one for name, one in found.named_parameters() if name.endswith("norm.weight")}
    assert len(norms) == 6  # of the embeddings, of two halves of two layers, and of the head
    assert all(torch.equal(one, torch.ones_like(one)) for one in norms.values())


def test_modernbert_scales_the_outputs_of_its_residual_branches_by_their_number() -> None:
    config = model.EncoderConfig(2000, 64, 8, 2, 256, initializer="scaled_truncated_normal")
    found = model.build(config, seed=3)
    expected = 0.02 * 0.8796
    weights = dict(found.named_parameters())
    for name in weights:
        if name.endswith(".weight") and "norm" not in name and "segment" not in name:
            is_scaled = name.endswith(("output.weight", "head.dense.weight"))
            std = expected / 16**0.5 if is_scaled else expected  # 1 / sqrt(2 * 8 layers)
            assert abs(weights[name].std() / std - 1) < 0.05, name
    assert sum("output.weight" in name for name in weights) == 2 * 8


def test_selected_layers_make_a_shallower_model() -> None:
    teacher = model.build(model.EncoderConfig(97, 32, 4, 2, 48), seed=1)
    state = model.select_layers(teacher.state_dict(), [0, 2])
    student = model.build(model.EncoderConfig(97, 32, 2, 2, 48), seed=2)
    student.load_state_dict(state)
    assert torch.equal(
        student.encoder.attention[1].query.weight, teacher.encoder.attention[2].query.weight
    )
    with pytest.raises(model.ModelError, match="no layer 4"):
        model.select_layers(teacher.state_dict(), [0, 4])
