"""The vocabulary projection by rows, and a teacher's distribution over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from model.precision import is_native, product_dtype

# What a distribution keeps at most, for whoever asks next: 256 MiB in float32.
KEPT_ELEMENTS = 1 << 26


class Projection:
    """``x @ weight' + bias`` by rows, in the dtype autocast asks for; logits at least float32."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dtype = product_dtype(x)
        self.wide = torch.promote_types(dtype, torch.float32)
        self.x, self.weight = x.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(self.wide)
        if not is_native(x.device.type, dtype):
            self.x, self.weight = self.x.to(self.wide), self.weight.to(self.wide)

    def buffer(self, rows: slice) -> Tensor:
        """Room for the logits of so many rows; fresh memory costs more than filling it again."""
        shape = (rows.stop - rows.start, len(self.weight))
        return torch.empty(shape, dtype=self.wide, device=self.x.device)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """Logits [C, V] of some rows, written to the head of `out`."""
        out = out[: rows.stop - rows.start]
        x, weight = self.x[rows], self.weight.t()
        with torch.autocast(x.device.type, enabled=False):
            if self.weight.dtype != self.wide:
                out.copy_(x @ weight)
                return out if self.bias is None else out.add_(self.bias)
            if self.bias is None:
                return torch.mm(x, weight, out=out)
            return torch.addmm(self.bias, x, weight, out=out)


class Distribution:
    """``softmax((x @ weight' + bias) / T)`` of a teacher by rows, for any number of students.

    Computed in the dtype that autocast asks for where this is made, not where it is read, and so
    the same for every reader. With `keep` rows are held for the next reader, up to a bound; the
    values do not depend on it.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, keep: bool = False) -> None:
        """x [P, E], weight [V, E], bias [V]; none of them gets a gradient."""
        bias = None if bias is None else bias.detach()
        self._projection = Projection(x.detach(), weight.detach(), bias)
        self._room = KEPT_ELEMENTS if keep else 0
        self._kept: dict[tuple[int, int, float], tuple[Tensor, Tensor]] = {}
        self._buffers: list[Tensor] = []

    def at(self, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Probabilities p [C, V] and ``sum p log p`` [C] of some rows.

        Not to be written to, and only until the next call: later rows may take their place. The
        first rows that are asked for must be the longest run.
        """
        key = (rows.start, rows.stop, temperature)
        if key not in self._kept:
            found = self._compute(rows, temperature)
            if found[0].numel() > self._room:
                return found
            self._room -= found[0].numel()
            self._kept[key] = found
            self._buffers.pop()  # it holds what is kept
        return self._kept[key]

    def _compute(self, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        while len(self._buffers) < 2:  # the first chunk is the largest
            self._buffers.append(self._projection.buffer(rows))
        logits = self._projection.logits(rows, self._buffers[0]).div_(temperature)
        subtract_largest(logits)
        p = torch.exp(logits, out=self._buffers[1][: len(logits)])
        total = p.sum(dim=-1, keepdim=True)  # [C, 1]
        p.div_(total)
        return p, torch.linalg.vecdot(p, logits) - total.log().squeeze(-1)


def subtract_largest(logits: Tensor) -> Tensor:
    """In place, from each row: exponentials then lie between 0 and 1."""
    return logits.sub_(logits.amax(dim=-1, keepdim=True))
