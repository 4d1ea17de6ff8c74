"""Exporting a model as an ONNX file, for runtimes without Python."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from model.errors import ModelError
from model.model_config import Ability, ModelConfig
from model.protocol import Model


class _OutputsModel(nn.Module):
    """The model with the input names of `transformers`, and what it predicts as a tuple."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        found = self.model(input_ids, token_type_ids, attention_mask)
        words = () if found.logits is None else (found.logits,)
        return (*words, *(found.heads[name] for name in self.model.config.task_heads))


def require_onnx(config: ModelConfig, path: str | Path) -> None:
    """Raise ModelError where `path` cannot be written.

    The packages ``onnx`` and ``onnxscript`` may be missing, or the model has nothing to predict, or
    predicts a text.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{path}: ONNX export needs `pip install onnx onnxscript`") from error
    if Ability.GENERATE in config.abilities:
        raise ModelError(f"{path}: ONNX export is for encoders; this model generates text")
    if not _output_names(config):
        raise ModelError(f"{path}: ONNX is for predictions; this model has no head for them")


def _output_names(config: ModelConfig) -> list[str]:
    names = ["logits"] * config.mlm_head + [*config.task_heads]
    return ["logits"] if len(names) == 1 else names


def _is_large(model: Model) -> bool:
    """Whether the weights need a file of their own: protobuf is limited to 2 GiB."""
    return 4 * sum(parameter.numel() for parameter in model.parameters()) > 2**30


def export_onnx(model: Model, path: str | Path) -> None:
    """Write what the model predicts for any batch size and length as ONNX.

    Outputs are masked-LM logits [batch, length, V] and those of each task head, by name; a single
    one is called logits. Of a CRF they are its emissions.

    Inputs are int64 [batch, length]: input_ids, attention_mask (1 at real tokens) and, where the
    model has more than one segment type, token_type_ids. Raises ModelError as `require_onnx` does.
    """
    require_onnx(model.config, path)
    outputs = _output_names(model.config)
    names = ["input_ids", "attention_mask"]
    if model.config.reads_segments:
        names.append("token_type_ids")
    longest = model.config.longest_sequence
    length = min(7, longest or 7)
    examples = tuple(torch.ones(2, length, dtype=torch.int64) for _ in names)
    batch = torch.export.Dim("batch")
    sequence = torch.export.Dim("length", min=2, max=longest)
    was_training = model.training
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # The exporter prints its progress, and warns about axis names that it chooses and about torch.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _OutputsModel(model).eval(),
            examples,
            str(path),
            dynamo=True,
            external_data=_is_large(model),
            input_names=names,
            output_names=outputs,
            dynamic_shapes=tuple({0: batch, 1: sequence} for _ in names),
        )
    model.train(was_training)
