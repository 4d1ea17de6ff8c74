"""Copying a learner's state from the engine: the only part of a save that training waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.layout import FROZEN, Piece, layout, share, torch_optimizer
from trainer.checkpoint.scalars import encode_scalar, engine_counters, loss_scale_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MASTER = "master"  # the name of the weights themselves among a parameter's states


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
    pieces = layout(engine)
    optimizer = torch_optimizer(engine)
    sources = _sources(share(pieces, rank, world_size), optimizer)
    # Widest elements first, so that every fragment is aligned in the buffer.
    sources.sort(key=lambda source: -source[0].dtype.itemsize)
    ready = None
    if any(tensor.is_cuda for _, tensor in sources):
        ready = torch.cuda.Event()
        ready.record()
    return PendingSnapshot(
        sources=sources,
        tensors={piece.name: _describe(piece, optimizer) for piece in pieces},
        engine={**engine_counters(engine), "loss_scale": loss_scale_state(engine)},
        ready=ready,
    )


def elementwise(key: str, value: Any, holder: Tensor) -> bool:
    """Whether an optimizer state has one value per element of the holder."""
    return key != "step" and torch.is_tensor(value) and value.shape == holder.shape


def _state(piece: Piece, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if piece.group == FROZEN or optimizer is None:
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
        scalars[key] = encode_scalar(value)
    return {"shape": list(piece.shape), "group": piece.group, "scalars": scalars}
