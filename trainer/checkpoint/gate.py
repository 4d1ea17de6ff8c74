"""Nothing that is being copied may change: optimizers wait for the copy, training does not.

Weights and moments change in the optimizer's step alone. A copy that begins after one step and is
done before the next costs no time at all if a forward and backward pass take longer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer


class Gate:
    """Closed while a copy is made; whoever steps an optimizer meanwhile waits for it to open."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._guarded: WeakSet[Optimizer] = WeakSet()

    def close(self, optimizers: Iterable[Optimizer]) -> None:
        """Hold these optimizers back from now on, until `open`."""
        self._open.clear()
        for optimizer in optimizers:
            if optimizer not in self._guarded:
                self._guarded.add(optimizer)
                optimizer.register_step_pre_hook(self._wait)

    def open(self) -> None:
        """The copy is made, or given up."""
        self._open.set()

    def wait(self) -> None:
        """Return when everything has been copied."""
        self._open.wait()

    def _wait(self, *step: Any) -> None:
        self.wait()
