"""Building blocks: embeddings, norms, activations, dense layers, and the feed-forward part."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention_kernel import Distances
from model.config import EncoderConfig
from model.documents import AttentionMask, Documents, Padded
from model.errors import ModelError
from model.precision import Dense, kernel_device


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class NoNorm(nn.Module):
    """MobileBERT's replacement for a norm, an element-wise affine map: ``weight * x + bias``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return x * self.weight + self.bias


class LayerNorm(nn.LayerNorm):
    """A layer norm, whose result has the dtype of its weights where that is 16 bit.

    So the residual stream does. On GPUs autocast alone would make it float32. The kernels compute
    statistics in float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        if self.weight.dtype.itemsize > 2:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


class RMSNorm(nn.RMSNorm):
    """``g * x / rms(x)`` (arXiv 1910.07467), in float32 under autocast, as layer norms are.

    The result has the dtype of the weights where that is 16 bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        wide = x.float() if torch.is_autocast_enabled(x.device.type) else x
        if self.weight.dtype.itemsize > 2:
            return super().forward(wide)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def make_norm(config: EncoderConfig, size: int, eps: float = 0.0) -> nn.Module:
    """The configured norm over the last dimension; an `eps` of 0 means the configured epsilon."""
    if config.norm == "no_norm":
        return NoNorm(size)
    if config.norm == "rms_norm":
        return RMSNorm(size, eps=eps or config.norm_eps)
    return LayerNorm(size, eps=eps or config.norm_eps, bias=config.norm_bias)


class DenseNorm(nn.Module):
    """``norm(dropout(dense(x)) + residual)``; without a residual ``norm(dense(x))``."""

    def __init__(self, config: EncoderConfig, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = Dense(inputs, outputs)
        self.norm = make_norm(config, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map x [..., inputs] and residual [..., outputs] to [..., outputs]."""
        y = self.dropout(self.dense(x))
        return self.norm(y if residual is None else y + residual)


class FeedForward(nn.Module):
    """Two dense layers with an activation or a gated unit, a norm and a residual.

    If a layer has several, only the last has dropout. Inside a bottleneck none has (MobileBERT).
    """

    def __init__(self, config: EncoderConfig, is_last: bool) -> None:
        super().__init__()
        self.is_pre_norm, self.is_gated = (
            config.norm_placement == "pre",
            config.feed_forward == "glu",
        )
        self.activation = ACTIVATIONS[config.activation]
        inner = config.inner_size
        self.input = Dense(
            inner, config.ffn_size * (2 if self.is_gated else 1), bias=config.ffn_bias
        )
        self.output = Dense(config.ffn_size, inner, bias=config.ffn_bias)
        self.norm = make_norm(config, inner, config.fixed_norm_eps if is_last else 0.0)
        drops = is_last and not config.bottleneck_size
        self.dropout = nn.Dropout(config.dropout_rate("feed_forward") if drops else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, inner] to [B, L, inner]."""
        y = self.input(self.norm(x) if self.is_pre_norm else x)
        if self.is_gated:
            value, gate = y.chunk(2, dim=-1)
            y = self.output(self.dropout(self.activation(value) * gate))
        else:
            y = self.dropout(self.output(self.activation(y)))
        return x + y if self.is_pre_norm else self.norm(x + y)


class FeedForwardStack(nn.Module):
    """All feed-forward networks of a layer, and the projection out of its bottleneck."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        last = config.feed_forwards - 1
        self.stack = nn.ModuleList(
            FeedForward(config, is_last=i == last) for i in range(config.feed_forwards)
        )
        self.widen = None
        if config.bottleneck_size:
            rate = config.dropout_rate("feed_forward")
            self.widen = DenseNorm(config, config.inner_size, config.hidden_size, rate)

    def forward(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """Map x [B, L, inner] to [B, L, hidden]; `layer_input` [B, L, hidden] is the residual."""
        for feed_forward in self.stack:
            x = feed_forward(x)
        return x if self.widen is None else self.widen(x, layer_input)


class Table(nn.Embedding):
    """Learned vectors, whose gradients are summed in float32.

    A GPU's kernel does so. A CPU's adds up in the dtype of the table: at 256 times the summand a
    bfloat16 stands still.
    """

    def forward(self, rows: Tensor | slice | int) -> Tensor:
        """[..., width] for int64 [...]; of a slice or a number, what indexing gives: no copy."""
        if not isinstance(rows, Tensor):
            return self.weight[rows]
        if self.weight.dtype.itemsize > 2 or kernel_device(rows.device) != "cpu":
            return super().forward(rows)
        return F.embedding(rows, self.weight.float(), self.padding_idx).to(self.weight.dtype)


class Embeddings(nn.Module):
    """Maps token ids to the first hidden state: the normed sum of word, position, segment vectors.

    ALBERT projects the normed sum to the hidden size (``embedding_projection: sum``). MobileBERT
    concatenates three neighbouring word vectors and projects them before the sum (``word``).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config, self.longest_sequence = config, config.longest_sequence
        self.shared: Tensor | None = None  # [V, E] of another model, to which `word` is added
        width = config.hidden_size if config.embedding_projection == "word" else config.word_size
        pad = config.pad_token_id if config.pad_token_id >= 0 else None
        self.word = Table(config.vocab_size, config.word_size, padding_idx=pad)
        self.position = None
        if config.has_position_table:
            after_padding = config.positions == "learned_after_padding"
            self.position = Table(
                config.max_positions, width, padding_idx=pad if after_padding else None
            )
        self.segment = Table(config.segment_types, width) if config.segment_types else None
        self.norm = (
            make_norm(config, width, config.fixed_norm_eps) if config.embedding_norm else None
        )
        self.dropout = nn.Dropout(config.dropout_rate("embedding"))
        self.projection = None
        if config.embedding_projection != "none":
            fan_in = config.word_size * (3 if config.trigram else 1)
            self.projection = Dense(fan_in, config.hidden_size)

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: AttentionMask | Padded | None = None,
    ) -> Tensor:
        """Map token ids and segment ids, int64 [B, L] each, to float [B, L, hidden_size].

        In each of several `Documents` positions count from 0, and no word has a neighbour outside.

        Raises ModelError for a sequence longer than the position table.
        """
        length = input_ids.shape[1]
        if length > self.longest_sequence:
            raise ModelError(
                f"sequence_length: {length} is more than the model's "
                f"{self.longest_sequence} positions"
            )
        documents = attention_mask if isinstance(attention_mask, Documents) else None
        x = self.word(input_ids)
        if self.shared is not None:
            x = x + F.embedding(input_ids, self.shared)
        if self.config.trigram:
            x = _trigram(x, documents)
        if self.projection is not None and self.config.embedding_projection == "word":
            x = self.projection(x)
        if self.segment is not None:
            # A table of one row (RoBERTa) tells no segments apart.
            is_told = segment_ids is not None and self.segment.num_embeddings > 1
            x = x + self.segment(segment_ids if is_told else 0)
        if self.position is not None:
            x = x + self.position(self._positions(input_ids, documents))
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        if self.projection is not None and self.config.embedding_projection == "sum":
            x = self.projection(x)
        return x

    def _positions(self, input_ids: Tensor, documents: Documents | None) -> slice | Tensor:
        if self.config.positions == "learned":
            return slice(input_ids.shape[1]) if documents is None else documents.places
        pad = self.config.pad_token_id
        real = (input_ids != pad).to(torch.int64)
        count = real.cumsum(dim=1) if documents is None else documents.places + 1
        return count * real + pad


def _trigram(x: Tensor, documents: Documents | None) -> Tensor:
    """[B, L, E] to [B, L, 3E]: the next, the current and the previous vector, zero at the ends."""
    following = F.pad(x[:, 1:], (0, 0, 0, 1))
    previous = F.pad(x[:, :-1], (0, 0, 1, 0))
    if documents is not None:
        begins = (documents.places == 0)[..., None]
        following = following.masked_fill(F.pad(begins[:, 1:], (0, 0, 0, 1), value=True), 0.0)
        previous = previous.masked_fill(begins, 0.0)
    return torch.cat([following, x, previous], dim=2)


class RelativePositions(nn.Module):
    """A vector for each distance, or bucket of distances, from a key to a query, for all layers.

    Attention scores them apart from the tokens' content (`with_positions`). The buckets are those
    of DeBERTa's second version (arXiv 2111.09543).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.buckets, self.longest = config.position_buckets, config.max_positions
        self.reach = config.distances // 2
        self.table = nn.Parameter(torch.empty(config.distances, config.hidden_size))
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, length: int) -> Distances:
        """The distances in sequences of this length."""
        reach = self.reach
        if not torch.compiler.is_exporting():  # a file serves every length
            reach = min(reach, length)
        first = self.reach - reach
        vectors = self.norm(self.table[first : self.reach + reach])
        position = torch.arange(length, device=self.table.device)
        bucket = self.bucket(position[:, None] - position) + self.reach
        return Distances(vectors, bucket.clamp(0, 2 * self.reach - 1) - first)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, int64 [...]: near ones are alone, far ones share by logs."""
        if not self.buckets:
            return distance
        half = self.buckets // 2
        far = distance.abs().clamp(min=half) / half
        farthest = torch.tensor((self.longest - 1) / half)  # float32, to round as `transformers`
        steps = torch.ceil(far.log() / farthest.log() * (half - 1)) + half
        return torch.where(distance.abs() <= half, distance, steps.long() * distance.sign())
