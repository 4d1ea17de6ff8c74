"""The parameters, bytes and floating-point operations of a model configuration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from model.config import EncoderConfig
from model.skeleton import skeleton
from model.task_head_config import TaskHeadConfig

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
    config: EncoderConfig,
    sequence_length: int | None = None,
    masked_fraction: float = MASKED_FRACTION,
) -> ModelSize:
    """The size of the model that `config` describes; allocates no memory for it.

    `sequence_length` defaults to 512, or to the number of positions if that is less.
    """
    length = sequence_length or min(512, config.longest_sequence)
    model = skeleton(config)
    body = sum(_count(part) for part in (model.embeddings, model.encoder, model.pooler))
    heads = sum(_count(part) for part in (model.head, model.pair_head, model.task_heads))
    forward = flops_per_token(config, length, masked_fraction)
    return ModelSize(
        parameters=body,
        head_parameters=heads,
        bytes=4 * (body + heads),
        sequence_length=length,
        flops_per_token=3 * forward,
        flops_per_token_forward=forward,
        flops_per_token_backward=2 * forward,
    )


def flops_per_token(
    config: EncoderConfig, length: int, masked_fraction: float = MASKED_FRACTION
) -> float:
    """Matrix-product operations (multiplications and additions) of the forward pass, per token.

    A dense layer takes 2 * inputs * outputs. The two products of attention take 4 * L * inner, over
    all L keys. The masked-LM head and the projection to V run at `masked_fraction` of the tokens;
    pooler, pair head and task heads with one output per text run at one token in L. The backward
    pass takes twice as much:
    one product for the gradient of each operand. Element-wise operations are not counted, as in
    ``torch.utils.flop_counter``.
    """
    hidden, inner, width = config.hidden_size, config.inner_size, config.vocabulary_input_size
    embedding = 0
    if config.embedding_projection != "none":
        embedding = 2 * config.word_size * (3 if config.trigram else 1) * hidden
    head = (2 * hidden * width + 2 * width * config.vocab_size) * config.mlm_head
    pooled = 2 * hidden * hidden * (config.pooler == "tanh") + 4 * hidden * config.pair_head
    pooled += sum(
        _task_head_flops(config, head) * (length if head.per_token else 1)
        for head in config.task_heads.values()
    )
    layer = _attention_flops(config, length) + _feed_forward_flops(config)
    if config.bottleneck_size:
        layer += 2 * inner * hidden  # the projection out of the bottleneck
    return embedding + config.layers * layer + masked_fraction * head + pooled / length


def _attention_flops(config: EncoderConfig, length: int) -> int:
    hidden, inner, source = config.hidden_size, config.inner_size, config.bottleneck_attention
    query_input = hidden if source == "hidden" else inner
    value_input = inner if source == "inner" else hidden
    flops = 2 * inner * (2 * query_input + value_input + inner) + 4 * length * inner
    if config.bottleneck_size:
        flops += 2 * hidden * inner * (2 if source == "shared" else 1)
    return flops


def _feed_forward_flops(config: EncoderConfig) -> int:
    products = 3 if config.feed_forward == "glu" else 2
    return config.feed_forwards * 2 * products * config.inner_size * config.ffn_size


def _task_head_flops(config: EncoderConfig, head: TaskHeadConfig) -> int:
    size = config.hidden_size * max(1, len(head.layers))
    return 2 * size * (size * (head.transform != "none") + head.outputs)


def _count(part: nn.Module | None) -> int:
    return 0 if part is None else sum(parameter.numel() for parameter in part.parameters())
