"""An optimizer whose step can be skipped.

A learner's optimizer is stepped by its DeepSpeed engine, once or, at stages 1 to 3, once for each
parameter group. A learner with a bad loss or gradient must be skipped on all ranks at every stage
while DeepSpeed's own bookkeeping goes on, so the decision is taken inside the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GatedOptimizer(torch.optim.Optimizer):
    """Another optimizer behind a gate, with whom it shares parameter groups and state.

    It asks `permitted`, once set, before each step. Groups whose learning rate is 0 stay untouched:
    their moments do not advance either.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state
        self.permitted: Callable[[], bool] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the groups that learn, or none at all when it is not permitted."""
        if self.permitted is None or self.permitted():
            # DeepSpeed puts groups in and out of `param_groups` between its steps.
            self.inner.param_groups = [group for group in self.param_groups if group["lr"]]
            self.inner.step(closure)

    @torch.no_grad()
    def forget(self) -> None:
        """Start afresh: all moments and counts of steps are zero, in place, on every rank alike."""
        for state in self.state.values():
            for tensor in state.values():
                tensor.zero_()
