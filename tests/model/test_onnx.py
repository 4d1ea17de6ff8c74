"""ONNX files against the model, in onnxruntime."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import model
from data_pipeline.tokenization.training import train
from model import Model, TaskHeadConfig, with_task_head
from model.onnx_export import export_onnx, quantize_onnx, require_onnx, seconds_per_text
from tests.model.test_bilstm import with_mood
from tests.model.test_mechanics import FAMILIES, built
from tests.model.test_seq2seq import seq2seq

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in FAMILIES), ("modernbert", {"local_window": 64})],
)
def test_the_file_gives_the_models_logits_at_other_shapes(
    family: str, changes: dict, tmp_path: Path
) -> None:
    differ_by_rounding_only(built(family, **changes).eval(), tmp_path / "model.onnx")


class Logits(torch.nn.Module):
    """A model whose output `torch.export` knows."""

    def __init__(self, given: Model) -> None:
        super().__init__()
        self.given = given

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.given(tokens).logits


def test_an_exported_graph_has_a_window_that_hides_nothing_of_the_example() -> None:
    """ModernBERT's is of 128 tokens, and the example from which the graph is made is short."""
    given = Logits(built("modernbert", local_window=16).eval())
    shapes = ({1: torch.export.Dim("length", min=2, max=64)},)
    graph = torch.export.export(
        given, (torch.ones(2, 7, dtype=torch.int64),), dynamic_shapes=shapes
    )
    tokens = torch.randint(1, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(graph.module()(tokens), given(tokens))


@pytest.mark.slow
def test_a_fine_tuned_model_has_the_outputs_of_its_heads(tmp_path: Path) -> None:
    config = built("bert").config
    for name, kind in (("best", "choice"), ("answer", "span")):
        config = with_task_head(config, name, TaskHeadConfig(kind))
    outputs = differ_by_rounding_only(model.build(config, seed=3).eval(), tmp_path / "model.onnx")
    assert outputs == {"logits", "best", "answer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {"segment_types": 1}),  # as RoBERTa
        *((family, {}) for family in FAMILIES),
    ],
)
def test_the_exported_tokenizer_gives_what_the_graph_reads(
    family: str, changes: dict, text: Path, tmp_path: Path
) -> None:
    """All of it and nothing else, though the tokenizer's own folder names segment ids."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    train([str(text)], "wordpiece", 300, str(tmp_path / "tokenizer"))
    theirs = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    assert "token_type_ids" in theirs["model_input_names"]
    given = built(family, vocab_size=320, **changes).eval()
    model.save_pretrained(given, tmp_path / "export", tokenizer=tmp_path / "tokenizer")
    export_onnx(given, tmp_path / "export" / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "export" / "model.onnx"))
    read = AutoTokenizer.from_pretrained(tmp_path / "export")
    names = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert {*names["model_input_names"]} == {one.name for one in session.get_inputs()}
    pairs = (["a file is read", "who?"], ["and then it is written", "no"])
    (logits,) = session.run(None, dict(read(*pairs, padding=True, return_tensors="np")))
    batch = read(*pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours = given(batch["input_ids"], batch.get("token_type_ids"), batch["attention_mask"])
    np.testing.assert_allclose(logits, ours.logits.numpy(), rtol=1e-4, atol=1e-4)


def differ_by_rounding_only(given: Model, file: Path) -> set[str]:
    """Export it, and compare the file's outputs with it at other shapes; returns their names."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    export_onnx(given, file)
    session = runtime.InferenceSession(str(file))
    generator = torch.Generator().manual_seed(0)
    for rows, length in ((1, 3), (3, 40), (2, 230)):
        tokens = torch.randint(1, 50, (rows, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[-1, length // 2 :] = 0
        segments = (torch.arange(length) > length // 3).long().expand(rows, length)
        inputs = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": segments}
        wanted = {one.name for one in session.get_inputs()}
        fed = {name: value.numpy() for name, value in inputs.items() if name in wanted}
        with torch.no_grad():
            output = given(tokens, segments if len(wanted) == 3 else None, mask)
        expected = {"logits": output.logits, **output.heads}
        for name, value in expected.items():
            (got,) = session.run([name], fed)
            assert np.abs(got - value.numpy()).max() <= 1e-5 * np.abs(value.numpy()).max()
    return {one.name for one in session.get_outputs()}


def test_without_the_packages_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(model.ModelError, match="pip install onnx onnxscript"):
        export_onnx(built("bert"), tmp_path / "model.onnx")


@pytest.mark.parametrize("make", [seq2seq, with_mood], ids=["seq2seq", "bilstm"])
def test_a_model_of_another_kind_is_refused_in_one_line(make, tmp_path: Path) -> None:
    """One generates text; the graph of the other would be of two texts of 7 tokens."""
    pytest.importorskip("onnxscript")
    with pytest.raises(model.ModelError, match=r"^\S+model\.onnx: ONNX export is for encoders"):
        export_onnx(make(), tmp_path / "model.onnx")


def test_8_bits_keep_a_matrix_that_an_embedding_and_a_projection_share(tmp_path: Path) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    make, kinds = onnx.helper, onnx.TensorProto
    words = np.random.default_rng(0).standard_normal((7, 4), np.float32)
    nodes = [
        make.make_node("Gather", ["words", "ids"], ["states"], "embedding"),
        make.make_node("Gemm", ["states", "words"], ["logits"], "projection", transB=1),
    ]
    graph = make.make_graph(
        nodes,
        "tied",
        [make.make_tensor_value_info("ids", kinds.INT64, ["n"])],
        [make.make_tensor_value_info("logits", kinds.FLOAT, ["n", 7])],
        [onnx.numpy_helper.from_array(words, "words")],
    )
    tied = make.make_model(graph, ir_version=10, opset_imports=[make.make_opsetid("", 20)])
    onnx.save(tied, tmp_path / "model.onnx")
    quantize_onnx(tmp_path / "model.onnx", tmp_path / "model_int8.onnx")
    session = runtime.InferenceSession(tmp_path / "model_int8.onnx")
    (logits,) = session.run(None, {"ids": np.arange(7)})
    np.testing.assert_allclose(logits, words @ words.T, atol=0.1)


def test_8_bits_need_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(model.ModelError, match="weights of 8 bits need `pip install onnxruntime`"):
        require_onnx(built("bert").config, tmp_path / "model.onnx", int8=True)
    assert seconds_per_text(tmp_path / "model.onnx", 8) is None
