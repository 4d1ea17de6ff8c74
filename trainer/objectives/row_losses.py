"""Losses of rows of logits over the vocabulary: ordinary functions of log-probabilities.

log_q: a student's, log_p: a teacher's, [C, V], float32 or wider. Labels: int64 [C], -100 where
there is nothing to predict. A loss function returns the loss of each row, [C]. Autograd
differentiates it inside a chunk of rows; the two losses that most students have also have a
gradient written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import NO_LABEL
from trainer.vocabulary_projection import Distribution, subtract_largest

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
    """A loss of some rows: ``weights[rows] * function(log_q [C, V] at a temperature, rows)``.

    weights: float32 [P] of all rows; of_logits: the function reads the logits themselves, not
    their log-probabilities. With a `target` the loss is also
    ``w (log sum exp s - target . s)``, s = logits / T, and its gradient is written by hand,
    ``w / T (softmax(s) - target)``: by autograd, a student's step with both losses that have one
    took 14% longer (benchmarks/LIMITS.md).
    """

    function: Callable[[Tensor, slice], Tensor]
    weights: Tensor
    temperature: float = 1.0
    target: Target | None = None
    of_logits: bool = False


def cross_entropy_rows(labels: Tensor, smoothing: float = 0.0) -> RowLoss:
    """`cross_entropy` with labels [P] of all rows."""
    target = None if smoothing else _Labels(labels.clamp_min(0)[:, None])
    weights = (labels != NO_LABEL).to(torch.float32)
    return RowLoss(
        lambda log_q, rows: cross_entropy(log_q, labels[rows], smoothing), weights, target=target
    )


def kl_divergence_rows(teacher: Distribution, temperature: float, weights: Tensor) -> RowLoss:
    """`kl_divergence` from a teacher at a temperature; `weights` float [P] of all rows."""
    return RowLoss(
        lambda log_q, rows: kl_divergence(log_q, teacher.log_at(rows, temperature)),
        weights.detach().to(torch.float32),
        temperature,
        TeacherTarget(teacher, temperature),
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
    return torch.linalg.vecdot(log_p.exp(), log_p - log_q)


class RowLosses:
    """Several losses of the same logits, each multiplied by its scale."""

    def __init__(self, losses: Sequence[RowLoss], scales: Sequence[float]) -> None:
        self._losses, self._scales = losses, scales
        by_hand = [number for number, loss in enumerate(losses) if loss.target is not None]
        self._by_autograd = [number for number, loss in enumerate(losses) if loss.target is None]
        self._order = [*by_hand, *self._by_autograd]
        self._by_hand = _ByHand(
            [losses[number] for number in by_hand], [scales[number] for number in by_hand]
        )

    def differentiate(self, logits: Tensor, rows: slice) -> Tensor:
        """The sum of each loss over some rows, [losses].

        Overwrites the rows' logits [C, V] with the gradient of the scaled sum of all losses.
        """
        if not self._by_autograd:
            return self._by_hand.differentiate(logits, rows)
        more, gradient = self._differentiate_by_autograd(logits, rows)
        if len(self._by_autograd) == len(self._losses):
            logits.copy_(gradient)
            return torch.stack(more)
        sums = [*self._by_hand.differentiate(logits, rows).unbind(), *more]
        logits.add_(gradient)
        return torch.stack([sums[self._order.index(number)] for number in range(len(sums))])

    def _differentiate_by_autograd(
        self, logits: Tensor, rows: slice
    ) -> tuple[list[Tensor], Tensor]:
        losses = [self._losses[number] for number in self._by_autograd]
        scales = [self._scales[number] for number in self._by_autograd]
        temperatures = {loss.temperature for loss in losses if not loss.of_logits}
        with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
            x = logits.detach().requires_grad_()
            log_q = {t: F.log_softmax(x if t == 1.0 else x / t, dim=-1) for t in temperatures}
            read = [x if loss.of_logits else log_q[loss.temperature] for loss in losses]
            sums = [
                (loss.weights[rows] * loss.function(given, rows)).sum()
                for loss, given in zip(losses, read, strict=True)
            ]
            scaled = [scale * total for scale, total in zip(scales, sums, strict=True)]
            (gradient,) = torch.autograd.grad(torch.stack(scaled).sum(), x)
        return [total.detach() for total in sums], gradient


class _ByHand:
    """Losses of the same logits that have targets, each multiplied by its scale.

    Losses of one temperature share the softmax, which is most of their cost, and no target is
    copied. Memory is reused between calls: on a CPU, allocating it costs more than the work itself.
    """

    def __init__(self, losses: Sequence[RowLoss], scales: Sequence[float]) -> None:
        self._losses, self._scales = losses, scales
        # The last temperature overwrites the logits.
        self._temperatures = sorted({loss.temperature for loss in losses}, reverse=True)
        self._rooms: dict[str, Tensor] = {}

    def differentiate(self, logits: Tensor, rows: slice) -> Tensor:
        """The sum of each loss over some rows, [losses].

        Overwrites the rows' logits [C, V] with the gradient of the scaled sum of all losses.
        """
        subtract_largest(logits)
        scaled = {
            temperature: self._divided(logits, temperature) for temperature in self._temperatures
        }
        room = partial(self._room, "product", logits)
        dots = [
            cast(Target, loss.target).dot(scaled[loss.temperature], rows, room)
            for loss in self._losses
        ]
        exponentials = _exponentials(scaled)
        totals = {temperature: values.sum(dim=-1) for temperature, values in exponentials.items()}
        self._to_gradient(exponentials, totals, rows)
        sums = [
            ((totals[loss.temperature].log() - dot) * loss.weights[rows]).sum()
            for loss, dot in zip(self._losses, dots, strict=True)
        ]
        return torch.stack(sums)

    def _divided(self, logits: Tensor, temperature: float) -> Tensor:
        """The logits divided by a temperature; the last temperature's overwrite the logits."""
        is_last = temperature == self._temperatures[-1]
        if is_last and temperature == 1.0:
            return logits
        out = logits if is_last else self._room(f"temperature {temperature}", logits)
        return torch.div(logits, temperature, out=out)

    def _to_gradient(
        self, exponentials: Mapping[float, Tensor], totals: Mapping[float, Tensor], rows: slice
    ) -> None:
        """Overwrite the last exponentials with the gradient of all losses."""
        for temperature, values in exponentials.items():
            factors = [
                (cast(Target, loss.target), loss.weights[rows] * (scale / temperature))
                for loss, scale in zip(self._losses, self._scales, strict=True)
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


def _exponentials(scaled: dict[float, Tensor]) -> dict[float, Tensor]:
    """Exponentials by temperature, the highest first; they overwrite the logits.

    Those of half a temperature are the squares of its exponentials, which cost a tenth as much.
    """
    for temperature, logits in scaled.items():
        twice = scaled.get(2 * temperature)
        if twice is None:
            logits.exp_()
        else:
            torch.mul(twice, twice, out=logits)
    return scaled


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
