"""ONNX files against the model, in onnxruntime."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import model
from model import TaskHeadConfig, with_task_head
from model.onnx_export import export_onnx
from tests.model.test_mechanics import FAMILIES, built

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "family",
    [
        "bert",
        *[pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "bert"],
    ],
)
def test_the_file_gives_the_models_logits_at_other_shapes(family: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    given = built(family).eval()
    export_onnx(given, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    generator = torch.Generator().manual_seed(0)
    for rows, length in ((1, 3), (3, 40), (2, 230)):
        tokens = torch.randint(1, 50, (rows, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[-1, length // 2 :] = 0
        segments = (torch.arange(length) > length // 3).long().expand(rows, length)
        inputs = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": segments}
        wanted = {one.name for one in session.get_inputs()}
        fed = {name: value.numpy() for name, value in inputs.items() if name in wanted}
        (got,) = session.run(None, fed)
        with torch.no_grad():
            expected = given(tokens, segments if len(wanted) == 3 else None, mask).logits.numpy()
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_fine_tuned_model_has_the_outputs_of_its_heads(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    config = dataclasses.replace(built("bert").config, mlm_head=False)
    for name, kind in (("best", "choice"), ("answer", "span")):
        config = with_task_head(config, name, TaskHeadConfig(kind))
    given = model.build(config, seed=3).eval()
    export_onnx(given, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    tokens = np.arange(1, 13).reshape(2, 6)
    mask = np.array([[1] * 6, [1] * 4 + [0] * 2])
    fed = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": 0 * mask}
    with torch.no_grad():
        expected = given(torch.tensor(tokens), None, torch.tensor(mask)).heads
    for name, got in zip(expected, session.run([*expected], fed), strict=True):
        assert np.abs(got - expected[name].numpy()).max() < 1e-5


def test_without_the_packages_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(model.ModelError, match="pip install onnx onnxscript"):
        export_onnx(built("bert"), tmp_path / "model.onnx")
