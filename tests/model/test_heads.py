"""Task heads: inputs, computation, and their import from and export to `transformers`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel

import model
from configs import ConfigError, typed
from model import Capture, EncoderConfig, TaskHeadConfig, with_task_head
from model.heads import mean_over_tokens
from model.hugging_face.task_heads import ENDINGS, label_order

FINE_TUNED = [kind for kind in ENDINGS if kind != "detection"]
LABELS = ["negative", "neutral", "positive"]
SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip
DISTILBERT_SIZES = {
    "vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
    "max_position_embeddings": 16,
}  # fmt: skip
NARROW = {"embedding_size": 8}
FAMILIES = {
    "Bert": SIZES,
    "Roberta": SIZES | {"pad_token_id": 0, "type_vocab_size": 1},
    "DistilBert": DISTILBERT_SIZES,
    "Albert": SIZES | NARROW,
    "Electra": SIZES | NARROW,
    "MobileBert": SIZES | NARROW | {"intra_bottleneck_size": 12},
    "NomicBert": SIZES,
    "DebertaV2": SIZES | {
        "relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "position_buckets": 4,
    },
    "ModernBert": SIZES | {
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2, "local_attention": 4,
    },
    "EuroBert": SIZES | {
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 4,
    },
}  # fmt: skip


def is_exchanged(family: str, kind: str) -> bool:
    """Whether `transformers` has a class for this head, and its form is known here."""
    is_known = family != "EuroBert" or kind == "tagging"
    return is_known and hasattr(transformers, family + ENDINGS[kind])


OURS = EncoderConfig(
    vocab_size=50, hidden_size=16, layers=2, heads=2, ffn_size=24, max_positions=16, mlm_head=False
)
IDS = torch.tensor([[2, 7, 9, 3], [2, 8, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
REAL = MASK.bool()


def their_config(family: str, kind: str, **more: Any) -> Any:
    if kind == "multi_label":
        more["problem_type"] = "multi_label_classification"
    count = {"regression": 1, "choice": 1, "span": 2}.get(kind)
    labels = LABELS if count is None else [f"LABEL_{number}" for number in range(count)]
    return getattr(transformers, f"{family}Config")(
        **(FAMILIES[family] | more),
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )


def their_output(theirs: Any, kind: str) -> Tensor:
    """The output of `transformers` in our shape: [B, outputs] or [B, L, outputs]."""
    if kind == "choice":  # rows are the choices of one question
        return theirs(IDS[None], attention_mask=MASK[None]).logits.T
    found = theirs(IDS, attention_mask=MASK)
    if kind == "span":
        return torch.stack([found.start_logits, found.end_logits], dim=-1)
    return found.logits


def compare(got: Tensor, expected: Tensor) -> None:
    """Assert equality at every token that is not padding."""
    if got.dim() == 3:
        got, expected = got[REAL], expected[REAL]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        # Regression and several labels have the class of `classification`.
        pytest.param(
            *(family, kind),
            marks=[pytest.mark.slow] * (family != "Bert" and kind in ("regression", "multi_label")),
        )
        for family in FAMILIES
        for kind in FINE_TUNED
        if is_exchanged(family, kind)
    ],
)
def test_a_head_goes_to_transformers_and_back(tmp_path: Path, family: str, kind: str) -> None:
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}{ENDINGS[kind]}")(their_config(family, kind)).eval()
    with torch.no_grad():  # differences must show
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = model.from_pretrained(tmp_path / "theirs")
    ((name, head),) = ours.config.task_heads.items()
    assert (name, head.kind) == (kind, kind)
    assert head.labels == ([] if kind in ("regression", "choice", "span") else LABELS)
    assert not ours.config.mlm_head
    got = ours(IDS, None, MASK)
    assert got.logits is None
    compare(got.heads[kind], their_output(theirs, kind))

    assert model.save_pretrained(ours, tmp_path / "ours") == ""
    auto = getattr(transformers, f"AutoModel{ENDINGS[kind]}")
    again = auto.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    assert again.config.id2label == theirs.config.id2label
    if kind == "multi_label":  # by which `transformers` chooses the sigmoid
        assert again.config.problem_type == theirs.config.problem_type
    compare(got.heads[kind], their_output(again, kind))
    assert model.from_pretrained(tmp_path / "ours").config == ours.config


@pytest.mark.parametrize("width", [8, SIZES["hidden_size"]])
def test_a_discriminator_goes_to_transformers_and_back(tmp_path: Path, width: int) -> None:
    torch.manual_seed(0)
    config = transformers.ElectraConfig(**SIZES, embedding_size=width)
    theirs = transformers.ElectraForPreTraining(config).eval()
    with torch.no_grad():  # differences must show
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = model.from_pretrained(tmp_path / "theirs")
    expected = theirs(IDS, attention_mask=MASK).logits[..., None]
    compare(ours(IDS, None, MASK).heads["detection"], expected)
    assert model.save_pretrained(ours, tmp_path / "ours") == ""
    again = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    torch.testing.assert_close(again(IDS, attention_mask=MASK).logits[..., None], expected)
    assert model.from_pretrained(tmp_path / "ours").config == ours.config


@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "DebertaV2", "ModernBert"])
def test_a_discriminator_of_another_family_is_written_beside_its_encoder(
    tmp_path: Path, family: str
) -> None:
    """`transformers` reads the encoder, and Tandem also the head."""
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    getattr(transformers, f"{family}Model")(config).save_pretrained(tmp_path / "theirs")
    bare = model.read_config(tmp_path / "theirs")
    head = TaskHeadConfig("detection", transform="gelu", dropout=0.0)
    ours = model.build(dataclasses.replace(bare, task_heads={"rtd": head}), seed=0).eval()
    assert model.save_pretrained(ours, tmp_path / "ours") == ""
    theirs, told = AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not told["missing_keys"]
    expected = ours(IDS, None, MASK, output_hidden_states=True)
    states = theirs.eval()(IDS, attention_mask=MASK).last_hidden_state
    compare(states, expected.hidden_states[-1])
    again = model.from_pretrained(tmp_path / "ours")
    assert again.config == ours.config
    compare(again(IDS, None, MASK).heads["rtd"], expected.heads["rtd"])


def test_a_head_without_labels_does_not_fit_one_with_labels() -> None:
    """A discriminator is fine-tuned on a task with labels."""
    detection = TaskHeadConfig("detection", transform="gelu")
    assert label_order(detection, TaskHeadConfig(labels=LABELS, pooling="first")) is None


def test_a_discriminator_of_another_activation_is_refused(tmp_path: Path) -> None:
    config = transformers.ElectraConfig(**SIZES, hidden_act="relu")
    transformers.ElectraForPreTraining(config).save_pretrained(tmp_path)
    with pytest.raises(model.ModelError, match="hidden_act: 'relu' is not supported"):
        model.from_pretrained(tmp_path)


def test_the_mean_over_tokens_goes_to_transformers_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = their_config("ModernBert", "classification", classifier_pooling="mean")
    theirs = transformers.ModernBertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = model.from_pretrained(tmp_path / "theirs")
    assert ours.config.task_heads["classification"].pooling == "mean"
    expected = theirs(IDS, attention_mask=MASK).logits
    compare(ours(IDS, None, MASK).heads["classification"], expected)
    lengths = MASK.sum(dim=1)  # the other form of a mask
    compare(ours(IDS, None, lengths).heads["classification"], expected)
    assert model.save_pretrained(ours, tmp_path / "ours") == ""
    assert model.from_pretrained(tmp_path / "ours").config == ours.config


def test_the_mean_over_tokens_is_summed_in_float32() -> None:
    states = torch.full((1, 512, 2), 200.0, dtype=torch.float16)
    lengths = torch.tensor([509])  # whose sum overflows in float16
    assert torch.equal(mean_over_tokens(states, lengths), states[:, 0])
    exact = mean_over_tokens(states.bfloat16(), lengths)  # where 509 is no number
    assert torch.equal(exact, states[:, 0].bfloat16())


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


@pytest.mark.parametrize(
    ("changes", "heads", "reason"),
    [
        ({"mlm_head": True}, {"moods": {"labels": LABELS}}, "pre-training heads"),
        ({}, {"moods": {"labels": LABELS}, "answer": {"kind": "span"}}, "one task head"),
        ({}, {"moods": {"kind": "other", "labels": LABELS}}, "of kind other"),
        ({}, {"moods": {"labels": LABELS, "activation": "relu"}}, "activation before the output"),
        ({}, {"text": {"kind": "vector", "size": 5, "pooling": "mean"}}, "of kind vector"),
        ({}, {"ner": {"kind": "tagging", "labels": LABELS, "crf": True}}, "ner.crf"),
        ({}, {"ner": {"kind": "tagging", "labels": LABELS, "layers": [-2, -1]}}, "chosen layers"),
        ({}, {"moods": {"labels": LABELS, "layers": [-2, -1]}}, "chosen layers"),
    ],
)
def test_what_transformers_has_no_class_for_is_kept_in_our_own_form(
    tmp_path: Path, changes: dict[str, Any], heads: dict[str, Any], reason: str
) -> None:
    config = dataclasses.replace(OURS, **changes)
    for name, head in heads.items():
        config = with_task_head(config, name, TaskHeadConfig(**head))
    ours = model.build(config, seed=1).eval()
    assert reason in model.save_pretrained(ours, tmp_path)
    again = model.from_pretrained(tmp_path)
    assert again.config == config
    for name in heads:
        torch.testing.assert_close(again(IDS).heads[name], ours(IDS).heads[name])


def test_a_head_takes_the_form_that_transformers_has_for_the_architecture() -> None:
    head = TaskHeadConfig(labels=LABELS)
    bert = with_task_head(dataclasses.replace(OURS, pooler="none"), "moods", head)
    assert bert.pooler == "tanh"
    assert bert.task_heads["moods"].pooling == "pooler"
    distilbert = with_task_head(dataclasses.replace(OURS, segment_types=0), "moods", head)
    assert distilbert.pooler == "none"
    assert distilbert.task_heads["moods"].transform == "relu"
    span = with_task_head(OURS, "answer", TaskHeadConfig("span"))
    assert span.pooler == "none"
    assert with_task_head(span, "moods", head).pooler == "tanh"
    own = dataclasses.replace(head, pooling="mean", transform="none")
    assert with_task_head(OURS, "moods", own).task_heads["moods"] == own


def equipped(**head: Any) -> model.MaskedLanguageModel:
    config = with_task_head(OURS, "task", TaskHeadConfig(**head))
    return model.build(config, seed=2).eval()


def test_a_head_that_reads_the_first_token_needs_no_other_of_the_last_layer() -> None:
    ours = equipped(labels=LABELS)
    lengths = MASK.sum(dim=1)
    whole = ours(IDS, None, lengths)
    found = ours.features(IDS, None, lengths, capture=Capture(heads=("task",)))
    torch.testing.assert_close(found.heads["task"], whole.heads["task"])
    torch.testing.assert_close(found.pooled, whole.pooled)
    assert found.last_hidden_state is None
    everywhere = Capture(heads=("task",), last_hidden_state=True)
    found = ours.features(IDS, None, lengths, capture=everywhere)
    torch.testing.assert_close(found.heads["task"], whole.heads["task"], rtol=0, atol=0)
    assert ours.features(IDS).heads == {}


def test_an_activation_comes_before_the_output_layer() -> None:
    ours = equipped(labels=LABELS, activation="relu")
    found = ours(IDS, None, MASK)
    expected = ours.task_heads["task"].linear(found.pooled.relu())
    torch.testing.assert_close(found.heads["task"], expected)


def test_a_head_reads_chosen_layers_side_by_side() -> None:
    ours = equipped(kind="tagging", labels=LABELS, layers=[0, -2, -1])
    states = ours(IDS, None, MASK, output_hidden_states=True).hidden_states
    expected = ours.task_heads["task"].linear(torch.cat(states[-3:], dim=-1))
    found = ours.features(IDS, None, MASK, capture=Capture(heads=("task",)))
    torch.testing.assert_close(found.heads["task"], expected)


def test_a_vector_is_the_mean_of_the_tokens_with_length_one() -> None:
    ours = equipped(kind="vector", pooling="mean", normalise=True)
    states = ours(IDS, None, MASK, output_hidden_states=True).hidden_states[-1]
    means = torch.stack([row[real].mean(dim=0) for row, real in zip(states, REAL, strict=True)])
    expected = means / means.norm(dim=1, keepdim=True)
    torch.testing.assert_close(ours(IDS, None, MASK).heads["task"], expected)


def test_a_crf_hands_out_its_transitions_for_the_loss() -> None:
    ours = equipped(kind="tagging", labels=LABELS, crf=True)
    found = ours.features(IDS, None, MASK, capture=Capture(heads=("task",)))
    loss = -model.log_likelihood(found.heads["task"], found.transitions["task"], IDS % 3, REAL)
    loss.sum().backward()
    crf = ours.task_heads["task"].crf
    assert all((one.grad != 0).any() for one in crf.parameters())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"labels": ["a"]}, "labels: must name at least two labels"),
        ({"labels": ["a", "a"]}, "labels: must name at least two labels, each once"),
        ({"kind": "multi_label"}, "labels: must name at least one label"),
        ({"kind": "span", "labels": ["a", "b"]}, "labels: a head of kind span has none"),
        ({"labels": LABELS, "crf": True}, "crf: is for kind: tagging"),
        ({"kind": "vector", "activation": "relu"}, "activation: is for a head of one output layer"),
        ({"kind": "choice", "size": 3}, "size: is for kind: vector"),
        (
            {"kind": "span", "transform": "none", "layers": [3]},
            "layers: there is no hidden state 3",
        ),
        ({"kind": "choice", "transform": "none"}, "pooling: must be pooler, first or mean"),
    ],
)
def test_a_head_that_cannot_be_is_refused(head: dict[str, Any], message: str) -> None:
    tree = json.loads(json.dumps({"layers": 2, "task_heads": {"it": head}}))
    with pytest.raises(ConfigError, match=f"^task_heads.it.{message}"):
        typed.build(tree, EncoderConfig)


@pytest.mark.parametrize("name", ["pairs", "two words", "a.b", "training"])
def test_a_head_needs_a_name_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match="that name is taken, or not of letters"):
        with_task_head(OURS, name, TaskHeadConfig("span"))


def test_a_head_that_cannot_be_read_is_left_out_with_a_warning(tmp_path: Path, caplog) -> None:
    theirs = transformers.EuroBertForSequenceClassification(their_config("EuroBert", "regression"))
    theirs.save_pretrained(tmp_path)
    assert model.from_pretrained(tmp_path).config.task_heads == {}
    assert caplog.messages == [
        "EuroBertForSequenceClassification: its head has no counterpart here; "
        "the encoder alone is read"
    ]


def test_a_head_of_no_class_is_left_out_with_a_warning(tmp_path: Path, caplog) -> None:
    transformers.BertForSequenceClassification(BertConfig(**FAMILIES["Bert"])).save_pretrained(
        tmp_path
    )
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": None}))
    assert model.from_pretrained(tmp_path).config.task_heads == {}
    assert caplog.messages == [
        "classifier.weight is not read, since architectures in config.json names no class that "
        "has it"
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_labels_that_are_only_counted_are_read(tmp_path: Path, count: int) -> None:
    config = BertConfig(**FAMILIES["Bert"], num_labels=count)
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"num_labels": count}
    kept = {key: value for key, value in written.items() if key not in ("id2label", "label2id")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    (output,) = model.from_pretrained(tmp_path)(IDS, None, MASK).heads.values()
    compare(output, theirs(IDS, attention_mask=MASK).logits)


def test_labels_that_transformers_leaves_to_its_default_are_read(tmp_path: Path) -> None:
    theirs = transformers.BertForSequenceClassification(BertConfig(**FAMILIES["Bert"]))
    theirs.save_pretrained(tmp_path)
    assert "id2label" not in json.loads((tmp_path / "config.json").read_text())
    (head,) = model.from_pretrained(tmp_path).config.task_heads.values()
    assert head.labels == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("mood", "mood"),
        ("glue:sst2", "glue_sst2"),
        ("sst-2", "sst_2"),
        ("20news", "classification"),
        ("pairs", "classification"),
        ("", "classification"),
    ],
)
def test_a_head_has_its_tasks_name_where_it_can(task: str, name: str, tmp_path: Path) -> None:
    config = BertConfig(**FAMILIES["Bert"], finetuning_task=task)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    assert [*model.from_pretrained(tmp_path).config.task_heads] == [name]
