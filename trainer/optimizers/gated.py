"""An optimizer whose step can be skipped.

A learner's DeepSpeed engine steps its optimizer once or, at stages 1 to 3, once per parameter
group. A step with a bad loss or gradient must be skipped on all ranks and at every stage, while
DeepSpeed's own bookkeeping continues. The decision is therefore made inside the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GatedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer, whose parameter groups and state it shares, and may skip its steps.

    Once `permitted` is set, it is called before each step. Groups whose learning rate is 0 stay
    untouched: their moments do not advance either.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state
        self.permitted: Callable[[], bool] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the groups whose learning rate is not 0, or nothing if that is not permitted."""
        if self.permitted is None or self.permitted():
            # DeepSpeed changes `param_groups` between its steps.
            self.inner.param_groups = [group for group in self.param_groups if group["lr"]]
            self.inner.step(closure)

    @torch.no_grad()
    def forget(self) -> None:
        """Reset all moments and step counts to zero, in place. Every rank must call it."""
        for state in self.state.values():
            for tensor in state.values():
                tensor.zero_()
