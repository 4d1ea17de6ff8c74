"""Exporting a model as an ONNX file, for runtimes without Python, also with weights of 8 bits."""

import contextlib
import io
import logging
import statistics
import time
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.config import EncoderConfig
from model.errors import ModelError
from model.model_config import ModelConfig
from model.protocol import Model

RUNS = 20  # of a file whose latency is measured


class _OutputsModel(nn.Module):
    """The model with the input names of `transformers`, and what it predicts as a tuple."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        numbers: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        features = self.model(input_ids, token_type_ids, attention_mask, numbers=numbers)
        words = () if features.logits is None else (features.logits,)
        return (*words, *(features.heads[name] for name in self.model.config.task_heads))


def require_onnx(config: ModelConfig, path: str | Path, *, int8: bool = False) -> None:
    """Raise ModelError where `path` cannot be written, or its copy in 8 bits (`int8`).

    The packages ``onnx`` and ``onnxscript`` may be missing, or ``onnxruntime``, which quantizes; or
    the model has nothing to predict, or is no encoder.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{path}: ONNX export needs `pip install onnx onnxscript`") from error
    if int8 and find_spec("onnxruntime") is None:
        raise ModelError(f"{path}: weights of 8 bits need `pip install onnxruntime`")
    if not isinstance(config, EncoderConfig):  # the graph of an LSTM is of the example's length
        raise ModelError(f"{path}: ONNX export is for encoders, and not for kind: {config.kind}")
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
    model has more than one segment type, token_type_ids; and float32 [batch, K] numbers, as they
    stand in the table, where its head reads K columns beside the text. Raises
    ModelError as `require_onnx` does.
    """
    require_onnx(model.config, path)
    outputs = _output_names(model.config)
    names = ["input_ids", "attention_mask"]
    if model.config.reads_segments:
        names.append("token_type_ids")
    longest = model.config.longest_sequence
    length = min(7, longest or 7)
    inputs = {name: torch.ones(2, length, dtype=torch.int64) for name in names}
    batch = torch.export.Dim("batch")
    sequence = torch.export.Dim("length", min=2, max=longest)
    shapes = {name: {0: batch, 1: sequence} for name in names}
    for head in model.config.task_heads.values():
        if head.numbers:
            inputs["numbers"], shapes["numbers"] = torch.ones(2, len(head.numbers)), {0: batch}
    was_training = model.training
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # The exporter prints its progress, and warns about axis names that it chooses and about torch.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _OutputsModel(model).eval(),
            (),
            str(path),
            kwargs=inputs,
            dynamo=True,
            external_data=_is_large(model),
            input_names=[*inputs],
            output_names=outputs,
            dynamic_shapes=shapes,
        )
    model.train(was_training)


def quantize_onnx(path: str | Path, out: str | Path) -> None:
    """Write the ONNX file at `path` with weights of 8 bits to `out`, by onnxruntime.

    Activations are quantized as they come. Weights use 7 bits of the 8, with a scale for each
    output: processors without VNNI add up products of 8 bits inexactly.
    """
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model = onnx.load(str(path))
    _untie(model.graph)
    del model.graph.value_info[:]  # shapes by the exporter, which onnx's own inference contradicts
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it proposes a preparation that the exporter has done
    try:
        quantize_dynamic(model, str(out), per_channel=True, reduce_range=True)
    finally:
        root.setLevel(level)


def _untie(graph: Any) -> None:
    """Give each Gemm its own matrix: onnxruntime transposes it, though embeddings may read it too.

    https://github.com/microsoft/onnxruntime, quantization/onnx_model.py, `replace_gemm_with_matmul`
    """
    readers = Counter(name for node in graph.node for name in node.input)
    matrices = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Gemm" and readers[node.input[1]] > 1 and node.input[1] in matrices:
            graph.initializer.add().CopyFrom(matrices[node.input[1]])
            graph.initializer[-1].name = node.input[1] = f"{node.name}.matrix"


def seconds_per_text(path: str | Path, tokens: int) -> float | None:
    """The median time in which onnxruntime, on one thread, answers one text of this many tokens.

    None where onnxruntime is not installed.
    """
    if find_spec("onnxruntime") is None:
        return None
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    text = np.ones((1, tokens), np.int64)
    inputs = {
        tensor.name: text * (tensor.name != "token_type_ids") for tensor in session.get_inputs()
    }
    for tensor in session.get_inputs():
        if tensor.name == "numbers":
            inputs["numbers"] = np.zeros((1, tensor.shape[1]), np.float32)
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        session.run(None, inputs)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
