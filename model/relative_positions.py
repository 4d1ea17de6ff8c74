"""DeBERTa's relative positions, which attention scores apart from the tokens' content.

The score of a query i and a key j is ``(q_i k_j + q_i K(i - j) + k_j Q(i - j)) / sqrt(3 D)``, where
K and Q are the layer's own projections of the vector of a distance (arXiv 2006.03654, section 3.1,
with the shared projections and the buckets of its second version, arXiv 2111.09543).
"""

import torch
from torch import Tensor, nn

from model.attention_kernel import PLAIN, AttentionPattern, Distances
from model.config import EncoderConfig
from model.parts import LayerNorm
from model.precision import is_native


class RelativePositions(nn.Module):
    """A vector for each distance, or bucket of distances, from a key to a query, for all layers."""

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


def with_positions(
    q: Tensor, k: Tensor, of_keys: Tensor, of_queries: Tensor, pattern: AttentionPattern
) -> tuple[Tensor, AttentionPattern]:
    """The queries, scaled, and the pattern with what the distances add to the scores.

    q and k are [B, A, L, D], `of_keys` and `of_queries` K and Q of all vectors, [A, R, D].
    """
    assert pattern.distances is not None
    numbers = pattern.distances.numbers.expand(*q.shape[:2], -1, -1)
    by_query = _products(q, of_keys).gather(3, numbers)
    by_key = _products(k, of_queries).gather(3, numbers.transpose(2, 3)).transpose(2, 3)
    scores, q = (by_query + by_key) * (3 * q.shape[-1]) ** -0.5, q * 3**-0.5
    if pattern.kernel == PLAIN:
        hiding = scores if pattern.hiding is None else scores + pattern.hiding
        return q, pattern._replace(hiding=hiding)
    if pattern.visible is not None:
        scores = scores.masked_fill(~pattern.visible, torch.finfo(scores.dtype).min / 2)
    return q, pattern._replace(visible=scores)


def _products(x: Tensor, vectors: Tensor) -> Tensor:
    """x [B, A, L, D] with each of the vectors [A, R, D]: [B, A, L, R]."""
    if is_native(x.device, x.dtype):
        return x @ vectors.transpose(1, 2)
    with torch.autocast(x.device.type, enabled=False):
        return _products(x.float(), vectors.float()).to(x.dtype)
