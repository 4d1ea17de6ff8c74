"""While a checkpoint is copied, optimizer steps wait; forward and backward passes do not.

Only the optimizer's step changes weights and moments. So training does not wait if the copy is
faster than the next forward and backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer


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
