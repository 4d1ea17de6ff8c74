"""The parameters, bytes and floating-point operations of a model configuration."""

from __future__ import annotations

from dataclasses import dataclass

from model.model_config import ModelConfig
from model.protocol import HEADS
from model.skeleton import skeleton

MASKED_FRACTION = 0.15


@dataclass(frozen=True)
class ModelSize:
    """What `tandem model` reports.

    parameters: embeddings, encoder and pooler. head_parameters: masked-LM transform, decoder bias
    and untied columns, pair head, task heads; the tied decoder weight counts as an embedding.
    bytes: all of them in float32. flops_per_token: forward and backward of one training step.
    """

    parameters: int
    head_parameters: int
    bytes: int
    sequence_length: int
    flops_per_token: float
    flops_per_token_forward: float
    flops_per_token_backward: float


def describe(
    config: ModelConfig,
    sequence_length: int | None = None,
    masked_fraction: float = MASKED_FRACTION,
) -> ModelSize:
    """The size of the model that `config` describes; allocates no memory for it.

    `sequence_length` defaults to 512, or to the longest that the model reads if that is less.
    """
    length = sequence_length or min(512, config.longest_sequence or 512)
    model = skeleton(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    heads = sum(size for name, size in sizes.items() if name.startswith(HEADS))
    body = sum(sizes.values()) - heads
    forward = model.flops_per_token(length, masked_fraction)
    return ModelSize(
        parameters=body,
        head_parameters=heads,
        bytes=4 * (body + heads),
        sequence_length=length,
        flops_per_token=3 * forward,
        flops_per_token_forward=forward,
        flops_per_token_backward=2 * forward,
    )
