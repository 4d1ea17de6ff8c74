"""The protocol that training requires of a model: an encoder, or another kind of student."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from model.encoder import Capture
from model.masked_language_model import Features


class ModelShape(Protocol):
    """The sizes from which loss terms are built. `EncoderConfig` satisfies it.

    Layers are numbered from 1. `window` is the number of tokens that a layer attends to, both sides
    together; 0 means all.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...
    def window(self, number: int) -> int: ...


class Model(Protocol):
    """A module that programs run and whose outputs terms read. `MaskedLanguageModel` satisfies it.

    Captured tensors are references to those of the ordinary forward pass, still in the graph.
    """

    def features(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        capture: Capture = ...,
    ) -> Features:
        """The hidden states, attention and head outputs that `capture` requests."""

    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, E] and bias [V] of the vocabulary projection of a masked-LM head."""

    def compile_layers(self, **options: Any) -> None:
        """Run the layers through ``torch.compile``."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The call of what `model.from_pretrained` returns."""
