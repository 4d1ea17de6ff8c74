"""Model folders: wrong and hostile ones, Tandem's own format, tokenizer files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertTokenizerFast,
    CamembertForMaskedLM,
    MobileBertConfig,
    MobileBertForNextSentencePrediction,
    MobileBertForPreTraining,
    XLMRobertaForMaskedLM,
)

import configs
import model
from model.errors import ModelError
from model.hugging_face.mobilebert import MOBILEBERT
from model.hugging_face.weights import read_tensors, write_tensors

torch.set_num_threads(1)
SMALL = model.EncoderConfig(vocab_size=50, hidden_size=16, layers=2, heads=2, ffn_size=24)


def save(folder: Path) -> Path:
    model.save_pretrained(model.build(SMALL, seed=0), folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    change(state)
    safetensors.torch.save_file(state, path)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def to_bin(folder: Path, content: object) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


class Hostile:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.witness}",)


BIAS = "cls.predictions.bias"
WORD = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"
MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: not found"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not readable"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "expected a mapping"),
    "binary": (lambda f: (f / "config.json").write_bytes(b"\xff\x00"), "not readable"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither"),
    "other model": (lambda f: edit_config(f, model_type="none"), "model_type: 'none' is not one"),
    "a name": (
        lambda f: edit_config(f, hidden_size="wide"),
        "hidden_size: must be a whole number, not 'wide'",
    ),
    "no heads": (lambda f: edit_config(f, num_attention_heads=0), "heads: must be 1 to"),
    "uneven heads": (lambda f: edit_config(f, num_attention_heads=3), "heads: 3 does not divide"),
    "activation": (
        lambda f: edit_config(f, hidden_act="quick_gelu"),
        "swish; a frozen teacher may have it with model: {kind: transformers}",
    ),
    "activation's key": (lambda f: edit_config(f, hidden_act="maxout"), "hidden_act: 'maxout'"),
    "relative": (
        lambda f: edit_config(f, position_embedding_type="relative_key"),
        "position_embedding_type: 'relative_key' is not supported",
    ),
    "several numbers": (
        lambda f: edit_config(
            f, architectures=["BertForSequenceClassification"], problem_type="regression"
        ),
        "problem_type: regression of 2 numbers is not supported",
    ),
    "untied": (lambda f: edit_config(f, tie_word_embeddings=False), "tie_word_embeddings"),
    "decoder": (lambda f: edit_config(f, is_decoder=True), "is_decoder"),
    "wrong width": (lambda f: edit_config(f, vocab_size=51), "has shape (50, 16)"),
    "fewer layers": (
        lambda f: edit_config(f, num_hidden_layers=1),
        "layers: the configuration says 1, but the weights have more: ",
    ),
    "endless": (lambda f: edit_config(f, num_hidden_layers=10**9), "1000000000 layers"),
    "endless, shared": (
        lambda f: edit_config(f, model_type="albert", num_hidden_layers=10**9),
        "1000000000 layers",
    ),
    "endless networks": (
        lambda f: edit_config(f, model_type="mobilebert", num_feedforward_networks=10**9),
        "of 1000000000 feed-forward networks",
    ),
    "beyond numbers": (lambda f: edit_config(f, hidden_size=2 * 10**30), "does not fit into 64"),
    "deep": (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json: not readable"),
    "layer types": (
        lambda f: edit_config(f, model_type="modernbert", rope_parameters={"full_attention": 3}),
        "config.json: ",
    ),
    "more layers": (lambda f: edit_config(f, num_hidden_layers=3), "the weights have no"),
    "no head": (
        lambda f: edit_weights(f, lambda state: state.pop(BIAS)),
        f"the weights have no {BIAS}; import a whole checkpoint",
    ),
    "another projection": (
        lambda f: edit_weights(f, lambda s: s.update({DECODER: s[WORD] + 1.0})),
        f"tie_word_embeddings: {DECODER} differs from what it is tied to",
    ),
    "quantised": (
        lambda f: edit_weights(f, lambda s: s.update({WORD: s[WORD].to(torch.int8)})),
        "import the weights unquantised",
    ),
    "not a number": (
        lambda f: edit_weights(f, lambda s: s.update({WORD: s[WORD] * float("nan")})),
        "holds NaN or infinity",
    ),
    "cut off": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-100]
        ),
        "model.safetensors: not a readable tensor file",
    ),
    "noise": (
        lambda f: (f / "model.safetensors").write_bytes(random.Random(0).randbytes(1000)),
        "model.safetensors: not a readable tensor file",
    ),
    "empty": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "model.safetensors: not a readable tensor file",
    ),
    "not tensors": (lambda f: to_bin(f, {"a": "b"}), "expected a mapping from names to tensors"),
    "no names": (lambda f: to_bin(f, {1: torch.ones(2)}), "expected a mapping from names"),
    "without values": (
        lambda f: to_bin(f, weights_of(f) | {WORD: torch.empty(50, 16, device="meta")}),
        "import the weights unquantised",
    ),
    "noise in bin": (
        lambda f: (
            to_bin(f, {}),
            (f / "pytorch_model.bin").write_bytes(random.Random(0).randbytes(1000)),
        ),
        "pytorch_model.bin: ",
    ),
    "a pickle that takes from an empty stack": (
        lambda f: (to_bin(f, {}), (f / "pytorch_model.bin").write_bytes(b"\x80\x02q\x00.")),
        "pytorch_model.bin: not a readable tensor file",
    ),
    "outside": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "../../etc/passwd"}})
            ),
        ),
        "points outside the folder",
    ),
    "numbered shards": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
        ),
        "points outside the folder",
    ),
    "of a plugin's kind": (
        lambda f: edit_config(f, model_type="tandem", kind="mine", width=3),
        "kind: must be one of encoder, transformers, bilstm, recurrent_seq2seq, seq2seq, or one "
        "that a plugin adds (plugins, --plugin), not 'mine'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_folder_gives_one_clear_line(mistake: str, tmp_path: Path) -> None:
    spoil, message = MISTAKES[mistake]
    spoil(save(tmp_path))
    with pytest.raises(model.ModelError) as raised:
        model.from_pretrained(tmp_path)
    assert message in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_refused_and_does_not_run(zipped: bool, tmp_path: Path) -> None:
    folder, witness = save(tmp_path), tmp_path / "ran"
    to_bin(folder, {"a": Hostile(witness)})
    if not zipped:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Hostile(witness)}))
    with pytest.raises(model.ModelError, match=r"pytorch_model\.bin: refused: it holds more than"):
        model.from_pretrained(folder)
    assert not witness.exists()


def test_a_bin_of_tensors_is_read(tmp_path: Path) -> None:
    expected = model.from_pretrained(save(tmp_path)).state_dict()
    to_bin(tmp_path, safetensors.torch.load_file(tmp_path / "model.safetensors"))
    read = model.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_a_sharded_checkpoint_with_tensorflow_norm_names_is_read(tmp_path: Path) -> None:
    expected = model.from_pretrained(save(tmp_path))
    BertForMaskedLM.from_pretrained(tmp_path).save_pretrained(
        tmp_path / "shards", max_shard_size="4KB"
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    sharded = model.from_pretrained(tmp_path / "shards")
    ids = torch.randint(0, 50, (2, 7))
    assert torch.equal(sharded(ids).logits, expected(ids).logits)

    def rename(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if "LayerNorm" in name]:
            old = name.replace("weight", "gamma").replace("bias", "beta")
            state[old] = state.pop(name)

    edit_weights(tmp_path, rename)
    assert torch.equal(model.from_pretrained(tmp_path)(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_bert_without_model_type_and_with_wrapped_weights_is_read(
    wrapped: bool, tmp_path: Path
) -> None:
    expected = model.from_pretrained(save(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    del written["model_type"], written["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    prefix = "module." if wrapped else ""
    state = {f"{prefix}{name}": tensor for name, tensor in weights_of(tmp_path).items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    ids = torch.randint(0, 50, (2, 7))
    assert torch.equal(model.from_pretrained(tmp_path)(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(
    "theirs", [BertForNextSentencePrediction, MobileBertForNextSentencePrediction]
)
def test_a_pair_head_alone_has_a_class(theirs: type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    narrow = {"intermediate_size": 24, "embedding_size": 8, "intra_bottleneck_size": 8}
    theirs(theirs.config_class(**sizes, **narrow)).save_pretrained(tmp_path / "theirs")
    ours = model.import_folder(tmp_path / "theirs", tmp_path / "ours")
    assert (ours.config.mlm_head, ours.config.pair_head) == (False, True)
    again, loading = theirs.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert again.config.architectures == [theirs.__name__]
    assert not any(loading.values())


@pytest.mark.parametrize("theirs", [XLMRobertaForMaskedLM, CamembertForMaskedLM])
def test_another_name_of_roberta_is_read(theirs: type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    other = theirs(theirs.config_class(**sizes, vocab_size=50, intermediate_size=24)).eval()
    other.save_pretrained(tmp_path)
    ids = torch.randint(5, 50, (2, 7))
    got = model.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(got, other(ids).logits, rtol=1e-4, atol=1e-5)


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    save(tmp_path)
    edit_weights(tmp_path, lambda s: s.update({n: t.bfloat16() for n, t in list(s.items())}))
    assert all(p.dtype == torch.float32 for p in model.from_pretrained(tmp_path).parameters())


INEXPRESSIBLE = {
    "shared feed-forward": {"sharing": "ffn", "embedding_projection": "sum", "embedding_size": 8},
    "shared, no projection": {"sharing": "all"},
    "pre-norm": {"norm_placement": "pre"},
    "first token": {"pooler": "first"},
    "rotary BERT": {"positions": "rotary"},
    "several feed-forwards": {"feed_forwards": 2},
    "RoBERTa without segments": {"positions": "learned_after_padding", "segment_types": 0},
    "ALBERT groups transformers rounds": {
        "sharing": "all", "layers": 18, "groups": 14, "embedding_projection": "sum",
        "embedding_size": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", INEXPRESSIBLE)
def test_what_transformers_cannot_express_says_so_and_is_saved_in_our_form(
    case: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "layers": 2, "heads": 2, "ffn_size": 24}
    config = model.EncoderConfig(**(sizes | INEXPRESSIBLE[case]))
    saved = model.build(config, seed=0).eval()
    reason = model.save_pretrained(saved, tmp_path)
    assert reason.startswith("transformers' ")
    assert "own form" in reason
    read = model.from_pretrained(tmp_path)
    assert read.config == config
    ids = torch.randint(0, 50, (2, 7))
    assert torch.equal(read(ids).logits, saved(ids).logits)


def test_ib_bert_equals_the_mobilebert_class_made_to_read_hidden_states(tmp_path: Path) -> None:
    """`transformers` has the flags for IB-BERT, but gives its query and key the wrong width."""
    torch.manual_seed(0)
    theirs = MobileBertForPreTraining(
        MobileBertConfig(
            vocab_size=50, num_hidden_layers=3, hidden_size=24, num_attention_heads=4,
            intermediate_size=60, hidden_act="gelu", embedding_size=10, intra_bottleneck_size=40,
            key_query_shared_bottleneck=False, num_feedforward_networks=1,
            normalization_type="layer_norm", attention_probs_dropout_prob=0.0,
        )
    ).eval()  # fmt: skip
    for layer in theirs.mobilebert.encoder.layer:
        layer.attention.self.query = torch.nn.Linear(24, 40)
        layer.attention.self.key = torch.nn.Linear(24, 40)
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    sizes = [
        "vocab_size=50", "layers=3", "hidden_size=24", "heads=4", "ffn_size=60",
        "embedding_size=10", "bottleneck_size=40", "pair_head=true", "fixed_norm_eps=1e-5",
    ]  # fmt: skip
    config = configs.load("ib_bert_large", model.EncoderConfig, "model", sizes)
    ours = model.build(config, seed=0).eval()
    names = MOBILEBERT.their_names(config, ours.state_dict())
    state = theirs.state_dict()
    ours.load_state_dict({mine: state[name] for mine, name in names.items()})

    ids, mask = torch.randint(1, 50, (2, 13)), torch.ones(2, 13, dtype=torch.long)
    mask[1, 8:] = 0
    expected = theirs(ids, attention_mask=mask, output_hidden_states=True)
    got = ours(ids, None, mask, output_hidden_states=True)
    torch.testing.assert_close(got.logits, expected.prediction_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.heads.get("pairs"), expected.seq_relationship_logits)
    assert "own form" in model.save_pretrained(ours, tmp_path)


def test_tokenizer_files_travel_with_the_model(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "model", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    left = dict.fromkeys(("padding_side", "truncation_side"), "left") | {"model_max_length": 9}
    BertTokenizerFast(str(tmp_path / "vocab.txt"), **left).save_pretrained(tmp_path / "tokenizer")
    model.save_pretrained(
        model.build(SMALL, 0),
        tmp_path / "out",
        tokenizer=tmp_path / "tokenizer",
        card=lambda in_transformers: f"# Card {in_transformers}\n",
    )
    expected = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("a models").input_ids == expected("a models").input_ids
    assert (expected.padding_side, exported.padding_side) == ("left", "right")
    assert (expected.truncation_side, exported.truncation_side) == ("left", "right")
    assert exported.model_max_length == model.build(SMALL, 0).config.longest_sequence
    assert (tmp_path / "out" / "README.md").read_text() == "# Card True\n"
    with pytest.raises(model.ModelError, match="holds no tokenizer files"):
        model.save_pretrained(model.build(SMALL, 0), tmp_path / "out", tokenizer=tmp_path / "no")


def test_an_imported_model_reads_as_much_of_a_text_as_in_transformers(tmp_path: Path) -> None:
    theirs, ours = save(tmp_path / "theirs"), tmp_path / "ours"
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na")
    BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=9).save_pretrained(theirs)
    config = model.import_folder(theirs, ours).config
    for folder in (theirs, ours):
        assert AutoTokenizer.from_pretrained(folder).model_max_length == 9
        assert model.longest_text(folder, config) == 9
    (ours / "sentence_bert_config.json").write_text('{"max_seq_length": 11}')
    assert model.longest_text(ours, config) == 11  # as sentence-transformers has it


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"") for name in ("tokenizer.json", "tokenizer_config.json")),
        ("tokenizer_config.json", b"{}"),  # and no vocabulary
        *(("tokenizer.json", content) for content in (b"[]", b"{}", b"[" * 20_000, b"\xff", None)),
        *(("vocab.txt", content) for content in (b"\xff", None)),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_its_file(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    model.save_pretrained(model.build(SMALL, 0), source := tmp_path / "source")
    if content is None:
        (source / name).mkdir()
    else:
        (source / name).write_bytes(content)
    with pytest.raises(model.ModelError) as refused:
        model.import_folder(source, tmp_path / "out")
    assert str(refused.value).startswith(f"{source / name}: ")
    assert not (tmp_path / "out").exists()


def fill_at_the_weights(*_: object, **__: object) -> None:
    raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")


def fill_at_the_yaml(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "filled"),
    [
        ("safetensors.torch.save_file", fill_at_the_weights),
        ("model.hugging_face.folder.write_config", fill_at_the_yaml),
    ],
)
def test_a_full_disk_leaves_no_part_of_a_model(
    place: str, filled: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save(tmp_path / "source"), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(place, filled)
        with pytest.raises(model.ModelError, match=r"out: cannot be written \(.*No space left"):
            model.import_folder(source, out)
    assert not [*out.iterdir()]
    with monkeypatch.context() as patched:
        patched.setattr(place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.import_folder(source, out)
    assert not [*out.iterdir()]
    model.import_folder(source, out)


def test_what_is_written_follows_the_umask_and_says_who_may_not_read_it():
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        before = os.umask(0o027)
        try:
            write_tensors(path, {"a": torch.zeros(2)})
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o640
        if os.geteuid() == 0:
            Path(name).chmod(0o755)
            path.chmod(0o600)
            os.seteuid(65534)
            try:
                with pytest.raises(ModelError, match=r"model.safetensors: Permission denied$"):
                    read_tensors(path)
            finally:
                os.seteuid(0)


def test_a_name_that_is_not_ascii_is_written_in_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "ascii")
    model.write_config(SMALL, tmp_path, "mod\u00e8le")
    assert "mod\u00e8le" in (tmp_path / "model.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["corpus.json", "manifest.json", "config.yaml"])
def test_a_model_is_not_written_into_a_corpus_checkpoint_or_run(tmp_path: Path, name: str) -> None:
    source, out = save(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / name).touch()
    with pytest.raises(ModelError, match=rf"{name}: a model does not go beside .* another --out"):
        model.import_folder(source, out)
    assert [path.name for path in out.iterdir()] == [name]


def test_a_second_bias_is_left_out_with_a_warning(tmp_path: Path, caplog) -> None:
    folder, second = save(tmp_path), "cls.predictions.decoder.bias"
    edit_weights(folder, lambda state: state.update({second: state[BIAS].clone()}))
    before = model.from_pretrained(folder).state_dict()
    assert not caplog.messages
    edit_weights(folder, lambda state: state.update({second: state[BIAS] + 1.0}))
    after = model.from_pretrained(folder).state_dict()
    assert caplog.messages == [
        f"{second} differs from the bias that it is tied to, and is not read"
    ]
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
