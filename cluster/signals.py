"""Stop requests by signal: a flag that the training loop polls between steps."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def hang_up_is_stop() -> bool:
    """Whether SIGHUP counts as a stop request; under nohup it is ignored."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


class StopRequest:
    """Remembers the first SIGTERM, SIGINT or SIGUSR1; a second SIGINT interrupts at once.

    SIGHUP, sent when the terminal closes, is a stop request too, except under nohup. As a context
    manager it restores the previous handlers. The local launcher starts its ranks with these
    signals blocked; the constructor unblocks them. So a signal that arrives during imports is
    neither lost nor fatal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupts = 0
        numbers = [*STOP_SIGNALS] + [signal.SIGHUP] * hang_up_is_stop()
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def requested(self) -> bool:
        """Whether a stop has been requested."""
        return self.signal is not None

    def restore(self) -> None:
        """Restore the previous handlers."""
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
