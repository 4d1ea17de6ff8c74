"""Pairs whose two segments are read apart, each as a text of its own (a siamese model)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SegmentPairs(NamedTuple):
    """Where the segments of B pairs [CLS] a [SEP] b [SEP] lie. Neither of them has the [CLS].

    As texts of their own they are 2 B rows: all first segments, then all second ones.
    """

    split: Tensor  # int64 [B], the place of the second segment's first token
    tokens: Tensor  # int64 [B], the number of tokens, padding not counted

    @classmethod
    def of(cls, segment_ids: Tensor, tokens: Tensor) -> SegmentPairs:
        """The segments by their ids [B, L], 0 and 1, of which `tokens` [B] are no padding."""
        places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
        is_first = (segment_ids == 0) & (places < tokens[:, None])
        return cls(is_first.sum(dim=1), tokens)

    @property
    def sizes(self) -> Tensor:
        """The tokens of each text, int64 [2 B]."""
        return torch.cat([self.split - 1, self.tokens - self.split])

    def apart(self, x: Tensor) -> Tensor:
        """Pairs [B, L, H] as texts [2 B, L, H]; what follows a text is padding."""
        length = x.shape[1]
        begins = torch.cat([torch.ones_like(self.split), self.split])[:, None]
        places = (begins + torch.arange(length, device=x.device)).clamp(max=length - 1)
        return x.repeat(2, 1, 1).gather(1, places[..., None].expand(-1, -1, x.shape[2]))

    def joined(self, states: Tensor) -> Tensor:
        """Texts [2 B, L, H] as pairs [B, L, H], with the states of padding at [CLS] and padding."""
        rows, length = len(self.split), states.shape[1]
        places = torch.arange(length, device=states.device).expand(rows, -1)
        is_second = places >= self.split[:, None]
        within = torch.where(is_second, places - self.split[:, None], places - 1) % length
        text = torch.arange(rows, device=states.device)[:, None] + rows * is_second
        flat = (text * length + within).flatten()
        return states.flatten(0, 1).index_select(0, flat).unflatten(0, (rows, length))
