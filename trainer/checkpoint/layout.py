"""An engine's state, for every engine type of DeepSpeed: its pieces on this rank, and its scalars.

ZeRO flattens a parameter group into one tensor and partitions it over the ranks. A rank optimizes
its *holder*: the flat fp32 master partition, which is also the key of the optimizer's state. A
:class:`Piece` is a range of a named parameter, with its place in a holder. Saving, loading and
gathering use pieces, and do not depend on the ZeRO stage.

A learner's scalars are those of the optimizer, the engine's counters and the fp16 loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


FROZEN = -1  # the group of a tensor that no optimizer owns: a frozen parameter or a buffer
_COMPILED = "_orig_mod."  # torch.compile adds it to names
_Names = Mapping[Tensor, str]
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Piece:
    """The range ``[start, start + numel)`` of one named tensor, flattened, that this rank holds."""

    name: str
    shape: tuple[int, ...]
    group: int  # number of the optimizer's parameter group, or FROZEN
    holder: Tensor  # the tensor that holds the values; a key of optimizer.state unless FROZEN
    offset: int  # where the range begins in holder.view(-1)
    start: int
    numel: int  # 0: this rank holds nothing of the tensor
    replicated: bool  # True: every rank holds the whole

    @property
    def total(self) -> int:
        """Elements in the whole tensor."""
        return prod(self.shape)

    def of(self, tensor: Tensor) -> Tensor:
        """This piece's elements [numel] of the holder, or of a state tensor of the same shape."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


def layout(engine: DeepSpeedEngine) -> list[Piece]:
    """One piece for every parameter and persistent buffer of the engine's module, in a fixed order.

    Raises:
        NotImplementedError: for an unsupported optimizer wrapper or placement.
    """
    named = {_plain(name): parameter for name, parameter in engine.module.named_parameters()}
    names = {parameter: name for name, parameter in named.items()}
    optimized = list(_optimized(engine.optimizer, names))
    seen = {piece.name for piece in optimized}
    frozen = [_frozen(name, p) for name, p in named.items() if name not in seen]
    buffers = [_whole(name, FROZEN, b) for name, b in _buffers(engine.module)]
    return optimized + frozen + buffers


def share(pieces: Iterable[Piece], rank: int, world_size: int) -> list[Piece]:
    """The pieces that this rank stores: its partitions, and its share of the replicated tensors.

    Replicated tensors are concatenated and cut into ``world_size`` equal ranges, so that every
    element is written exactly once.
    """
    pieces = list(pieces)
    total = sum(piece.total for piece in pieces if piece.replicated)
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    kept, at = [], 0
    for piece in pieces:
        if piece.replicated:
            first, last = max(at, low) - at, min(at + piece.total, high) - at
            at += piece.total
            offset = piece.offset + first
            piece = replace(piece, offset=offset, start=first, numel=max(last - first, 0))
        if piece.numel:
            kept.append(piece)
    return kept


def torch_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer | None:
    """The torch optimizer inside DeepSpeed's wrapper; None for an engine without training."""
    if engine.optimizer is None or _kind(engine.optimizer) == "DeepSpeedZeRoOffload":
        return None
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def refresh(engine: DeepSpeedEngine) -> None:
    """Update all tensors that DeepSpeed derives from the master weights; collective under ZeRO."""
    wrapper = engine.optimizer
    kind = _kind(wrapper)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        flats = zip(
            wrapper.fp16_partitioned_groups_flat, wrapper.fp32_partitioned_groups_flat, strict=True
        )
        for low, master in flats:  # the parameters' partitions are views of `low`
            low.data.copy_(master.data)
        wrapper.invalidate_secondary_tensor()
        wrapper.checkpoint_event_prologue()  # drops the gathered parameters, which are stale
        wrapper.checkpoint_event_epilogue()  # gathers the small, persistent parameters again
    elif kind == "DeepSpeedZeRoOffload":
        wrapper.partition_all_parameters()
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
    elif kind == "DeepSpeedZeroOptimizer":
        wrapper.update_lp_params()
    elif kind == "MasterOptimizer":
        wrapper.round_masters()


def _optimized(wrapper: Any, names: _Names) -> Iterator[Piece]:
    if _kind(wrapper) in _WRAPPERS:
        return _WRAPPERS[_kind(wrapper)](wrapper, names)
    if isinstance(wrapper, torch.optim.Optimizer):
        return _plain_torch(wrapper, names)
    raise NotImplementedError(f"checkpoints do not support DeepSpeed's {_kind(wrapper)}")


def _none(wrapper: Any, names: _Names) -> Iterator[Piece]:
    """An engine without an optimizer: every parameter is frozen."""
    return iter(())


def _plain_torch(optimizer: torch.optim.Optimizer, names: _Names) -> Iterator[Piece]:
    """Stage 0 in float32: DeepSpeed steps the optimizer itself."""
    for group, settings in enumerate(optimizer.param_groups):
        for p in settings["params"]:
            yield _whole(names[p], group, p)


def _stage_0_masters(optimizer: Any, names: _Names) -> Iterator[Piece]:
    """Stage 0 in 16 bit: a float32 master for each parameter."""
    named = {master: names[parameter] for parameter, master in optimizer.masters.items()}
    for group, settings in enumerate(optimizer.param_groups):
        for master in settings["params"]:
            yield _whole(named[master], group, master)


def _stage_1_and_2(wrapper: Any, names: _Names) -> Iterator[Piece]:
    # round_robin_* is the order in the flat tensor, with or without `round_robin_gradients`;
    # DeepSpeed's own `_hp_mapping` is wrong with it.
    for group, flat in enumerate(wrapper.single_partition_of_fp32_groups):
        low = dist.get_rank(wrapper.real_dp_process_group[group]) * flat.numel()
        order = wrapper.round_robin_bit16_groups[group]
        for p, at in zip(order, wrapper.round_robin_bit16_offsets[group], strict=True):
            yield _cut(names[p], p, group, flat, at, low)


def _stage_3(wrapper: Any, names: _Names) -> Iterator[Piece]:
    subgroups = zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True)
    for number, (flat, parameters) in enumerate(subgroups):
        if wrapper._swappable_optimizer_subgroup(number):
            raise NotImplementedError("checkpoints do not support optimizer states on NVMe")
        group = wrapper.sub_group_to_group_id[number]
        for p in parameters:
            _, offset, size = wrapper.grad_position[wrapper.get_param_id(p)]
            start = min(wrapper._get_param_partition_rank(p) * size, p.ds_numel)
            numel = min(size, p.ds_numel - start)
            yield Piece(names[p], tuple(p.ds_shape), group, flat, offset, start, numel, False)


_WRAPPERS: dict[str, Callable[[Any, _Names], Iterator[Piece]]] = {
    "NoneType": _none,
    "DeepSpeedZeRoOffload": _none,
    "MasterOptimizer": _stage_0_masters,
    "DeepSpeedZeroOptimizer": _stage_1_and_2,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
}


def _kind(wrapper: Any) -> str:
    return type(wrapper).__name__


def _plain(name: str) -> str:
    return name.replace(_COMPILED, "")


def _whole(name: str, group: int, holder: Tensor) -> Piece:
    return Piece(name, tuple(holder.shape), group, holder, 0, 0, holder.numel(), True)


def _cut(name: str, p: Tensor, group: int, flat: Tensor, at: int, low: int) -> Piece:
    """The part of a parameter, at ``[at, at + numel)`` of its group, that is in this rank's flat.

    ``flat`` holds the range ``[low, low + flat.numel())`` of the group.
    """
    first, last = max(at, low), min(at + p.numel(), low + flat.numel())
    if last <= first:
        return Piece(name, tuple(p.shape), group, flat, 0, 0, 0, False)
    return Piece(name, tuple(p.shape), group, flat, first - low, first - at, last - first, False)


def _frozen(name: str, parameter: Any) -> Piece:
    if not hasattr(parameter, "ds_tensor"):
        return _whole(name, FROZEN, parameter)
    size = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    numel = min(size, parameter.ds_numel - start)
    shape = tuple(parameter.ds_shape)
    return Piece(name, shape, FROZEN, parameter.ds_tensor, 0, start, numel, False)


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers, which a state dict contains, by name."""
    transient = {
        f"{prefix}.{key}".lstrip(".")
        for prefix, child in module.named_modules()
        for key in child._non_persistent_buffers_set
    }
    for name, buffer in module.named_buffers():
        if name not in transient:
            yield _plain(name), buffer


@torch.no_grad()
def set_masters(engine: DeepSpeedEngine, values: Mapping[str, Tensor]) -> None:
    """Set the float32 masters of a new engine to `values`, whole and by name.

    The parameters, which the engine has rounded them from, stay as they are.
    """
    for piece in layout(engine):
        if piece.group != FROZEN:
            part = values[piece.name].view(-1).narrow(0, piece.start, piece.numel)
            piece.of(piece.holder).copy_(part)


@torch.no_grad()
def full_state_dict(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The full master weights and persistent buffers of an engine, on every rank; collective.

    The tensors are copies on the CPU; floating point tensors are fp32, at any stage and precision.
    """
    return {piece.name: _gather(piece, engine.device) for piece in layout(engine)}


def _gather(piece: Piece, device: torch.device) -> Tensor:
    local = piece.of(piece.holder)
    if piece.replicated:
        full = local.clone()
    else:
        full = torch.zeros(piece.total, dtype=local.dtype, device=device)
        full[piece.start : piece.start + piece.numel].copy_(local)
        # The pieces do not overlap, so a sum of their bytes is exact (even of -0.0 and NaN).
        dist.all_reduce(full.view(torch.uint8))
    full = full.reshape(piece.shape).cpu()
    return full.float() if full.is_floating_point() else full


def encode_scalar(value: Any) -> dict[str, Any]:
    """Encode a plain value or a one-element tensor as JSON, with the tensor's dtype."""
    if torch.is_tensor(value):
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return {"value": value}


def decode_scalar(encoded: dict[str, Any], device: torch.device) -> Any:
    """The inverse of :func:`encode_scalar`; a tensor is new, on ``device``."""
    if "dtype" in encoded:
        dtype = getattr(torch, encoded["dtype"])
        return torch.tensor(encoded["value"], dtype=dtype, device=device)
    return encoded["value"]


def engine_counters(engine: DeepSpeedEngine) -> dict[str, int]:
    """DeepSpeed's counters of steps and samples."""
    return {name: getattr(engine, name) for name in _COUNTERS}


def restore_counters(engine: DeepSpeedEngine, saved: dict[str, Any]) -> None:
    """Restore the counters. Micro-steps follow the current accumulation."""
    for name in _COUNTERS:
        setattr(engine, name, saved[name])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def loss_scale_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The loss scaler's state; empty without loss scaling."""
    grad_scaler = engine.torch_autocast_z0_gradscaler
    if grad_scaler is not None:
        return dict(grad_scaler.state_dict())
    scaler = _scaler(engine)
    return {name: getattr(scaler, name) for name in _LOSS_SCALE if hasattr(scaler, name)}


def restore_loss_scale(engine: DeepSpeedEngine, saved: dict[str, Any]) -> None:
    """Restore the scaler's state; values that this stage's scaler lacks are ignored."""
    grad_scaler = engine.torch_autocast_z0_gradscaler
    if grad_scaler is not None:
        grad_scaler.load_state_dict({**grad_scaler.state_dict(), **saved})
        return
    scaler = _scaler(engine)
    for name in _LOSS_SCALE:
        if name in saved and hasattr(scaler, name):
            setattr(scaler, name, saved[name])


def _scaler(engine: DeepSpeedEngine) -> Any:
    """ZeRO's scaler object, or stage 0's scale record; None if there is neither."""
    wrapper = engine.optimizer
    return getattr(wrapper, "loss_scaler", getattr(wrapper, "loss_scale_config", None))
