"""Losses of rows of logits over the vocabulary: ordinary functions of log-probabilities.

log_q: a student's, log_p: a teacher's, [C, V], float32 or wider. Labels: int64 [C], -100 where
there is nothing to predict. A loss function returns the loss of each row, [C]. Autograd
differentiates it inside a chunk of rows, and where the learner is compiled its kernels are fused
with the gradient's. The two losses that most students have also have a gradient written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import NO_LABEL
from trainer.fusion import fused
from trainer.vocabulary_projection import ABSENT, Distribution, log_probabilities, subtract_largest

Room = Callable[[], Tensor]


class Target(Protocol):
    """The distribution with which a student's distribution is compared."""

    def dot(self, scaled: Tensor, rows: slice, room: Room) -> Tensor:
        """``target . s`` [C] plus any constant that the loss subtracts; `scaled` is s, [C, V].

        `room` provides scratch memory of shape [C, V].
        """

    def subtract(self, gradient: Tensor, rows: slice, factors: Tensor) -> None:
        """Subtract ``factors`` [C] times the target from `gradient` [C, V]."""


@dataclass(frozen=True)
class RowLoss:
    """A loss of some rows: ``weights[rows] * function(log_q [C, V] at a temperature, *operands)``.

    weights: float32 [P] of all rows; operands: what else the function reads, of some rows;
    of_logits: the function reads the logits themselves, not their log-probabilities. With a
    `target` the loss is also ``w (log sum exp s - target . s)``, s = logits / T, and its gradient
    is written by hand, ``w / T (softmax(s) - target)``: by autograd, a student's step with both
    losses that have one took 14% longer (benchmarks/LIMITS.md).
    """

    function: Callable[..., Tensor]
    weights: Tensor
    temperature: float = 1.0
    target: Target | None = None
    of_logits: bool = False
    operands: Callable[[slice], Sequence[Tensor]] = lambda rows: ()


def cross_entropy_rows(labels: Tensor, smoothing: float = 0.0) -> RowLoss:
    """`cross_entropy` with labels [P] of all rows."""
    target = None if smoothing else _Labels(labels.clamp_min(0)[:, None])
    weights = (labels != NO_LABEL).to(torch.float32)
    function = partial(cross_entropy, smoothing=smoothing)
    return RowLoss(function, weights, target=target, operands=lambda rows: (labels[rows],))


def kl_divergence_rows(teacher: Distribution, temperature: float, weights: Tensor) -> RowLoss:
    """`kl_divergence` from a teacher at a temperature; `weights` float [P] of all rows."""
    return RowLoss(
        kl_divergence_from,
        weights.detach().to(torch.float32),
        temperature,
        TeacherTarget(teacher, temperature),
        operands=lambda rows: (teacher.at(rows, temperature)[0],),
    )


def cross_entropy(log_q: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy with ``(1 - e) onehot(label) + e / V``, e = `smoothing` (Szegedy et al., 2016).

    As torch's cross-entropy has it: the label has a share of e too.
    """
    loss = F.nll_loss(log_q, labels, ignore_index=NO_LABEL, reduction="none")
    if not smoothing:
        return loss
    return torch.lerp(loss, -log_q.mean(dim=-1) * (labels != NO_LABEL), smoothing)


def kl_divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``KL(p || q)``."""
    return dot(log_p.exp(), log_p - log_q)


def kl_divergence_from(log_q: Tensor, p: Tensor) -> Tensor:
    """``KL(p || q)`` of probabilities p."""
    return kl_divergence(log_q, log_probabilities(p))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """``a . b`` of each row; compiled, as a sum that is fused with what makes its factors."""
    return (a * b).sum(-1) if torch.compiler.is_compiling() else torch.linalg.vecdot(a, b)


_Scaled = tuple[RowLoss, float]


class RowLosses:
    """Several losses of the same logits, each multiplied by its scale.

    Those that have targets are differentiated by hand. If they have the same temperature they share
    the softmax, which is most of their cost, and no target is copied. Memory is reused between
    calls: on a CPU, allocating it costs more than the work itself.
    """

    def __init__(self, losses: Sequence[RowLoss], scales: Sequence[float]) -> None:
        self._losses = [*zip(losses, scales, strict=True)]
        self._by_autograd = [scaled for scaled in self._losses if scaled[0].target is None]
        self._by_hand = [scaled for scaled in self._losses if scaled[0].target is not None]
        # The last temperature overwrites the logits.
        self._temperatures = sorted({loss.temperature for loss, _ in self._by_hand}, reverse=True)
        self._rooms: dict[str, Tensor] = {}

    def differentiate(self, logits: Tensor, rows: slice) -> Tensor:
        """The sum of each loss over some rows, [losses].

        Overwrites the rows' logits [C, V] with the gradient of the scaled sum of all losses.
        """
        if not self._by_autograd:
            return self._differentiate_by_hand(logits, rows)
        inputs = _inputs(self._by_autograd, logits, rows)
        with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
            x = logits.detach().requires_grad_()
            total, more = weighted_sum(x, x.shape[1], *inputs)
            (gradient,) = torch.autograd.grad(total, x)
        if len(self._by_autograd) == len(self._losses):
            logits.copy_(gradient)
            return more
        by_hand, by_autograd = iter(self._differentiate_by_hand(logits, rows)), iter(more)
        logits.add_(gradient)
        sums = [next(by_autograd if loss.target is None else by_hand) for loss, _ in self._losses]
        return torch.stack(sums)

    def differentiate_products(
        self, product: Tensor, bias: Tensor, rows: slice, factor: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of each loss over some rows, [losses], and its gradient, times a factor: fused.

        product: [C, V or more], the logits without the `bias` [V], in the products' dtype; so is
        the gradient, of the scaled sum of all losses.
        """
        inputs = _inputs(self._losses, bias, rows)
        with torch.enable_grad(), torch.autocast(bias.device.type, enabled=False):
            product = product.detach().requires_grad_()
            total, sums = weighted_sum_of_products(product, bias.detach(), *inputs)
            (gradient,) = torch.autograd.grad(total * factor, product)
        return sums, gradient

    def _differentiate_by_hand(self, logits: Tensor, rows: slice) -> Tensor:
        """`differentiate` of the losses that have targets, alone."""
        subtract_largest(logits)
        scaled = self._divided(logits)
        room = partial(self._room, "product", logits)
        dots = [
            cast(Target, loss.target).dot(scaled[loss.temperature], rows, room)
            for loss, _ in self._by_hand
        ]
        totals = {}
        for temperature, values in scaled.items():  # from here on, their exponentials
            of_twice = scaled.get(2 * temperature)
            if of_twice is None:
                values.exp_()
            else:  # their squares, which cost a tenth as much
                torch.mul(of_twice, of_twice, out=values)
            totals[temperature] = values.sum(dim=-1)
        self._to_gradient(scaled, totals, rows)
        sums = [
            ((totals[loss.temperature].log() - dot) * loss.weights[rows]).sum()
            for (loss, _), dot in zip(self._by_hand, dots, strict=True)
        ]
        return torch.stack(sums)

    def _divided(self, logits: Tensor) -> dict[float, Tensor]:
        """The logits by temperature, the highest first; the last one's overwrite `logits`."""
        *higher, last = self._temperatures
        scaled = {
            value: torch.div(logits, value, out=self._room(f"temperature {value}", logits))
            for value in higher
        }
        return {**scaled, last: logits if last == 1.0 else logits.div_(last)}

    def _to_gradient(
        self, exponentials: Mapping[float, Tensor], totals: Mapping[float, Tensor], rows: slice
    ) -> None:
        """Overwrite the last exponentials with the gradient of all losses that have targets."""
        for temperature, values in exponentials.items():
            factors = [
                (cast(Target, loss.target), loss.weights[rows] * (scale / temperature))
                for loss, scale in self._by_hand
                if loss.temperature == temperature
            ]
            share = torch.stack([factor for _, factor in factors]).sum(0) / totals[temperature]
            values.mul_(share[:, None])
            for target, factor in factors:
                target.subtract(values, rows, factor)
        *others, gradient = exponentials.values()
        for other in others:
            gradient.add_(other)

    def _room(self, name: str, like: Tensor) -> Tensor:
        if name not in self._rooms or len(self._rooms[name]) < len(like):
            self._rooms[name] = torch.empty_like(like)
        return self._rooms[name][: len(like)]


_Inputs = tuple[
    list[Callable[..., Tensor]],
    list[int],
    list[Tensor | None],
    list[tuple[Tensor, ...]],
    list[Tensor],
    list[Tensor],
]


def _inputs(scaled: Sequence[_Scaled], like: Tensor, rows: slice) -> _Inputs:
    """The arguments of `weighted_sum` for some losses, beside the logits."""
    losses = [loss for loss, _ in scaled]
    values = dict.fromkeys(loss.temperature for loss in losses if not loss.of_logits)
    divisors = [None if value == 1.0 else like.new_full((), value) for value in values]
    return (
        [loss.function for loss in losses],
        [0 if loss.of_logits else 1 + [*values].index(loss.temperature) for loss in losses],
        divisors,
        [tuple(loss.operands(rows)) for loss in losses],
        [loss.weights[rows] for loss in losses],
        [like.new_full((), scale) for _, scale in scaled],
    )


def weighted_sum(
    logits: Tensor,
    vocabulary: int,
    functions: Sequence[Callable[..., Tensor]],
    read: Sequence[int],
    temperatures: Sequence[Tensor | None],
    operands: Sequence[tuple[Tensor, ...]],
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The scaled sum of losses of logits [C, V or more] over rows, and each loss's own, [losses].

    read: the number of each loss's temperature, from 1, or 0 for logits; temperatures: scalars,
    None for 1; the others: as in `RowLoss`, of each loss.
    """
    scaled = [logits if divisor is None else logits / divisor for divisor in temperatures]
    of_losses = [logits, *(F.log_softmax(x, dim=-1) for x in scaled)]
    if logits.shape[1] > vocabulary:
        of_losses = [x[:, :vocabulary] for x in of_losses]
    sums = [
        (weight * function(of_losses[number], *others)).sum()
        for function, number, others, weight in zip(functions, read, operands, weights, strict=True)
    ]
    total = torch.stack([scale * loss for scale, loss in zip(scales, sums, strict=True)]).sum()
    return total, torch.stack([loss.detach() for loss in sums])


@fused
def weighted_sum_of_products(product: Tensor, bias: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """`weighted_sum` of the logits that a product [C, V or more] and the bias [V] make.

    What exceeds the vocabulary gets the probability 0.
    """
    excess = product.shape[1] - len(bias)
    logits = product.to(bias.dtype) + F.pad(bias, (0, excess), value=ABSENT)
    return weighted_sum(logits, len(bias), *inputs)


@dataclass(frozen=True)
class _Labels:
    """One label for each row, int64 [P, 1]."""

    labels: Tensor

    def dot(self, scaled: Tensor, rows: slice, room: Room) -> Tensor:
        return scaled.gather(1, self.labels[rows]).squeeze(1)

    def subtract(self, gradient: Tensor, rows: slice, factors: Tensor) -> None:
        gradient.scatter_add_(1, self.labels[rows], -factors[:, None].to(gradient.dtype))


@dataclass(frozen=True)
class TeacherTarget:
    """A teacher's distribution, whose entropy is subtracted."""

    distribution: Distribution
    temperature: float

    def dot(self, scaled: Tensor, rows: slice, room: Room) -> Tensor:
        p, negative_entropy = self.distribution.at(rows, self.temperature)
        return torch.mul(p, scaled, out=room()).sum(dim=-1) - negative_entropy

    def subtract(self, gradient: Tensor, rows: slice, factors: Tensor) -> None:
        p, _ = self.distribution.at(rows, self.temperature)
        gradient.addcmul_(p, factors[:, None].to(gradient.dtype), value=-1)
