"""A request to stop, as a flag that the training loop polls between steps."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def hang_up_is_stop() -> bool:
    """Whether SIGHUP is to be heeded: nohup has it ignored."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


class StopRequest:
    """Remembers the first of SIGTERM, SIGINT, SIGUSR1; a second SIGINT interrupts at once.

    A terminal that is closed (SIGHUP) asks for a stop too, but not under nohup, which ignores it.
    As a context manager it puts the previous handlers back. The local launcher starts its children
    with these signals blocked, and installing unblocks them: one that came while the process was
    still importing is not lost, and does not kill it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupts = 0
        numbers = [*STOP_SIGNALS] + [signal.SIGHUP] * hang_up_is_stop()
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
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
