"""Checkpoints with other heads than the masked-LM head, against `transformers`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

import model
from model import EncoderConfig

LABELS = ["negative", "neutral", "positive"]
SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip
OURS = EncoderConfig(
    vocab_size=50, hidden_size=16, layers=2, heads=2, ffn_size=24, max_positions=16,
    mlm_head=False, classifiers={"moods": LABELS},
)  # fmt: skip
ALBERT = {"embedding_size": 8, "embedding_projection": "sum", "sharing": "all"}
IDS = torch.tensor([[2, 7, 9, 3], [2, 8, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_a_classifier_is_imported_with_its_labels(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {n: i for i, n in enumerate(LABELS)}}
    theirs = (
        BertForSequenceClassification(BertConfig(**SIZES, **labels))
        if family == "bert"
        else AlbertForSequenceClassification(AlbertConfig(**SIZES, **labels, embedding_size=8))
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours = model.from_pretrained(tmp_path)
    assert ours.config.classifiers == {"sentence_classification": LABELS}
    assert not ours.config.mlm_head
    got = ours(IDS, None, MASK)
    expected = theirs(IDS, attention_mask=MASK).logits
    torch.testing.assert_close(got.heads["sentence_classification"], expected)
    assert got.logits is None


@pytest.mark.parametrize("changes", [{}, ALBERT], ids=["bert", "albert"])
def test_a_classifier_is_exported_with_its_labels(tmp_path: Path, changes: dict) -> None:
    ours = model.build(dataclasses.replace(OURS, **changes), seed=1).eval()
    assert model.save_pretrained(ours, tmp_path) == ""
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.config.id2label == dict(enumerate(LABELS))
    torch.testing.assert_close(
        ours(IDS, None, MASK).heads["moods"], theirs(IDS, attention_mask=MASK).logits
    )
    assert model.from_pretrained(tmp_path).config.classifiers == {"moods": LABELS}


def test_an_encoder_without_any_head_is_imported_and_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = BertModel(BertConfig(**SIZES)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = model.from_pretrained(tmp_path / "theirs")
    expected = theirs(IDS, attention_mask=MASK)
    got = ours(IDS, None, MASK, output_hidden_states=True)
    torch.testing.assert_close(got.hidden_states[-1], expected.last_hidden_state)
    torch.testing.assert_close(got.pooled, expected.pooler_output)
    assert model.save_pretrained(ours, tmp_path / "ours") == ""
    again = AutoModel.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(IDS, attention_mask=MASK).pooler_output, got.pooled)


def test_a_head_beside_the_masked_lm_head_is_kept_in_our_own_form(tmp_path: Path) -> None:
    ours = model.build(dataclasses.replace(OURS, mlm_head=True), seed=1).eval()
    assert "no class with a classifier" in model.save_pretrained(ours, tmp_path)
    again = model.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).heads["moods"], ours(IDS).heads["moods"])
