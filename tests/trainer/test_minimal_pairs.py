"""Pseudo-log-likelihoods of sentences, against a plain loop over `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    ElectraConfig,
    ElectraForPreTraining,
)

from data_pipeline import DataError
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import train
from model import ModelError, build, from_pretrained, save_pretrained
from model.kinds.seq2seq import Seq2SeqConfig
from tests.trainer import tiny
from trainer.evaluation.minimal_pairs import (
    PairScores,
    originality,
    pseudo_log_likelihoods,
    require_scorable,
    score_minimal_pairs,
)

PAIRS = [
    ("The system runs a small command.", "The system run a small command.", "agreement"),
    ("A file is read.", "A file are read by the other one.", "agreement"),
    ("Who has seen it?", "Who it has seen?", "order"),
]


@pytest.fixture(scope="module")
def exported(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("exported"), tmp_path_factory.mktemp("tokenizer")
    train([str(text)], "wordpiece", 300, str(tokenizer))
    _, vocabulary = load(tokenizer)
    config = tiny.encoder(vocab_size=vocabulary.vocab_size, max_positions=64, layers=2)
    assert not save_pretrained(build(config, seed=1), folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "blimp.jsonl"
    names = ("sentence_good", "sentence_bad", "linguistics_term", "UID")
    lines = [json.dumps(dict(zip(names, (*pair, "x"), strict=True))) for pair in PAIRS]
    path.write_text("\n".join(lines))
    return path


def plain_loop(folder: Path, text: str) -> float:
    """One forward pass for each token."""
    model, tokenizer = (
        AutoModelForMaskedLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
    total = 0.0
    for place in range(1, len(ids) - 1):
        masked = torch.tensor([[*ids[:place], tokenizer.mask_token_id, *ids[place + 1 :]]])
        with torch.no_grad():
            logits = model.eval()(input_ids=masked).logits[0, place]
        total += torch.log_softmax(logits, dim=-1)[ids[place]].item()
    return total


@pytest.mark.parametrize("tokens_per_pass", [40, 1 << 14])
def test_sentences_are_as_probable_as_in_a_plain_loop(exported: Path, tokens_per_pass: int) -> None:
    tokenizer, vocabulary = load(exported)
    texts = [text for pair in PAIRS for text in pair[:2]]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    model = from_pretrained(exported)
    found = pseudo_log_likelihoods(model, vocabulary, [*encoded, []], tokens_per_pass)
    expected = [plain_loop(exported, text) for text in texts]
    np.testing.assert_allclose(found[:-1], expected, rtol=1e-5)
    assert found[-1] == 0  # no tokens


def test_accuracy_by_phenomenon(exported: Path, pairs: Path) -> None:
    found = scored(exported, str(pairs))
    right = [plain_loop(exported, good) > plain_loop(exported, bad) for good, bad, _ in PAIRS]
    assert found.pairs == 3
    assert found.accuracy == sum(right) / 3
    assert found.by_phenomenon == {"agreement": sum(right[:2]) / 2, "order": float(right[2])}
    assert sum(part.pairs for part in found.by_paradigm) == found.pairs == len(right)
    for part in found.by_paradigm:
        assert part.accuracy == found.by_phenomenon[part.phenomenon], "one paradigm each"
    assert 0 < sum(right) < 3, "a model that finds all pairs right or wrong shows little"


def test_a_detector_of_replaced_tokens_scores_by_originality(
    exported: Path, tmp_path: Path
) -> None:
    """As `transformers`' ELECTRA tells for each sentence alone."""
    tokenizer, vocabulary = load(exported)
    config = ElectraConfig(
        vocab_size=vocabulary.vocab_size,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    theirs = ElectraForPreTraining(config).eval()
    theirs.save_pretrained(tmp_path)
    texts = [text for pair in PAIRS for text in pair[:2]]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    expected = []
    for ids in encoded:
        with torch.no_grad():
            logits = theirs(torch.tensor([[vocabulary.cls, *ids, vocabulary.sep]])).logits[0, 1:-1]
        expected.append(F.logsigmoid(-logits).sum().item())
    found = originality(from_pretrained(tmp_path), vocabulary, encoded, 40)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def scored(folder: Path, pairs: str) -> PairScores:
    return score_minimal_pairs(folder, pairs, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("asked", [require_scorable, scored], ids=["before training", "after it"])
def test_models_and_pairs_that_cannot_be_scored(
    asked: Callable[[Path, str], object], exported: Path, pairs: Path, tmp_path: Path
) -> None:
    small, bare = tmp_path / "small", tmp_path / "bare"
    save_pretrained(build(tiny.encoder(vocab_size=20), seed=1), small, tokenizer=exported)
    with pytest.raises(DataError, match="small: its tokenizer has more tokens than its model"):
        asked(small, str(pairs))
    config = tiny.encoder(vocab_size=60, mlm_head=False)
    save_pretrained(build(config, seed=1), bare, tokenizer=exported)
    with pytest.raises(ModelError, match="bare: has no masked-LM head"):
        asked(bare, str(pairs))
    translator = Seq2SeqConfig(vocab_size=60, hidden_size=16, layers=2, heads=2, ffn_size=24)
    save_pretrained(build(translator, seed=1), tmp_path / "mt", exported)
    with pytest.raises(ModelError, match="mt: translates; name an encoder"):
        asked(tmp_path / "mt", str(pairs))
    record = json.loads(pairs.read_text().splitlines()[0])
    for bad, reason in (
        ("", "has no tokens"),
        (record["sentence_good"].upper(), "are the same to this"),
    ):
        pairs.write_text(json.dumps(record | {"sentence_bad": bad}))
        with pytest.raises(DataError, match=rf"blimp.jsonl:1: .*{reason}"):
            asked(exported, str(pairs))
    pairs.write_text(json.dumps(record | {"sentence_bad": "a " * 63}))
    with pytest.raises(DataError, match=r"blimp.jsonl:1: has 6\d tokens, and the model reads 64"):
        asked(exported, str(pairs))
