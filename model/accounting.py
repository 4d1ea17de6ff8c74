"""The parameters, bytes and floating-point operations of a model, its parts and its heads."""

from dataclasses import dataclass

from model.config import EncoderConfig
from model.heads import BRANCH_WIDTH
from model.initialisation import skeleton
from model.model_config import ModelConfig
from model.protocol import HEADS
from model.task_head_config import TaskHeadConfig

MASKED_FRACTION = 0.15


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, as `tandem model` reports it.

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


def flops_per_token(config: EncoderConfig, length: int, masked_fraction: float) -> float:
    """Matrix-product operations (multiplications and additions) of the forward pass, per token.

    A dense layer takes 2 * inputs * outputs. The two products of attention take 4 * L * inner, over
    all L keys, and those with the vectors of R distances 4 * R * inner (not counted: projecting the
    vectors, once a batch). The masked-LM head and the projection to V run at `masked_fraction` of
    the tokens; pooler, pair head and task heads with one output per text run at one token in L. The
    backward pass takes twice as much: one product for the gradient of each operand. Element-wise
    operations are not counted, as in ``torch.utils.flop_counter``.
    """
    hidden, width = config.hidden_size, config.vocabulary_input_size
    transform = 2 * hidden * width * config.head_transform
    head = (transform + 2 * width * config.vocab_size) * config.mlm_head
    pooled = 2 * hidden * hidden * (config.pooler == "tanh") + head_flops(config, length)
    layers = config.layers * _layer_flops(config, length)
    return _embedding_flops(config) + layers + masked_fraction * head + pooled / length


def flops_to_leave(config: EncoderConfig, head: TaskHeadConfig, layer: int, length: int) -> int:
    """FLOPs of a text of this length that leaves at `layer` (from 1), with a branch at each layer.

    They are counted as in `flops_per_token`.
    """
    layers = length * (_embedding_flops(config) + layer * _layer_flops(config, length))
    return layers + layer * _branch_flops(config, head, length)


def head_flops(config: ModelConfig, length: int) -> int:
    """FLOPs of pair head and task heads, for a text of this length."""
    task_heads = sum(
        _branch_flops(config, head, length)
        if head.branches
        else _task_head_flops(config, head, length)
        for head in config.task_heads.values()
    )
    return 4 * config.pooled_size * config.pair_head + task_heads


def _task_head_flops(config: ModelConfig, head: TaskHeadConfig, length: int) -> int:
    size = config.hidden_size * max(1, len(head.layers))
    if head.module is not None:
        return head.module.flops(size, head.outputs, length)
    if head.pooling == "pooler":
        size = config.pooled_size
    transform = 2 * size * size * (head.transform != "none")
    products = transform + 2 * (size + len(head.numbers)) * head.outputs
    return products * (length if head.per_token else 1)


def _branch_flops(config: ModelConfig, head: TaskHeadConfig, length: int) -> int:
    """FLOPs of one branch for one text: at all tokens, and what only the first token needs."""
    at_tokens = 2 * BRANCH_WIDTH * (config.hidden_size + 2 * BRANCH_WIDTH + 2)
    at_first = 2 * BRANCH_WIDTH * (3 * BRANCH_WIDTH + head.outputs)
    return at_tokens * length + at_first


def _embedding_flops(config: EncoderConfig) -> int:
    if config.embedding_projection == "none":
        return 0
    return 2 * config.word_size * (3 if config.trigram else 1) * config.hidden_size


def _layer_flops(config: EncoderConfig, length: int) -> int:
    layer = _attention_flops(config, length) + _feed_forward_flops(config)
    if config.bottleneck_size:
        layer += 2 * config.inner_size * config.hidden_size  # out of the bottleneck
    return layer


def _attention_flops(config: EncoderConfig, length: int) -> int:
    hidden, inner, source = config.hidden_size, config.inner_size, config.bottleneck_attention
    query_input = hidden if source == "hidden" else inner
    value_input = inner if source == "inner" else hidden
    of_keys = config.key_value_heads * config.head_size
    flops = 2 * (query_input + inner) * inner + 2 * (query_input + value_input) * of_keys
    flops += 4 * length * inner
    if config.positions == "relative":
        flops += 4 * min(2 * length, config.distances) * inner
    if config.bottleneck_size:
        flops += 2 * hidden * inner * (2 if source == "shared" else 1)
    return flops


def _feed_forward_flops(config: EncoderConfig) -> int:
    products = 3 if config.feed_forward == "glu" else 2
    return config.feed_forwards * 2 * products * config.inner_size * config.ffn_size
