"""The encoder with its heads, which is trained, captured from and exported.

In inference an example may leave early, at the first layer that is certain (FastBERT).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from model.accounting import flops_per_token
from model.config import EncoderConfig
from model.documents import AttentionMask, Padded
from model.encoder import Encoder
from model.heads import BranchedHead, MaskedLanguageModelHead, ProjectionParts, uncertainty
from model.initialisation import fill
from model.parts import Embeddings
from model.precision import Dense, use_float8
from model.protocol import NOTHING, Capture, EarlyOutputs, Encoded, Model, register


class Pooler(nn.Module):
    """The first token's state, through a dense layer and tanh where configured."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = None
        if config.pooler == "tanh":
            self.dense = Dense(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """Map the first token's state [B, H] to [B, H]."""
        return first if self.dense is None else torch.tanh(self.dense(first))


RECOMPILE_LIMIT = 1024


@register(EncoderConfig)
class MaskedLanguageModel(Model):
    """An encoder with its heads."""

    reads_padded = True
    config: EncoderConfig
    head: MaskedLanguageModelHead | None

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = None if config.pooler == "none" else Pooler(config)
        self.add_heads()

    def encode(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: AttentionMask | Padded | None = None,
        capture: Capture = NOTHING,
        rows: Tensor | None = None,
    ) -> Encoded:
        """The states of the last layer, as in `Model.encode`; rows may hold several `Documents`.

        Of `Padded` rows, layers compute the real tokens alone where that is faster. States at
        padding are then 0.

        With `rows`, the last layer computes only these positions after its attention. This saves 5%
        of BERT-base's work and 12% of a 4-layer model's. Rounding differs from the full layer.
        """
        x = self.embeddings(input_ids, segment_ids, attention_mask)
        return self.encoder(x, attention_mask, capture, rows)

    def as_last(self, states: Tensor) -> Tensor:
        norm = self.encoder.final_norm
        return states if norm is None else cast(Tensor, norm(states))

    def leave_early(
        self,
        name: str,
        speed: float,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> EarlyOutputs:
        head = self.task_heads[name]
        assert isinstance(head, BranchedHead)
        x = self.embeddings(input_ids, segment_ids)
        return leave_early(self.encoder, head, x, attention_mask, speed)

    def run_layers_by(self, run: Callable[..., tuple[Tensor, ...]]) -> None:
        self.encoder.run_layers_by(run)

    def compile_layers(self, dynamic: bool = False, **options: Any) -> None:
        """Run each layer through ``torch.compile``, as in `Model.compile_layers`.

        Torch counts recompilations for all models of a process together. A job needs models x
        (training, evaluation, masked rows only) x sequence lengths of them. Beyond its default
        limit, torch would silently run a layer uncompiled. So the limit is raised, and exceeding it
        is an error. Where sums must have a fixed order, kernels are not chosen by measuring them.
        """
        from torch._dynamo import config
        from torch._inductor import config as kernels

        config.recompile_limit = config.accumulated_recompile_limit = RECOMPILE_LIMIT
        config.fail_on_recompile_limit_hit = True
        kernels.deterministic = torch.are_deterministic_algorithms_enabled()
        self.encoder.compile_layers(dynamic=dynamic, **options)

    def projection_parts(self) -> ProjectionParts:
        assert self.head is not None, "a model without a masked-LM head"
        decoder = self.head.decoder
        word = self.embeddings.word.weight if decoder is None else decoder
        return ProjectionParts(word, self.head.bias, self.head.extra)

    def fill(
        self, module: nn.Module, key: str, name: str, parameter: Tensor, generator: torch.Generator
    ) -> None:
        fill(self.config, module, key, name, parameter, generator)

    def flops_per_token(self, length: int, masked_fraction: float) -> float:
        return flops_per_token(self.config, length, masked_fraction)

    def checkpoint_activations(self) -> None:
        self.encoder.checkpoint_activations = True

    def use_float8(self) -> None:
        use_float8(self.encoder)

    def share_embedding(self, table: Tensor) -> None:
        self.embeddings.shared = table

    def set_rope_theta(self, base: float) -> None:
        self.encoder.rope_theta = base

    def freeze_positions(self) -> None:
        assert self.embeddings.position is not None, "see `EncoderConfig.cannot`"
        self.embeddings.position.requires_grad_(False)


def leave_early(
    encoder: Encoder, head: BranchedHead, x: Tensor, attention_mask: Tensor | None, speed: float
) -> EarlyOutputs:
    """Run the layers on embeddings x [B, L, H]; the mask [B, L] or [B] as in `visible_keys`.

    After each layer, the examples whose uncertainty is less than `speed` leave the batch with that
    layer's logits. Nobody leaves early at a speed of 0. The host waits for the device once a layer.
    """
    staying = torch.arange(len(x), device=x.device)
    layers = torch.full_like(staying, encoder.config.layers)
    logits: list[tuple[Tensor, Tensor]] = []  # of those who left together, and who they are
    context = encoder.context(x, attention_mask)
    for number, branch in enumerate(head, start=1):
        (x,) = encoder.layer(number, x, context)
        said = branch(x, attention_mask)
        leaves = uncertainty(said) < speed
        count = int(leaves.sum())
        if number == encoder.config.layers or count == len(staying):
            logits.append((said, staying))
            layers[staying] = number
            break
        if not count:
            continue
        logits.append((said[leaves], staying[leaves]))
        layers[staying[leaves]] = number
        stays = ~leaves
        staying, x = staying[stays], x[stays]
        attention_mask = None if attention_mask is None else attention_mask[stays]
        context = encoder.context(x, attention_mask)
    order = torch.cat([rows for _, rows in logits])
    gathered = torch.cat([answers for answers, _ in logits])
    return EarlyOutputs(torch.empty_like(gathered).index_copy(0, order, gathered), layers)
