"""A learner's state, copied off the engine: the only part of a save that training waits for."""

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
    """A run of elements of one state of one tensor, as it lies in a file."""

    name: str
    state: str
    start: int
    numel: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Its name inside the safetensors file."""
        return fragment_key(self.name, self.state, self.start)


def fragment_key(name: str, state: str, start: int) -> str:
    """How a fragment is called inside its file."""
    return f"{name}|{state}|{start}"


@dataclass(frozen=True)
class Snapshot:
    """What this rank stores of one learner, in host memory, and what all of it means."""

    fragments: list[Fragment]  # in the order of `data`
    data: Tensor  # uint8 [bytes], the fragments back to back
    tensors: dict[str, dict[str, Any]]  # by name: shape, group, scalars (of the holder's state)
    engine: dict[str, Any]  # counters and the loss scaler


@dataclass
class HostBuffer:
    """Host memory that is allocated once and reused by every save of a learner."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, size: int, pinned: bool) -> Tensor:
        """uint8 [size]; its content is whatever was there before."""
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self.memory[:size]


@dataclass(frozen=True)
class Sketch:
    """Everything that a snapshot will be, but for the copying of the large tensors."""

    sources: list[tuple[Fragment, Tensor]]  # each with the tensor [numel] it is copied from
    tensors: dict[str, dict[str, Any]]
    engine: dict[str, Any]
    ready: torch.cuda.Event | None  # after which the sources on a GPU hold what is to be saved

    @torch.no_grad()
    def copy(self, buffer: HostBuffer) -> Snapshot:
        """Copy the sources, which must not have changed, into ``buffer``. In any thread."""
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


def sketch(engine: DeepSpeedEngine, rank: int, world_size: int) -> Sketch:
    """What this rank is to store of a learner. Call between optimizer steps."""
    pieces = layout(engine)
    optimizer = torch_optimizer(engine)
    sources = _sources(share(pieces, rank, world_size), optimizer)
    # Widest elements first, so that every fragment is aligned in the buffer.
    sources.sort(key=lambda source: -source[0].dtype.itemsize)
    ready = None
    if any(tensor.is_cuda for _, tensor in sources):
        ready = torch.cuda.Event()
        ready.record()
    return Sketch(
        sources=sources,
        tensors={piece.name: _describe(piece, optimizer) for piece in pieces},
        engine={**engine_counters(engine), "loss_scale": loss_scale_state(engine)},
        ready=ready,
    )


def elementwise(key: str, value: Any, holder: Tensor) -> bool:
    """Whether an optimizer's state has one number for each of the holder's."""
    return key != "step" and torch.is_tensor(value) and value.shape == holder.shape


def _state(piece: Piece, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if piece.group == FROZEN or optimizer is None:
        return {}
    return optimizer.state.get(piece.holder, {})


def _sources(
    pieces: Iterable[Piece], optimizer: torch.optim.Optimizer | None
) -> list[tuple[Fragment, Tensor]]:
    """Every fragment to store, with the tensor [numel] it is copied from."""
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
                "neither that of the parameter nor one number: it cannot be stored"
            )
        scalars[key] = encode_scalar(value)
    return {"shape": list(piece.shape), "group": piece.group, "scalars": scalars}
