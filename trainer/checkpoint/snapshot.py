"""Copying a learner's state from the engine, and judging from the copy whether it is sound.

While the copy is made, optimizer steps wait; forward and backward passes do not. Only the
optimizer's step changes weights and moments. So training does not wait if the copy is faster than
the next forward and backward pass.

A step can ruin weights although every loss so far was finite. Training from such a checkpoint gives
NaN. So a checkpoint records for each learner the norm of its weights, whether all values are
finite, and its newest held-out loss. It is *suspect* if, for any learner,

- a weight, a value of the optimizer's state or the held-out loss is not finite;
- the held-out loss is more than `LOSS_JUMP` nats above that of the last sound checkpoint;
- the norm per weight has changed by more than a factor of `NORM_JUMP` since the last sound
  checkpoint. This does not count if the learner was evaluated at this very step and its loss has
  not jumped, since norms may double early in training.

The health is computed from the copy in host memory, in the writing thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoint import layout
from trainer.checkpoint.layout import Piece
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Among a parameter's states, those that are not the optimizer's: the weights, and their mean.
MASTER, AVERAGE = "master", "average"
LOSS_JUMP = 0.5  # nats
NORM_JUMP = 2.0  # factor of the norm per weight, since a growing model has more weights
_CHUNK = 2**18  # values that are squared at a time


class Gate:
    """Closed while a copy is made; an optimizer's step waits until it opens."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._guarded: WeakSet[Optimizer] = WeakSet()

    def close(self, optimizers: Iterable[Optimizer]) -> None:
        """Make the steps of these optimizers wait until `open`."""
        self._open.clear()
        for optimizer in optimizers:
            if optimizer not in self._guarded:
                self._guarded.add(optimizer)
                optimizer.register_step_pre_hook(self._wait)

    def open(self) -> None:
        """Let the optimizers step: the copy is complete, or has failed."""
        self._open.set()

    def _wait(self, *step: Any) -> None:
        self._open.wait()


@dataclass(frozen=True)
class Fragment:
    """A contiguous range of one state of one tensor, as stored in a file."""

    name: str
    state: str
    start: int
    numel: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """The fragment's name in the safetensors file."""
        return fragment_key(self.name, self.state, self.start)


def fragment_key(name: str, state: str, start: int) -> str:
    """The name of a fragment in its file."""
    return f"{name}|{state}|{start}"


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of one learner, in host memory, with its description."""

    fragments: list[Fragment]  # in the order of `data`
    data: Tensor  # uint8 [bytes], the fragments back to back
    tensors: dict[str, dict[str, Any]]  # by name: shape, group, scalars (of the holder's state)
    engine: dict[str, Any]  # counters and the loss scaler


@dataclass
class HostBuffer:
    """Host memory, allocated once and reused by every save of a learner."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, size: int, pinned: bool) -> Tensor:
        """uint8 [size], uninitialised."""
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self.memory[:size]


@dataclass(frozen=True)
class PendingSnapshot:
    """A snapshot whose tensors have not been copied yet."""

    sources: list[tuple[Fragment, Tensor]]  # each with its source tensor [numel]
    tensors: dict[str, dict[str, Any]]
    engine: dict[str, Any]
    ready: torch.cuda.Event | None  # after it, sources on a GPU hold the values to save

    @torch.no_grad()
    def copy(self, buffer: HostBuffer) -> Snapshot:
        """Copy the sources, which must not have changed, into ``buffer``. Works in any thread."""
        fragments = [fragment for fragment, _ in self.sources]
        return Snapshot(fragments, self._copied(buffer), self.tensors, self.engine)

    def _copied(self, buffer: HostBuffer) -> Tensor:
        size = sum(fragment.numel * fragment.dtype.itemsize for fragment, _ in self.sources)
        if self.ready is None:
            return self._gather(buffer.take(size, pinned=False))
        device = next(tensor.device for _, tensor in self.sources if tensor.is_cuda)
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda.current_stream().wait_event(self.ready)
            data = self._gather(buffer.take(size, pinned=True))
            torch.cuda.current_stream().synchronize()
        return data

    def _gather(self, data: Tensor) -> Tensor:
        at = 0
        for fragment, tensor in self.sources:
            end = at + fragment.numel * fragment.dtype.itemsize
            data[at:end].view(fragment.dtype).copy_(tensor, non_blocking=True)
            at = end
        return data


def prepare_snapshot(engine: DeepSpeedEngine, rank: int, world_size: int) -> PendingSnapshot:
    """Prepare this rank's snapshot of a learner. Call between optimizer steps."""
    pieces = layout.layout(engine)
    optimizer = layout.torch_optimizer(engine)
    sources = _sources(layout.share(pieces, rank, world_size), optimizer)
    # Widest elements first, so that every fragment is aligned in the buffer.
    sources.sort(key=lambda source: -source[0].dtype.itemsize)
    ready = None
    if any(tensor.is_cuda for _, tensor in sources):
        ready = torch.cuda.Event()
        ready.record()
    return PendingSnapshot(
        sources=sources,
        tensors={piece.name: _describe(piece, optimizer) for piece in pieces},
        engine={**layout.engine_counters(engine), "loss_scale": layout.loss_scale_state(engine)},
        ready=ready,
    )


def elementwise(key: str, value: Any, holder: Tensor) -> bool:
    """Whether an optimizer state has one value per element of the holder."""
    return key != "step" and torch.is_tensor(value) and value.shape == holder.shape


def _state(piece: Piece, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if piece.group == layout.FROZEN or optimizer is None:
        return {}
    return optimizer.state.get(piece.holder, {})


def _sources(
    pieces: Iterable[Piece], optimizer: torch.optim.Optimizer | None
) -> list[tuple[Fragment, Tensor]]:
    """Every fragment to store, with its source tensor [numel]."""
    sources = []
    for piece in pieces:
        states = {
            key: value
            for key, value in _state(piece, optimizer).items()
            if elementwise(key, value, piece.holder)
        }
        for state, tensor in {MASTER: piece.holder, **states}.items():
            fragment = Fragment(piece.name, state, piece.start, piece.numel, tensor.dtype)
            sources.append((fragment, piece.of(tensor)))
    return sources


def _describe(piece: Piece, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    scalars = {}
    for key, value in _state(piece, optimizer).items():
        if elementwise(key, value, piece.holder):
            continue
        if torch.is_tensor(value) and value.numel() != 1:
            raise CheckpointError(
                f"{piece.name}: the optimizer's state {key!r} has shape {list(value.shape)}, "
                "neither that of the parameter nor a single number: it cannot be stored"
            )
        scalars[key] = layout.encode_scalar(value)
    return {"shape": list(piece.shape), "group": piece.group, "scalars": scalars}


@dataclass(frozen=True)
class Portion:
    """Statistics of one rank's part of a learner."""

    squares: float  # sum of the squared weights
    weights: int  # number of weights
    finite: bool  # weights and optimizer states


@dataclass(frozen=True)
class Health:
    """The health of a learner in a checkpoint. Non-finite values are None."""

    finite: bool  # weights and optimizer states
    norm: float | None  # L2, over the weights on all ranks
    weights: int
    evaluated_at: int | None = None  # the step of its newest held-out loss; None before the first
    held_out: float | None = None  # that loss, nats


def measure(snapshot: Snapshot) -> Portion:
    """Compute the statistics of this rank's part of a learner."""
    squares, weights, finite = 0.0, 0, True
    for state, values in _numbers(snapshot):
        finite &= all(math.isfinite(end) for end in values.aminmax())
        if state == MASTER:
            squares, weights = squares + _squares(values), weights + values.numel()
    return Portion(squares, weights, finite)


def _squares(values: Tensor) -> float:
    """Their sum, in float64 without a copy of them all."""
    norms = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in values.split(_CHUNK))
    return math.fsum(float(norm) ** 2 for norm in norms)


def _numbers(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """(state, values [numel]) of the floating point fragments."""
    at = 0
    for fragment in snapshot.fragments:
        end = at + fragment.numel * fragment.dtype.itemsize
        if fragment.dtype.is_floating_point:
            yield fragment.state, snapshot.data[at:end].view(fragment.dtype)
        at = end


def health(portions: Sequence[Portion], evaluation: tuple[int, float] | None) -> Health:
    """A learner's health, from every rank's part and (step, loss) of its newest evaluation."""
    norm = math.sqrt(math.fsum(portion.squares for portion in portions))
    measured = Health(
        finite=all(portion.finite for portion in portions),
        norm=norm if math.isfinite(norm) else None,
        weights=sum(portion.weights for portion in portions),
    )
    if evaluation is None:
        return measured
    step, loss = evaluation
    return replace(measured, evaluated_at=step, held_out=loss if math.isfinite(loss) else None)


def suspicion(step: int, now: Health, before: Health | None) -> str:
    """Why a learner at `step` is suspect; empty if it is sound.

    `before` is its health in the last sound checkpoint, if the learner is in it.
    """
    if not now.finite or now.norm is None:
        return "its weights or optimizer states are not finite"
    if now.evaluated_at is not None and now.held_out is None:
        return f"its held-out loss at step {now.evaluated_at} is not finite"
    if before is None:
        return ""
    if now.held_out is not None and before.held_out is not None:
        if now.held_out > before.held_out + LOSS_JUMP:
            return f"its held-out loss rose from {before.held_out:.3f} to {now.held_out:.3f}"
        if now.evaluated_at == step:
            return ""
    times = _per_weight(now) / (_per_weight(before) or math.inf)
    if 1 / NORM_JUMP <= times <= NORM_JUMP:
        return ""
    return f"the norm of its weights is {times:.3g} times that in the last sound checkpoint"


def _per_weight(learner: Health) -> float:
    return (learner.norm or 0.0) / math.sqrt(max(1, learner.weights))


def suspicions(step: int, now: Mapping[str, Health], before: Mapping[str, Health]) -> str:
    """Why a checkpoint is suspect, with a reason per suspect learner; empty if it is sound."""
    reasons = {name: suspicion(step, learner, before.get(name)) for name, learner in now.items()}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
