"""What the processes of a run and the commands about it agree on."""

from __future__ import annotations

STOPPED = 75  # the exit code of a process that has saved and stopped on request
USUAL_ROWS = 10  # the usual interval is the mean over this many rows of metrics

_LEAST_TIMEOUT = 300.0
_FIRST_TIMEOUT = 1800.0


def stall_timeout(usual: float | None) -> float:
    """Seconds after which a run without a new row of metrics has stalled.

    usual: the usual seconds between its rows; None before the first one.
    """
    return _FIRST_TIMEOUT if usual is None else max(_LEAST_TIMEOUT, 10 * usual)
