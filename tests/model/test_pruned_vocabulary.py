"""A model with some entries of its vocabulary predicts as the whole one among these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, ElectraConfig, ElectraForMaskedLM

from model import EncoderConfig, ModelError, build, from_pretrained, save_pretrained, select_tokens
from tests.model.references import CASES, VOCABULARY

TOKENS = [*range(6), *range(7, VOCABULARY, 3)]
ELECTRA = ElectraForMaskedLM(
    ElectraConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, embedding_size=12, initializer_range=0.3,
    )
)  # fmt: skip
PREDICTING = {"electra": ELECTRA} | {
    name: CASES[name]
    for name in ("bert odd", "roberta", "distilbert", "albert groups", "mobilebert", "modernbert")
}


@pytest.mark.parametrize("name", PREDICTING)
def test_it_predicts_as_the_whole_model_restricted_and_renormalised(name, tmp_path: Path) -> None:
    theirs = PREDICTING[name].eval()
    theirs.save_pretrained(tmp_path / "whole")
    whole = from_pretrained(tmp_path / "whole")
    config, state = select_tokens(whole.state_dict(), whole.config, TOKENS)
    save_pretrained((config, state), tmp_path / "pruned")
    ids = torch.randint(5, len(TOKENS), (3, 9), generator=torch.Generator().manual_seed(0))
    pruned = from_pretrained(tmp_path / "pruned")
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "pruned").eval()
    old = torch.tensor(TOKENS)[ids]
    with torch.no_grad():
        output = theirs(old)
        logits = output.logits if "logits" in output else output.prediction_logits
        wanted = logits[..., TOKENS].log_softmax(-1)
        got = pruned(ids).logits.log_softmax(-1)
        read = exported(ids).logits.log_softmax(-1)
    assert wanted.std() > 0.01
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(read, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "tokens", "message"),
    [
        ("learned", [2, 3], "pad_token_id: 1 is no token of the tokenizer"),
        ("learned_after_padding", [1, 2], "positions: count from the padding token"),
    ],
)
def test_what_cannot_be_selected_is_refused(positions, tokens, message) -> None:
    config = EncoderConfig(
        vocab_size=20, hidden_size=8, layers=1, heads=1, ffn_size=8, pad_token_id=1,
        positions=positions,
    )  # fmt: skip
    with pytest.raises(ModelError, match=message):
        select_tokens(build(config, seed=1).state_dict(), config, tokens)
