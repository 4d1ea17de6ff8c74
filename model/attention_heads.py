"""Single attention heads: disabled for a while, or pruned from the weights.

A head is a set of rows of a layer's Q, K and V and of columns of its output projection. Layers that
share their attention (ALBERT) share its heads.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from model.encoder import Attention
from model.errors import ModelError
from model.masked_language_model import MaskedLanguageModel
from model.protocol import Model

ZERO, UNIFORM = "zero", "uniform"  # ways to disable a head: its output, its attention


class Head(NamedTuple):
    """A head of a set of attention weights, both numbered from 0."""

    weights: int
    head: int


def heads_of(model: Model) -> list[list[Head]]:
    """The heads of each set of attention weights. Raises ModelError for a model without any."""
    sets = len(_attention(model))
    return [[Head(number, head) for head in range(model.config.heads)] for number in range(sets)]


@contextmanager
def disabled(model: Model, heads: Collection[Head], way: str = ZERO) -> Iterator[None]:
    """The model without these heads; afterwards its weights are as before, to the bit.

    ZERO: a head's output is 0 where the output projection reads it (Michel et al., 2019, arXiv
    1905.10650). UNIFORM: a head attends to every visible position alike, the mean of its values
    (Kovaleva et al., 2019, arXiv 1908.08593): with queries of 0 all scores are 0.
    """
    parts = [part for head in heads for part in _parts_disabled(model, head, way)]
    kept = [part.clone() for part in parts]
    _zero(parts)
    try:
        yield
    finally:
        for part, before in zip(parts, kept, strict=True):
            part.copy_(before)


def prune(model: Model, heads: Collection[Head]) -> None:
    """Set all weights of these heads to 0; the model computes what it does with them disabled.

    The shapes stay: `transformers` has had no layers of different numbers of heads since its
    version 5.
    """
    for head in heads:
        attention, span = _place(model, head)
        _zero([*_rows(attention, span), attention.output.weight.detach()[:, span]])


def _parts_disabled(model: Model, head: Head, way: str) -> list[Tensor]:
    """Views of the weights that are 0 while the head is disabled."""
    attention, span = _place(model, head)
    if way == ZERO:
        return [attention.output.weight.detach()[:, span]]
    return _of_rows(attention.query, span)


def _rows(attention: Attention, span: slice) -> list[Tensor]:
    config, dense = attention.config, [attention.query]
    if config.key_value_heads == config.heads:  # else other heads read the same keys and values
        dense += [attention.key, attention.value]
    return [part for linear in dense for part in _of_rows(linear, span)]


def _of_rows(dense: nn.Linear, span: slice) -> list[Tensor]:
    tensors = [dense.weight] if dense.bias is None else [dense.weight, dense.bias]
    return [tensor.detach()[span] for tensor in tensors]


def _place(model: Model, head: Head) -> tuple[Attention, slice]:
    attention = _attention(model)[head.weights]
    assert isinstance(attention, Attention)
    size = attention.config.head_size
    return attention, slice(head.head * size, (head.head + 1) * size)


def _attention(model: Model) -> nn.ModuleList:
    if not (isinstance(model, MaskedLanguageModel) and model.config.attention_width):
        kind = model.config.kind
        raise ModelError(
            f"a model of kind {kind} has no attention scores of queries and keys alone"
        )
    return model.encoder.attention


def _zero(parts: Collection[Tensor]) -> None:
    for part in parts:
        part.zero_()
