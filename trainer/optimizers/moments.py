"""The optimizer state of a parameter, the same for every kind, so that a run may switch kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def advance(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Add 1 to the step count of a `parameter`, and create its moments, zeros, where missing.

    Returns the state. Its keys are those of torch's AdamW, which can continue from it.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    return state
