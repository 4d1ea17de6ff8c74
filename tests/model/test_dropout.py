"""Dropout is where the originals have it; a scaling replaces the random zeros to show where."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import configs
import model
from tests.model.references import CASES, batch, reference

torch.set_num_threads(1)
HIDDEN, ATTENTION = 0.25, 0.125
RATES = {
    "hidden_dropout_prob": HIDDEN, "dropout": HIDDEN,
    "attention_probs_dropout_prob": ATTENTION, "attention_dropout": ATTENTION,
    # Its class has one rate for attention weights and for what comes out of attention.
    "mlp_dropout": ATTENTION, "embedding_dropout": ATTENTION,
    # The original has none before this head.
    "classifier_dropout_prob": 0.0,
}  # fmt: skip


def scaled(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return x * (1 + p) if training else x


def in_training(case: str) -> PreTrainedModel:
    """The `transformers` model of a case with dropout, and with kernels that do not hide it."""
    theirs = reference(case)
    config = copy.deepcopy(theirs.config)
    for key, rate in RATES.items():
        if hasattr(config, key):
            setattr(config, key, rate)
    made = type(theirs)(config)
    made.load_state_dict(theirs.state_dict())
    made.set_attn_implementation("eager")
    return made.train()


@pytest.mark.parametrize("case", CASES)
def test_each_dropout_of_transformers_is_one_of_ours(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = in_training(case)
    theirs.save_pretrained(tmp_path)
    read = model.from_pretrained(tmp_path)
    config = read.config
    if case.startswith("albert"):  # its class has lost one, which the original's code has
        kept = [place for place in config.dropout_at if place != "feed_forward"]
        config = dataclasses.replace(config, dropout_at=kept)
    ours = model.build(config, seed=0)
    ours.load_state_dict(read.state_dict())
    monkeypatch.setattr(F, "dropout", scaled)
    ids, segments, mask = batch(23, padded=True)
    ids[mask == 0] = theirs.config.pad_token_id
    given = {}
    if getattr(theirs.config, "type_vocab_size", 0) > 1:
        given = {"token_type_ids": segments}
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, output_hidden_states=True, **given)
        got = ours(ids, given.get("token_type_ids"), mask, output_hidden_states=True)
        without = ours.eval()(ids, given.get("token_type_ids"), mask)
    for mine, yours in zip(got.hidden_states, expected.hidden_states, strict=True):
        real = mask != 0  # what eager attention gives a row that sees no key means nothing
        torch.testing.assert_close(mine[real], yours[real], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got.logits, without.logits, rtol=0.05)
    if got.heads.get("pairs") is not None:
        pair = expected.get("seq_relationship_logits", expected.get("sop_logits"))
        torch.testing.assert_close(got.heads.get("pairs"), pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("bert_base", {"embedding", "attention", "attention_output", "feed_forward"}),
        ("albert_base", {"embedding", "attention", "attention_output", "feed_forward"}),
        ("distilbert", {"embedding", "attention", "feed_forward"}),
        ("mobilebert", {"attention"}),  # of its config the only rate that is not 0
        ("modernbert_base", {"attention_output"}),  # likewise, of the one it was trained by
    ],
)
def test_a_rate_acts_where_the_published_training_had_one(name: str, places: set[str]) -> None:
    config = configs.load(
        name, model.EncoderConfig, "model", ["dropout=0.1", "attention_dropout=0.1"]
    )
    every = ("embedding", "attention", "attention_output", "feed_forward")
    assert {place for place in every if config.dropout_rate(place)} == places
