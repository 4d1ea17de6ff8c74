"""Durations: the time that a run has left, and how a duration is written."""

from __future__ import annotations


def seconds_left(
    step: int, steps: int, pace: float, seconds: float, hours: float | None
) -> float | None:
    """The time left, in seconds, of a run with a limit of `steps` and perhaps `hours` of training.

    `pace` is in seconds per step; `seconds` is the training time so far. None when the run is done.
    """
    left = (steps - step) * pace
    if hours is not None:
        left = min(left, hours * 3600.0 - seconds)
    return left if left > 0 else None


def duration(seconds: float) -> str:
    """A duration as text: 0:42, 12:05, 3:04:05, 2 days 3:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} day{'s' * (days > 1)} {hour}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
