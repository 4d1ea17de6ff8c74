"""Lengths of time: what a run has left, and how people write it."""

from __future__ import annotations


def seconds_left(
    step: int, steps: int, pace: float, seconds: float, hours: float | None
) -> float | None:
    """How long a run of `steps`, or of `hours` of training, will go on; None when it is done.

    `pace` is in seconds per step, `seconds` how long it has been trained.
    """
    left = (steps - step) * pace
    if hours is not None:
        left = min(left, hours * 3600.0 - seconds)
    return left if left > 0 else None


def duration(seconds: float) -> str:
    """A length of time as people write it: 0:42, 12:05, 3:04:05, 2 days 3:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} day{'s' * (days > 1)} {hour}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
