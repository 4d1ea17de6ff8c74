"""The time that a run has left, and how durations and counts are written."""

from __future__ import annotations


def seconds_left(step: int, steps: int, pace: float, seconds: float, hours: float | None) -> float:
    """The time left, in seconds, of a run with a limit of `steps` and perhaps `hours` of training.

    `pace` is in seconds per step; `seconds` is the training time so far. 0 when the run is done.
    """
    left = (steps - step) * pace
    if hours is not None:
        left = min(left, hours * 3600.0 - seconds)
    return max(0.0, left)


def duration(seconds: float) -> str:
    """A duration in its two largest units: 2d 3h, 5h 10m, 4m 20s, 42s; 0s if clocks disagree."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}h"
    if hours:
        return f"{hours}h {minute}m"
    return f"{minute}m {second}s" if minutes else f"{second}s"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number and what is counted: "1 text", "2,000 texts"; `plural` is for irregular nouns."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
