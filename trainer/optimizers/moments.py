"""What every optimizer here knows of a parameter, so that a run may change its kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def advance(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The moments of a `parameter`, zero at first, and the count of steps, one more than before.

    The keys are those of torch's AdamW, which could go on from them.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    return state
