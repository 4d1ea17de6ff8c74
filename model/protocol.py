"""What training asks of a model, whatever it is inside: an encoder, or another kind of student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from model.encoder import Capture
from model.masked_language_model import Features


class ModelShape(Protocol):
    """What loss terms are built from. `EncoderConfig` is one.

    Layers count from 1. window: the tokens that a layer attends to, both sides together; 0: all.
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
    """A module that programs run and terms read; `MaskedLanguageModel` is one.

    What it captures are references to tensors of its ordinary forward pass, still in the graph.
    """

    def features(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        capture: Capture = ...,
    ) -> Features:
        """Hidden states, attention and the outputs of heads, as far as `capture` asks for them."""

    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, E] and bias [V] of the vocabulary projection of a masked-LM head."""

    def pooled_heads(self) -> Mapping[str, nn.Module]:
        """The heads whose logits `Features.heads` holds, by name."""

    def compile_layers(self, **options: Any) -> None:
        """Run the layers through ``torch.compile``."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The call of what `model.from_pretrained` returns."""
