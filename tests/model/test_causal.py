"""Causal attention against `transformers`' decoders, for rows of one and of several documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, RobertaConfig, RobertaForCausalLM

from model import Documents, EncoderConfig, ModelError, attention_kernel, build, from_pretrained
from model.attention_kernel import FUSED, PLAIN, RUNS
from tests.model.test_documents import LENGTH, VOCABULARY, kernel, model_of, rows

__all__ = ["kernel"]

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "is_decoder": True,
}  # fmt: skip
DECODERS = {
    "bert": (BertLMHeadModel, BertConfig(**SIZES, pad_token_id=0)),
    "roberta": (RobertaForCausalLM, RobertaConfig(**SIZES, pad_token_id=1)),
}


def causal() -> tuple[torch.Tensor, Documents, list[tuple[int, int, int]]]:
    """The rows of `tests.model.test_documents`, each position of which sees no later one."""
    ids, documents, places = rows()
    return ids, documents._replace(is_causal=True), places


@pytest.mark.parametrize("family", DECODERS)
def test_logits_and_the_loss_are_those_of_a_decoder(family, kernel, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, config = DECODERS[family]
    theirs = kind(config).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path)
    config_file = tmp_path / "config.json"
    config_file.write_text(
        config_file.read_text().replace('"is_decoder": true', '"is_decoder": false')
    )
    ours = from_pretrained(tmp_path).eval()
    ids, documents, places = causal()
    with torch.no_grad():
        logits = ours(ids, None, documents).logits
        losses, labels = [], 0
        for row, first, last in places:
            alone = ids[row : row + 1, first:last]
            told = theirs(alone, labels=alone if last - first > 1 else None)
            packed = logits[row, first:last]
            torch.testing.assert_close(packed, told.logits[0], rtol=1e-4, atol=1e-4)
            if told.loss is not None:
                losses.append(told.loss * (last - first - 1))
                labels += last - first - 1
        following = [
            (row * LENGTH + at, ids[row, at + 1])
            for row, first, last in places
            for at in range(first, last - 1)
        ]
        positions, next_ids = (torch.tensor(column) for column in zip(*following, strict=True))
        read = logits.flatten(0, 1)[positions]
        loss = torch.nn.functional.cross_entropy(read, next_ids)
    assert len(next_ids) == labels
    torch.testing.assert_close(loss, sum(losses) / labels)


@pytest.mark.parametrize("name", ["modernbert", "albert"])
def test_no_state_depends_on_a_later_token_or_another_document(name: str, kernel: str) -> None:
    """Also in local layers, whose window ends at the position."""
    model = model_of(name)
    ids, documents, places = causal()
    row, first, last = places[3]  # the fourth document of the first row
    middle = (first + last) // 2
    states = model.encode(ids, None, documents).last_hidden_state
    other = ids.clone()
    other[row, middle + 1 :], other[row, :first] = 7, 9
    changed = model.encode(other, None, documents).last_hidden_state
    torch.testing.assert_close(changed[row, first : middle + 1], states[row, first : middle + 1])
    assert not torch.allclose(changed[row, middle + 1 : last], states[row, middle + 1 : last])
    seen = model.encode(ids, None, documents._replace(is_causal=False)).last_hidden_state
    assert not torch.allclose(seen[row, first], states[row, first])


def test_a_long_row_runs_by_document_and_a_short_one_by_a_mask() -> None:
    operands = torch.device("cpu"), torch.float32
    chosen = [
        attention_kernel.attention_pattern(
            Documents.of(torch.zeros(2, length, dtype=torch.int64), is_causal=True),
            *(0, (2, length), 64, operands, 0.0),
        ).kernel
        for length in (256, 64, 128)
    ]
    assert chosen == [RUNS, PLAIN, FUSED]


def test_a_model_that_reads_the_next_word_is_refused() -> None:
    ids, documents, _ = causal()
    with pytest.raises(ModelError, match=r"set model\.trigram to false"):
        model_of("mobilebert")(ids, None, documents)
    build(EncoderConfig(VOCABULARY, 8, 1, 1, 8), seed=0)(ids, None, documents)
