"""Encoders of `transformers` that Tandem has no code for, read by the code of `transformers`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline import MASKED
from model import (
    VECTOR,
    Capture,
    ModelError,
    TaskHeadConfig,
    build,
    describe,
    from_pretrained,
    read_config,
)
from model.hugging_face.library import longest_sequence
from tests.model.references import VOCABULARY
from trainer.teacher_outputs import OutputProjection, detach

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
XLM = {
    "vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 3, "n_heads": 2,
    "max_position_embeddings": 40, "embed_init_std": 0.2, "init_std": 0.2,
}  # fmt: skip
CONFIGS = {
    "Deberta": {**SIZES, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    "XLM": XLM,
    "RoFormer": {**SIZES, "embedding_size": 16},
    "MPNet": SIZES,
    "Mra": SIZES,  # its numbers of positions are in its checkpoints
    "Esm": {**SIZES, "pad_token_id": 1},
    "MobileBert": {**SIZES, "embedding_size": 16, "intra_bottleneck_size": 16},
}
FUNNEL = {
    "vocab_size": VOCABULARY, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48,
    "block_sizes": [1, 1],
}  # fmt: skip
LENGTHS = torch.tensor([9, 5])


def saved(folder: Path, family: str, ending: str, **more: object) -> torch.nn.Module:
    """A random model of a family and class, with random biases, written by `transformers`."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family], **more)
    theirs = getattr(transformers, f"{family}{ending}")(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(folder)
    return theirs.eval()


def read(family: str) -> dict[str, torch.Tensor]:
    """Two texts of different lengths; segment ids where the family has some."""
    ids = torch.randint(5, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < LENGTHS[:, None]).long()
    segments = {"token_type_ids": (torch.arange(9) > 3).long().expand(2, 9)}
    has_segments = family == "RoFormer"
    return {"input_ids": ids, "attention_mask": mask, **(segments if has_segments else {})}


@pytest.mark.parametrize("family", ["Deberta", "XLM", "RoFormer", "MPNet", "Mra"])
@torch.no_grad()
def test_logits_and_states_are_the_librarys(tmp_path: Path, family: str) -> None:
    ending = "WithLMHeadModel" if family == "XLM" else "ForMaskedLM"
    theirs = saved(tmp_path, family, ending)
    ours, inputs = from_pretrained(tmp_path), read(family)
    assert ours.config.kind == "transformers"
    segments = inputs.get("token_type_ids")
    wanted = theirs(**inputs, output_hidden_states=True)
    found = ours(inputs["input_ids"], segments, LENGTHS, output_hidden_states=True)
    assert wanted.logits.std() > 0.1
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=0, atol=1e-5)
    assert len(found.hidden_states) == 4
    for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(one[real], other[real], rtol=0, atol=1e-5)
    positions = torch.tensor([2, 11])
    at_masked = ours(inputs["input_ids"], segments, LENGTHS, positions).logits
    torch.testing.assert_close(at_masked, wanted.logits.flatten(0, 1)[positions])
    features = ours.features(inputs["input_ids"], segments, LENGTHS, positions, Capture((1, 3)))
    assert [*features.hidden_states] == [1, 3]
    encoded = ours.encode(inputs["input_ids"], segments, LENGTHS, rows=positions)
    last = wanted.hidden_states[-1].flatten(0, 1)[positions]
    torch.testing.assert_close(encoded.last_hidden_state, last)


def test_xlnet_reads_sequences_of_any_length() -> None:
    config = transformers.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=24)
    assert config.max_position_embeddings == -1
    assert longest_sequence(transformers.XLNetModel(config)) is None


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression", "tagging"])
@pytest.mark.parametrize("family", ["RoFormer", "Deberta", "MPNet"])
@torch.no_grad()
def test_heads_of_tasks_are_the_librarys(tmp_path: Path, family: str, kind: str) -> None:
    ending = "ForTokenClassification" if kind == "tagging" else "ForSequenceClassification"
    labels = {"num_labels": 1} if kind == "regression" else {"id2label": dict(enumerate("xyz"))}
    problem = {"multi_label": "multi_label_classification"}.get(kind)
    theirs = saved(tmp_path, family, ending, problem_type=problem, **labels)
    ours, inputs = from_pretrained(tmp_path), read(family)
    ((name, head),) = ours.config.task_heads.items()
    assert (name, head.kind) == (kind, kind)
    assert head.labels == ([] if kind == "regression" else ["x", "y", "z"])
    found = ours(inputs["input_ids"], inputs.get("token_type_ids"), LENGTHS)
    assert found.logits is None
    wanted = theirs(**inputs).logits
    real = inputs["attention_mask"].bool() if kind == "tagging" else slice(None)
    torch.testing.assert_close(found.heads[kind][real], wanted[real], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_family_that_tandem_knows_is_read_by_either_code(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    ids = torch.arange(5, 14)[None]
    by_kind = {kind: from_pretrained(tmp_path, kind) for kind in ("", "transformers")}
    assert [one.config.kind for one in by_kind.values()] == ["encoder", "transformers"]
    ours, theirs = (one(ids).logits for one in by_kind.values())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_model_without_a_head_has_states_only(tmp_path: Path) -> None:
    saved(tmp_path, "MPNet", "Model")
    ours = from_pretrained(tmp_path)
    assert (ours.config.mlm_head, ours.config.task_heads) == (False, {})
    assert ours.config.longest_sequence == 38  # its positions begin behind the padding's number
    assert ours(torch.arange(5, 9)[None], output_hidden_states=True).hidden_states[3].shape[1] == 4


def test_a_projection_of_its_own_is_counted_at_masked_tokens_alone(tmp_path: Path) -> None:
    found = []
    for tied in (True, False):
        config = transformers.BertConfig(**SIZES, tie_word_embeddings=tied)
        transformers.BertForMaskedLM(config).save_pretrained(tmp_path / str(tied))
        model = from_pretrained(tmp_path / str(tied), "transformers")
        found.append(model.flops_per_token(8, 0.15))
    assert found[0] == found[1]


def test_its_size_is_counted(tmp_path: Path) -> None:
    saved(tmp_path, "RoFormer", "ForMaskedLM")
    config = read_config(tmp_path)
    size = describe(config, 8)
    theirs = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path)
    assert size.parameters + size.head_parameters == theirs.num_parameters()
    with FlopCounterMode(display=False) as counted:
        theirs(torch.arange(8)[None])
    projections = 2 * 8 * VOCABULARY * 16
    wanted = counted.get_total_flops() - projections * (1 - 0.15)
    assert size.flops_per_token_forward * 8 == pytest.approx(wanted, rel=0.1)
    assert "RoFormerForMaskedLM of 3 layers of width 32" in config.description
    assert build(config, seed=0).training


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "t5"}, "is no encoder of text"),
        ({"model_type": "nonsense"}, "is not one of .* frozen teacher, pip install"),
        ({"num_hidden_layers": "many"}, "transformers cannot read it"),
        ({"num_hidden_layers": 5}, "the weights have no roformer.encoder.layer.3"),
    ],
)
def test_other_folders_are_refused_in_one_line(tmp_path: Path, change: dict, why: str) -> None:
    saved(tmp_path, "RoFormer", "ForMaskedLM")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=why) as caught:
        from_pretrained(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_a_model_that_shortens_its_sequences_gives_predictions_and_last_states(tmp_path) -> None:
    config = transformers.FunnelConfig(**FUNNEL, initializer_std=0.2)
    theirs = transformers.FunnelForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours, inputs = from_pretrained(tmp_path), read("Funnel")
    assert ours.config.layers == 0
    wanted = theirs(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    found = ours(inputs["input_ids"], None, LENGTHS).logits
    torch.testing.assert_close(found[real], wanted.logits[real], rtol=0, atol=1e-5)
    encoded = ours.encode(inputs["input_ids"], None, LENGTHS).last_hidden_state
    torch.testing.assert_close(encoded[real], wanted.hidden_states[-1][real], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_whose_last_states_are_not_at_tokens_has_its_heads_alone(tmp_path: Path) -> None:
    config = transformers.FunnelConfig(**FUNNEL, initializer_std=0.2)
    theirs = transformers.FunnelForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "classifier")
    ours, inputs = from_pretrained(tmp_path / "classifier"), read("Funnel")
    assert (ours.config.token_states, ours.config.layers) == (False, 0)
    found = ours(inputs["input_ids"], None, LENGTHS)
    torch.testing.assert_close(found.heads["classification"], theirs(**inputs).logits)
    with pytest.raises(ModelError, match="Classification gives no state for every token"):
        ours.encode(inputs["input_ids"])
    with pytest.raises(ValueError, match="task_heads: a vector needs a state for every token"):
        ours.config.with_task_head("vector", TaskHeadConfig(kind=VECTOR, pooling="mean"))
    transformers.FunnelBaseModel(config).save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="states of 32 numbers per token"):
        from_pretrained(tmp_path / "base")


def test_a_config_without_a_padding_token_is_named(tmp_path: Path) -> None:
    """ESM counts positions from the padding token's number on."""
    transformers.EsmForMaskedLM(transformers.EsmConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"pad_token_id: config\.json has none; set it") as caught:
        from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["Esm", "MobileBert"])
@torch.no_grad()
def test_the_library_computes_logits_that_are_not_one_product(tmp_path, family: str) -> None:
    """The bias of ESM stands outside its projection; MobileBERT joins the projection from two."""
    theirs = saved(tmp_path, family, "ForMaskedLM")
    ours, inputs = from_pretrained(tmp_path, "transformers"), read(family)
    assert not ours.config.factored_logits
    wanted, positions = theirs(**inputs).logits, torch.tensor([2, 11])
    real = inputs["attention_mask"].bool()
    found = ours(inputs["input_ids"], None, LENGTHS).logits
    torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=1e-5)
    features = ours.features(inputs["input_ids"], None, LENGTHS, positions, Capture((1, 3)))
    assert [*features.hidden_states] == [1, 3]
    outputs = detach(features, OutputProjection(*ours.output_projection()))
    probabilities, _ = outputs.distributions[MASKED].at(slice(0, 2), 2.0)
    at_masked = (wanted.flatten(0, 1)[positions] / 2.0).softmax(-1)
    torch.testing.assert_close(probabilities, at_masked, rtol=0, atol=1e-6)


def test_without_the_library_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch) -> None:
    saved(tmp_path, "RoFormer", "ForMaskedLM")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'tandem-distill\[hf\]'"):
        from_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"needs transformers: pip install 'tandem-distill\[hf\]'"):
        from_pretrained(tmp_path, "transformers")
