"""Exporting a model as an ONNX file, for runtimes without Python."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from model.config import ModelError
from model.masked_language_model import MaskedLanguageModel


class _LogitsModel(nn.Module):
    """The model with the input names of `transformers` and one output."""

    def __init__(self, model: MaskedLanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor | None:
        return self.model(input_ids, token_type_ids, attention_mask).logits


def _is_large(model: MaskedLanguageModel) -> bool:
    """Whether the weights need a file of their own: protobuf is limited to 2 GiB."""
    return 4 * sum(parameter.numel() for parameter in model.parameters()) > 2**30


def export_onnx(model: MaskedLanguageModel, path: str | Path) -> None:
    """Write masked-LM logits [batch, length, V] of any batch size and length as ONNX.

    Inputs are int64 [batch, length]: input_ids, attention_mask (1 at real tokens) and, where the
    model has more than one segment type, token_type_ids. Raises ModelError when the packages
    ``onnx`` and ``onnxscript`` are not installed.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{path}: ONNX export needs `pip install onnx onnxscript`") from error
    if not model.config.mlm_head:
        raise ModelError(f"{path}: ONNX is for masked-LM logits; this model has no such head")
    names = ["input_ids", "attention_mask"]
    if model.config.segment_types > 1:
        names.append("token_type_ids")
    length = min(7, model.config.longest_sequence)
    examples = tuple(torch.ones(2, length, dtype=torch.int64) for _ in names)
    batch = torch.export.Dim("batch")
    sequence = torch.export.Dim("length", min=2, max=model.config.longest_sequence)
    was_training = model.training
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # The exporter prints its progress and warns about the axis names that it chooses.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.onnx.export(
            _LogitsModel(model).eval(),
            examples,
            str(path),
            dynamo=True,
            external_data=_is_large(model),
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=tuple({0: batch, 1: sequence} for _ in names),
        )
    model.train(was_training)
