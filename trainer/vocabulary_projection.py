"""Logits over the vocabulary, row by row, and teachers' distributions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from model.precision import is_native, kernel_device, product_dtype
from trainer.fusion import fused, fusing, fusion_options

# Elements of one chunk of logits, 64 MiB in float32, and 256 MiB on a GPU, whose host launches the
# same kernels for each. Losses hold two such arrays, one more for each temperature beyond the
# first, and for each distribution that they learn from two more.
CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU = 1 << 24, 1 << 26
# 2 MiB in float32.
BLOCK_ELEMENTS = 1 << 19
# Elements that a distribution keeps at most for its next reader: 256 MiB in float32, and 512 MiB on
# a GPU, which holds those of 32 rows of 512 tokens of BERT's vocabulary.
KEPT_ELEMENTS, KEPT_ELEMENTS_ON_GPU = 1 << 26, 1 << 27
# On a GPU, rows of 16-bit matrices begin at multiples of this many elements; cuBLAS has no fast
# kernels for others, and BERT's vocabulary of 30,522 tokens is no multiple of 8.
ALIGNED = 64
# In place of a logit that is not stored: its probability is exactly 0, and its product with its
# logarithm is finite, at every temperature.
ABSENT = -1e30


class Logits(Protocol):
    """Logits of P rows, which are computed a run of rows at a time."""

    @property
    def shape(self) -> tuple[int, int]:
        """P and V."""

    @property
    def dtype(self) -> torch.dtype:
        """Their own, float32 or wider."""

    @property
    def device(self) -> torch.device:
        """Where they are computed."""

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """Logits [C, V] of some rows, written to the first rows of `out`."""

    def take(self, rows: Tensor) -> Logits:
        """The logits of these rows, int64 [P']."""


class Projection:
    """``x @ weight' + bias``, row by row, in autocast's dtype; the logits are at least float32."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dtype = product_dtype(x)
        self.shape, self.device = (len(x), len(weight)), x.device
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.x, self.weight = x.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        if not is_native(x.device, dtype):
            self.x, self.weight = self.x.to(self.dtype), self.weight.to(self.dtype)
        if kernel_device(x.device) == "cuda" and self.weight.dtype != self.dtype:
            self.weight = F.pad(self.weight, (0, 0, 0, -len(weight) % ALIGNED))

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        out = out[: rows.stop - rows.start]
        if self.weight.dtype != self.dtype:
            product = self.product(rows)[:, : self.shape[1]]
            if self.bias is None:
                return out.copy_(product)
            return torch.add(product, self.bias, out=out)
        x, weight = self.x[rows], self.weight.t()
        with torch.autocast(x.device.type, enabled=False):
            if self.bias is None:
                return torch.mm(x, weight, out=out)
            return torch.addmm(self.bias, x, weight, out=out)

    def product(self, rows: slice) -> Tensor:
        """The logits of some rows without the bias, in the products' dtype: [C, V or more]."""
        with torch.autocast(self.device.type, enabled=False):
            return self.x[rows] @ self.weight.t()

    def as_factor(self, logit_gradient: Tensor) -> Tensor:
        """A gradient [C, V] in the products' dtype, with the columns that the weight has rows."""
        vocabulary = self.shape[1]
        if len(self.weight) == vocabulary:
            return logit_gradient.to(self.weight.dtype)
        factor = self.weight.new_empty(len(logit_gradient), len(self.weight))
        factor[:, vocabulary:] = 0
        factor[:, :vocabulary] = logit_gradient
        return factor

    def take(self, rows: Tensor) -> Projection:
        taken = copy.copy(self)
        taken.x, taken.shape = self.x[rows], (len(rows), self.shape[1])
        return taken


class TopLogits:
    """The k largest logits of each row; every other token has the probability 0.

    So a distribution is the softmax over these k alone, at whatever temperature it is read.
    """

    def __init__(self, values: Tensor, ids: Tensor | None, vocabulary: int) -> None:
        """values: float32 [P, k]; ids: their tokens, int64 [P, k]; None where k is V, in order."""
        self.values, self.ids = values, ids
        self.shape, self.dtype = (len(values), vocabulary), values.dtype
        self.device = values.device

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        out = out[: rows.stop - rows.start]
        if self.ids is None:
            return out.copy_(self.values[rows])
        return out.fill_(ABSENT).scatter_(1, self.ids[rows], self.values[rows])

    def take(self, rows: Tensor) -> TopLogits:
        ids = None if self.ids is None else self.ids[rows]
        return TopLogits(self.values[rows], ids, self.shape[1])


class Largest:
    """The k largest of another's logits in each row; every other token has the probability 0."""

    def __init__(self, of: Logits, k: int) -> None:
        self._of, self._k = of, k
        self.shape, self.dtype, self.device = of.shape, of.dtype, of.device

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        out = self._of.logits(rows, out)
        values, ids = out.topk(self._k)
        return out.fill_(ABSENT).scatter_(1, ids, values)

    def take(self, rows: Tensor) -> Largest:
        return Largest(self._of.take(rows), self._k)


class Columns:
    """Another's logits of these tokens alone; the probability is 0 where it has no such token.

    So a distribution is that over the tokens of two vocabularies that are in both.
    """

    def __init__(self, of: Logits, tokens: Tensor) -> None:
        """tokens: ids of the other, int64 [V]; -1: it has none."""
        self._of, self._tokens = of, tokens
        self.shape, self.dtype = (of.shape[0], len(tokens)), of.dtype
        self.device = of.device

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        theirs = self._of.logits(rows, room_for(self._of, rows))
        out = out[: rows.stop - rows.start]
        torch.index_select(theirs, 1, self._tokens.clamp(min=0), out=out)
        return out.masked_fill_(self._tokens < 0, ABSENT)

    def take(self, rows: Tensor) -> Columns:
        return Columns(self._of.take(rows), self._tokens)


def room_for(logits: Logits, rows: slice) -> Tensor:
    """Memory for the logits of some rows; reused, since allocating costs more than filling."""
    shape = rows.stop - rows.start, logits.shape[1]
    return torch.empty(shape, dtype=logits.dtype, device=logits.device)


class Distribution:
    """``softmax(logits / T)``, row by row, for any number of students.

    It is one teacher's distribution, or the mean of several. It is computed a chunk at a time, in
    the dtype of each teacher's logits, so every reader gets the same values. With `keep`, chunks
    stay for the next reader, up to a bound; the values do not depend on that.
    """

    def __init__(
        self, *teachers: Logits, keep: bool = False, vocabulary: int | None = None
    ) -> None:
        """The logits of each teacher, with the same P and V. None of them gets a gradient.

        `vocabulary` is that of the readers, by which they cut chunks of rows; None: V.
        """
        self.teachers = teachers
        self.shape, self._device = teachers[0].shape, teachers[0].device
        rows, tokens = self.shape
        self._chunks = list(chunks(rows, vocabulary or tokens, self._device))
        room = KEPT_ELEMENTS if kernel_device(self._device) == "cpu" else KEPT_ELEMENTS_ON_GPU
        self._keeps, self._room = keep, room if keep else 0
        self._fusion = fusion_options.get()  # not those of whichever reader comes first
        self._held: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        # For each temperature: one chunk, which the next one replaces, and its memory.
        self._passing: dict[float, tuple[int, Tensor]] = {}
        self._scratch: Tensor | None = None
        self._largest: dict[int, Distribution] = {}

    def take(self, rows: Tensor) -> Distribution:
        """The distribution at these rows, int64 [P']."""
        return Distribution(*(logits.take(rows) for logits in self.teachers))

    def over(self, tokens: Tensor) -> Distribution:
        """The distribution over these tokens alone (`Columns`)."""
        return Distribution(*(Columns(logits, tokens) for logits in self.teachers))

    def read_over(self, vocabulary: int) -> Distribution:
        """This distribution for readers with a vocabulary of another size."""
        return Distribution(*self.teachers, vocabulary=vocabulary)

    def largest(self, k: int) -> Distribution:
        """The distribution over each teacher's k largest logits alone; its readers share it."""
        if k not in self._largest:
            some = (Largest(logits, k) for logits in self.teachers)
            self._largest[k] = Distribution(*some, keep=self._keeps)
        return self._largest[k]

    def at(self, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Probabilities p [C, V] and ``sum p log p`` [C] of some rows of one chunk.

        Read-only, and valid until rows of another chunk are requested.
        """
        chunk = next(part for part in self._chunks if rows.start < part.stop)
        key = (chunk.start, temperature)
        if key not in self._held:
            # Not in the precision of whichever reader comes first.
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                self._held[key] = self._compute(chunk, temperature)
        local = slice(rows.start - chunk.start, rows.stop - chunk.start)
        p, negative_entropy = self._held[key]
        return p[local], negative_entropy[local]

    def log_at(self, rows: slice, temperature: float) -> Tensor:
        """Log-probabilities [C, V] of some rows, as `at`."""
        return log_probabilities(self.at(rows, temperature)[0])

    def _compute(self, chunk: slice, temperature: float) -> tuple[Tensor, Tensor]:
        if self._fusion is not None:
            logits = [of.logits(chunk, room_for(of, chunk)) for of in self.teachers]
            p = self._memory_for(chunk, temperature)
            divisor = torch.full((), temperature, dtype=p.dtype, device=p.device)
            with fusing(self._fusion):
                return p, mean_softmax(p, logits, divisor)
        if self._scratch is None:
            self._scratch = room_for(self.teachers[0], self._chunks[0])
        first, *others = self.teachers
        scaled = first.logits(chunk, self._scratch).div_(temperature)
        p = self._memory_for(chunk, temperature)
        negative_entropy = torch.empty_like(scaled[:, 0])
        for block in blocks(slice(0, len(scaled)), scaled):
            some = subtract_largest(scaled[block])
            exponentials = torch.exp(some, out=p[block])
            total = exponentials.sum(dim=-1, keepdim=True)  # [c, 1]
            exponentials.div_(total)
            dot = torch.linalg.vecdot(exponentials, some)
            negative_entropy[block] = dot - total.log().squeeze(-1)
        if others:
            self._average(p, negative_entropy, others, chunk, temperature)
        return p, negative_entropy

    def _average(
        self,
        p: Tensor,
        negative_entropy: Tensor,
        others: Sequence[Logits],
        chunk: slice,
        temperature: float,
    ) -> None:
        """Turn p [C, V] of the first teacher, with its negative entropy, into the mean's."""
        assert self._scratch is not None
        for other in others:
            logits = other.logits(chunk, self._scratch).div_(temperature)
            for block in blocks(slice(0, len(p)), p):
                some = subtract_largest(logits[block]).exp_()
                p[block].add_(some.div_(some.sum(dim=-1, keepdim=True)))
        for block in blocks(slice(0, len(p)), p):
            mean = p[block].div_(len(self.teachers))
            products = torch.special.xlogy(mean, mean, out=self._scratch[block])
            negative_entropy[block] = products.sum(dim=-1)

    def _memory_for(self, chunk: slice, temperature: float) -> Tensor:
        size = (chunk.stop - chunk.start) * self.shape[1]
        if size <= self._room:
            self._room -= size
            return room_for(self.teachers[0], chunk)
        if temperature in self._passing:
            before, memory = self._passing[temperature]
            del self._held[before, temperature]
        else:
            memory = room_for(self.teachers[0], self._chunks[0])
        self._passing[temperature] = (chunk.start, memory)
        return memory[: chunk.stop - chunk.start]


def chunks(rows: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Runs of rows whose logits fit a chunk, as equal as possible; the first is the longest."""
    fitting = CHUNK_ELEMENTS if kernel_device(device) == "cpu" else CHUNK_ELEMENTS_ON_GPU
    number = -(-rows // max(1, fitting // vocabulary))
    size = -(-rows // max(1, number))
    for start in range(0, rows, max(1, size)):
        yield slice(start, min(start + size, rows))


def blocks(rows: slice, logits: Tensor) -> Iterator[slice]:
    """Runs of a chunk's rows to process one after another; off the CPU, one run of all rows.

    On a CPU, element-wise operations are several times faster on data that fits the cache.
    """
    size = rows.stop - rows.start
    if kernel_device(logits.device) == "cpu":
        size = max(1, BLOCK_ELEMENTS // logits.shape[-1])
    for start in range(rows.start, rows.stop, max(1, size)):
        yield slice(start, min(start + size, rows.stop))


@fused
def mean_softmax(out: Tensor, logits: Sequence[Tensor], temperature: Tensor) -> Tensor:
    """Write the mean of ``softmax(logits / T)`` to `out` [C, V]; returns ``sum p log p`` [C]."""
    of_teachers = [F.softmax(x / temperature, dim=-1) for x in logits]
    out.copy_(torch.stack(of_teachers).mean(dim=0) if len(logits) > 1 else of_teachers[0])
    return torch.special.xlogy(out, out).sum(dim=-1)


def log_probabilities(p: Tensor) -> Tensor:
    """Their logarithms, in new memory; that of 0 is some -87 in float32."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log_()


def subtract_largest(logits: Tensor) -> Tensor:
    """Subtract each row's largest logit, in place, so that exponentials lie between 0 and 1."""
    return logits.sub_(logits.amax(dim=-1, keepdim=True))
