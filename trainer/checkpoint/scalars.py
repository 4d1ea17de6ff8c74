"""A learner's scalars: those of the optimizer, the engine's counters, the fp16 loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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
