"""The floating-point operations of an encoder, and of any model's heads."""

from __future__ import annotations

from model.config import EncoderConfig
from model.model_config import ModelConfig
from model.task_head_config import TaskHeadConfig


def flops_per_token(config: EncoderConfig, length: int, masked_fraction: float) -> float:
    """Matrix-product operations (multiplications and additions) of the forward pass, per token.

    A dense layer takes 2 * inputs * outputs. The two products of attention take 4 * L * inner, over
    all L keys. The masked-LM head and the projection to V run at `masked_fraction` of the tokens;
    pooler, pair head and task heads with one output per text run at one token in L. The backward
    pass takes twice as much: one product for the gradient of each operand. Element-wise operations
    are not counted, as in ``torch.utils.flop_counter``.
    """
    hidden, inner, width = config.hidden_size, config.inner_size, config.vocabulary_input_size
    embedding = 0
    if config.embedding_projection != "none":
        embedding = 2 * config.word_size * (3 if config.trigram else 1) * hidden
    head = (2 * hidden * width + 2 * width * config.vocab_size) * config.mlm_head
    pooled = 2 * hidden * hidden * (config.pooler == "tanh") + head_flops(config, length)
    layer = _attention_flops(config, length) + _feed_forward_flops(config)
    if config.bottleneck_size:
        layer += 2 * inner * hidden  # the projection out of the bottleneck
    return embedding + config.layers * layer + masked_fraction * head + pooled / length


def head_flops(config: ModelConfig, length: int) -> int:
    """Of pair head and task heads, for a text of this length."""
    task_heads = sum(
        _task_head_flops(config, head) * (length if head.per_token else 1)
        for head in config.task_heads.values()
    )
    return 4 * config.pooled_size * config.pair_head + task_heads


def _task_head_flops(config: ModelConfig, head: TaskHeadConfig) -> int:
    size = config.hidden_size * max(1, len(head.layers))
    if head.pooling == "pooler":
        size = config.pooled_size
    return 2 * size * (size * (head.transform != "none") + head.outputs)


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
