"""Every architecture against `transformers`: outputs, hidden states, scores, gradients, files."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, PreTrainedModel

import configs
import model
from model.hugging_face.conversion import FAMILIES
from tests.model.references import CASES, batch, reference

torch.set_num_threads(1)
BATCHES = pytest.mark.parametrize(
    ("length", "padded"),
    [(6, False), (23, True), (57, True), (150, True)],
    ids=["short", "padded", "long", "longest"],
)


@functools.cache
def _pair(case: str) -> tuple[PreTrainedModel, model.MaskedLanguageModel]:
    theirs = reference(case)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, model.from_pretrained(folder)


def pair(case: str) -> tuple[PreTrainedModel, model.MaskedLanguageModel]:
    """The `transformers` model of a case, and ours read from its files; not to be modified."""
    theirs, ours = _pair(case)
    ours.zero_grad()
    return theirs, ours


def inputs(
    theirs: PreTrainedModel, length: int, padded: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    ids, segments, mask = batch(length, padded)
    pad = theirs.config.pad_token_id
    ids[mask == 0] = pad
    types = getattr(theirs.config, "type_vocab_size", 0)
    return ids, segments if types > 1 else None, mask if padded else None


def their_output(
    theirs: PreTrainedModel, ids: Tensor, segments: Tensor | None, mask: Tensor | None
) -> dict[str, object]:
    extra = {} if segments is None else {"token_type_ids": segments}
    found = theirs(ids, attention_mask=mask, output_hidden_states=True, **extra)
    return {
        "logits": found.get("logits", found.get("prediction_logits")),
        "pair": found.get("seq_relationship_logits", found.get("sop_logits")),
        "hidden_states": found.hidden_states,
    }


def real(theirs: PreTrainedModel, x: Tensor, mask: Tensor | None) -> Tensor:
    """x [B, L, ...]; of DeBERTa, whose class sets embeddings of padding to 0, only real tokens."""
    is_deberta = theirs.config.model_type == "deberta-v2"
    return x[mask != 0] if is_deberta and mask is not None else x


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def assert_gradients_equal(ours: model.MaskedLanguageModel, theirs: PreTrainedModel) -> None:
    family = next(f for f in FAMILIES if f.model_type == theirs.config.model_type)
    gradients = {n: p.grad.float() for n, p in theirs.named_parameters() if p.grad is not None}
    gradients = family.to_ours(gradients)
    names = family.their_names(ours.config, [n for n, _ in ours.named_parameters()])
    compared = 0
    for name, parameter in ours.named_parameters():
        if parameter.grad is None or name.endswith("key.bias"):  # its true gradient is zero
            continue
        expected_gradient = gradients[names[name]]
        difference = (parameter.grad - expected_gradient).norm()
        assert difference <= 3e-5 * expected_gradient.norm().clamp_min(1e-6), name
        compared += 1
    assert compared >= len(gradients) - ours.config.layers


@BATCHES
@pytest.mark.parametrize("case", CASES)
def test_outputs_equal(case: str, length: int, padded: bool) -> None:
    theirs, ours = pair(case)
    given = inputs(theirs, length, padded)
    with torch.no_grad():
        expected, got = their_output(theirs, *given), ours(*given, output_hidden_states=True)
    mask = given[2]
    assert_close(real(theirs, got.logits, mask), real(theirs, expected["logits"], mask))
    assert len(got.hidden_states) == len(expected["hidden_states"])
    for mine, yours in zip(got.hidden_states, expected["hidden_states"], strict=True):
        assert_close(real(theirs, mine, mask), real(theirs, yours, mask))
    if expected["pair"] is not None:
        assert_close(got.heads.get("pairs"), expected["pair"])
    if ours.config.pooler != "none":
        extra = {} if given[1] is None else {"token_type_ids": given[1]}
        with torch.no_grad():
            base = theirs.base_model(given[0], attention_mask=given[2], **extra)
        assert_close(got.pooled, base.pooler_output)


@BATCHES
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal(case: str, length: int, padded: bool) -> None:
    theirs, ours = pair(case)
    # In float64: their fused attention alone is off by more than 1e-5 in float32.
    theirs = copy.deepcopy(theirs).double()
    given = inputs(theirs, length, padded)
    direction = torch.randn(
        (*given[0].shape, theirs.config.vocab_size), generator=torch.Generator().manual_seed(1)
    )
    expected, got = their_output(theirs, *given), ours(*given)
    for logits, sequence_pair in (
        (expected["logits"], expected["pair"]),
        (got.logits, got.heads.get("pairs")),
    ):
        loss = real(theirs, logits.log_softmax(-1) * direction, given[2]).sum()
        if sequence_pair is not None:
            loss = loss + F.cross_entropy(sequence_pair, torch.tensor([0, 1, 1]))
        loss.backward()
    assert_gradients_equal(ours, theirs)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("deberta")])
def test_attention_scores_give_their_attention(case: str) -> None:
    theirs, ours = pair(case)
    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("eager")
    ids, segments, mask = inputs(theirs, 23, padded=True)
    extra = {} if segments is None else {"token_type_ids": segments}
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, output_attentions=True, **extra).attentions
        got = ours(ids, segments, mask, output_attention_scores=True).attention_scores
    assert len(got) == len(expected) == ours.config.layers
    for scores, attention in zip(got, expected, strict=True):
        attended = mask[:, None, :, None]
        assert_close(scores.softmax(-1) * attended, attention * attended)


@pytest.mark.parametrize("case", CASES)
def test_the_round_trip_is_exact_to_the_bit(case: str, tmp_path: Path) -> None:
    theirs, ours = pair(case)
    assert model.save_pretrained(ours, tmp_path / "ours") == ""
    again = model.from_pretrained(tmp_path / "ours")
    assert again.config == ours.config
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    reloaded = type(theirs).from_pretrained(tmp_path / "ours")
    expected = theirs.state_dict()
    for name, tensor in reloaded.state_dict().items():
        if name.endswith("embedding_hidden_mapping_in.weight") or name in expected:
            assert torch.equal(tensor, expected[name]), name
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["architectures"] == [type(theirs).__name__]


def test_modernbert_is_described_to_transformers_4_and_5(tmp_path: Path) -> None:
    changes = ["layers=4", "global_every=2", "global_rope_theta=500.0", "local_rope_theta=20.0"]
    changes += ["vocab_size=50", "pad_token_id=0", "hidden_size=16", "heads=2"]
    config = configs.load("modernbert_base", model.EncoderConfig, "model", changes)
    model.save_pretrained(model.build(config, 0), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    of_4 = ["global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"]
    assert [saved[key] for key in of_4] == [2, 500.0, 20.0]
    of_5 = ["layer_types", "rope_parameters"]
    for unknown in (of_4, of_5):
        some = {key: value for key, value in saved.items() if key not in unknown}
        (tmp_path / "config.json").write_text(json.dumps(some))
        assert model.from_pretrained(tmp_path).config.meaning() == config.meaning()


def test_a_head_of_another_width_is_refused_with_the_width_it_must_have(tmp_path: Path) -> None:
    theirs = pair("eurobert")[0]
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": 1000}))
    width = theirs.config.hidden_size // theirs.config.num_attention_heads
    with pytest.raises(
        model.ModelError, match=rf"head_dim: 1000 is not supported \(only {width}\)"
    ):
        model.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["gelu_python", "gelu_python_tanh"])
def test_an_activation_by_another_name_is_the_one_of_transformers(
    name: str, tmp_path: Path
) -> None:
    theirs = pair("bert one head")[0]
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": name}))
    theirs = type(theirs).from_pretrained(tmp_path).eval()
    input_ids = torch.arange(12)[None]
    ours = model.from_pretrained(tmp_path)(input_ids).logits
    logits = getattr(theirs(input_ids), "logits", None)
    logits = theirs(input_ids).prediction_logits if logits is None else logits
    assert torch.allclose(ours, logits, atol=1e-5)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("case", ["nomic bert", "eurobert", "modernbert"])
def test_scaled_rotary_positions_are_refused_by_old_keys_too(
    case: str, key: str, tmp_path: Path
) -> None:
    pair(case)[0].save_pretrained(tmp_path)
    path, scaled = tmp_path / "config.json", {"type": "linear", "factor": 2.0}
    theirs = json.loads(path.read_text())
    by_layer = case == "modernbert" and key == "rope_parameters"
    theirs[key] = {"full_attention": scaled} if by_layer else scaled
    path.write_text(json.dumps(theirs))
    with pytest.raises(model.ModelError, match=r"(^|: )(type|rope_scaling): .* is not supported"):
        model.from_pretrained(tmp_path)


def test_nomic_berts_first_checkpoints_are_read(tmp_path: Path) -> None:
    theirs, ours = pair("nomic bert")
    theirs.save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "nomic_bert.encoder.layers.0.attn.Wqkv.weight" in weights  # files keep the first names
    renamed = {name.replace("nomic_bert.", "bert."): tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    config = {"model_type": "nomic_bert", "activation_function": "swiglu", "vocab_size": 101}
    config |= {"n_embd": 36, "n_layer": 3, "n_head": 3, "n_inner": 27, "n_positions": 160}
    config |= {"rotary_emb_base": 300, "layer_norm_epsilon": 1e-12, "prenorm": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = model.from_pretrained(tmp_path)
    assert again.config.meaning() == ours.config.meaning()
    assert all(torch.equal(again.state_dict()[n], t) for n, t in ours.state_dict().items())
    (tmp_path / "config.json").write_text(json.dumps(config | {"prenorm": True}))
    with pytest.raises(model.ModelError, match=r"prenorm: True is not supported"):
        model.from_pretrained(tmp_path)
    model.save_pretrained(ours, tmp_path / "ours")
    assert safetensors.torch.load_file(tmp_path / "ours/model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize(
    "case", ["bert odd", "roberta", "distilbert", "albert groups", "mobilebert", "modernbert"]
)
def test_exports_load_as_masked_language_models(case: str, tmp_path: Path) -> None:
    _, ours = pair(case)
    model.save_pretrained(ours, tmp_path / "ours")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    ids = batch(11, padded=False)[0]
    with torch.no_grad():
        assert_close(ours(ids).logits, loaded(ids).logits)
