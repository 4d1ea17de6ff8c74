"""A request to stop, as a flag that the training loop polls between steps."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Remembers the first of SIGTERM, SIGINT, SIGUSR1; a second SIGINT interrupts at once.

    As a context manager it puts the previous handlers back. The local launcher starts its children
    with these signals blocked, and installing unblocks them: one that came while the process was
    still importing is not lost, and does not kill it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupts = 0
        self._previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def requested(self) -> bool:
        """Whether a stop has been asked for."""
        return self.signal is not None

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)
