"""Cross-entropies of a distribution over the vocabulary with any kind of target, row by row.

All have the form ``w (log sum exp s - target . s)`` with ``s = logits / T``, and the gradient
``w / T (softmax(s) - target)`` with respect to the logits. Losses of one temperature therefore
share the softmax, which is most of their cost, and no target is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from trainer.losses.vocabulary_projection import Distribution, subtract_largest

IGNORED = -100

Room = Callable[[], Tensor]


class Target(Protocol):
    """What a student's distribution is compared with."""

    def dot(self, scaled: Tensor, rows: slice, room: Room) -> Tensor:
        """``target . s`` [C] plus any constant that the loss subtracts; `scaled` is s, [C, V].

        `room` provides scratch memory of shape [C, V].
        """

    def subtract(self, gradient: Tensor, rows: slice, factors: Tensor) -> None:
        """Subtract ``factors`` [C] times the target from `gradient` [C, V]."""


@dataclass(frozen=True)
class RowLoss:
    """A loss of single rows of logits, each with a weight; `weights` float32 [P]."""

    target: Target
    weights: Tensor
    temperature: float = 1.0


def cross_entropy_rows(labels: Tensor) -> RowLoss:
    """Cross-entropy with labels int64 [P], -100 where there is nothing to predict."""
    return RowLoss(_Labels(labels.clamp_min(0)[:, None]), (labels != IGNORED).to(torch.float32))


def label_smoothed_rows(labels: Tensor, smoothing: float, vocabulary: int) -> RowLoss:
    """Cross-entropy with ``(1 - e) onehot(label) + e / V``, e = `smoothing` (Szegedy et al., 2016).

    labels int64 [P], -100 where there is nothing to predict. As torch's cross-entropy has it: the
    label has a share of e too.
    """
    alone = cross_entropy_rows(labels)
    return RowLoss(_Blend(_Uniform(vocabulary), alone.target, smoothing), alone.weights)


def kl_divergence_rows(teacher: Distribution, temperature: float, weights: Tensor) -> RowLoss:
    """``KL(softmax(t / T) || softmax(s / T))``; weights float [P]."""
    target = _Teacher(teacher, temperature, subtract_entropy=True)
    return RowLoss(target, weights.detach().to(torch.float32), temperature)


def soft_cross_entropy_rows(
    teacher: Distribution, temperature: float, weights: Tensor, teacher_temperature: float
) -> RowLoss:
    """``-softmax(t / T') . log softmax(s / T)``, T' = `teacher_temperature`; weights float [P]."""
    target = _Teacher(teacher, teacher_temperature, subtract_entropy=False)
    return RowLoss(target, weights.detach().to(torch.float32), temperature)


def blended_cross_entropy_rows(
    teacher: Distribution, labels: Tensor, teacher_fraction: float
) -> RowLoss:
    """``-(a softmax(t) + (1 - a) onehot(label)) . log softmax(s)`` with a = `teacher_fraction`."""
    alone = cross_entropy_rows(labels)
    theirs = _Teacher(teacher, 1.0, subtract_entropy=False)
    return RowLoss(_Blend(theirs, alone.target, teacher_fraction), alone.weights)


class RowLosses:
    """Several losses of the same logits, each multiplied by its scale.

    Memory is reused between calls: on a CPU, allocating it costs more than the work itself.
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
        scaled = {one: self._divided(logits, one) for one in self._temperatures}
        room = partial(self._room, "product", logits)
        dots = [loss.target.dot(scaled[loss.temperature], rows, room) for loss in self._losses]
        exponentials = _exponentials(scaled)
        totals = {one: values.sum(dim=-1) for one, values in exponentials.items()}
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
                (loss.target, loss.weights[rows] * (scale / temperature))
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
class _Uniform:
    """Every token alike, of a vocabulary of this size."""

    vocabulary: int

    def dot(self, scaled: Tensor, rows: slice, room: Room) -> Tensor:
        return scaled.mean(dim=-1)

    def subtract(self, gradient: Tensor, rows: slice, factors: Tensor) -> None:
        gradient.sub_(factors[:, None].to(gradient.dtype) / self.vocabulary)


@dataclass(frozen=True)
class _Teacher:
    """A teacher's distribution; for a KL divergence its entropy is subtracted."""

    distribution: Distribution
    temperature: float
    subtract_entropy: bool

    def dot(self, scaled: Tensor, rows: slice, room: Room) -> Tensor:
        p, negative_entropy = self.distribution.at(rows, self.temperature)
        dot = torch.mul(p, scaled, out=room()).sum(dim=-1)
        return dot - negative_entropy if self.subtract_entropy else dot

    def subtract(self, gradient: Tensor, rows: slice, factors: Tensor) -> None:
        p, _ = self.distribution.at(rows, self.temperature)
        gradient.addcmul_(p, factors[:, None].to(gradient.dtype), value=-1)


@dataclass(frozen=True)
class _Blend:
    """A mixture of two targets."""

    one: Target
    other: Target
    share: float

    def dot(self, scaled: Tensor, rows: slice, room: Room) -> Tensor:
        one, other = (target.dot(scaled, rows, room) for target in (self.one, self.other))
        return torch.lerp(other, one, self.share)

    def subtract(self, gradient: Tensor, rows: slice, factors: Tensor) -> None:
        self.one.subtract(gradient, rows, factors * self.share)
        self.other.subtract(gradient, rows, factors * (1 - self.share))
