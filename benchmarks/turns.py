"""Arms of a benchmark that take turns, so that other work on the machine affects all equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

Result = TypeVar("Result")
Clock = Callable[[], float]

# Rounds that do not count: the first allocates and, on a GPU, the first two compile.
UNCOUNTED = 2 if torch.cuda.is_available() else 1


def take_turns(
    arms: Mapping[str, Callable[[], Result]], rounds: int, uncounted: int = UNCOUNTED
) -> dict[str, list[Result]]:
    """The results of each arm in each of `rounds`, after the `uncounted` ones."""
    results: dict[str, list[Result]] = {name: [] for name in arms}
    for turn in range(uncounted + rounds):
        for name, arm in arms.items():
            result = arm()
            if turn >= uncounted:
                results[name].append(result)
    return results


def median_seconds(
    arms: Mapping[str, Callable[[], object]], rounds: int, clock: Clock
) -> dict[str, float]:
    """The median seconds of each arm over `rounds`."""
    timed = {name: partial(seconds_of, arm, clock) for name, arm in arms.items()}
    return medians(take_turns(timed, rounds))


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each arm's results."""
    return {name: statistics.median(values) for name, values in results.items()}


def seconds_of(work: Callable[[], object], clock: Clock) -> float:
    """The seconds that some work takes."""
    began = clock()
    work()
    return clock() - began


def clock_for(threads: int) -> Clock:
    """The clock for this many threads: CPU time for one, wall-clock time for more or on a GPU."""
    return time.process_time if threads == 1 and not torch.cuda.is_available() else wall_clock


def wall_clock() -> float:
    """Seconds of the wall clock, once a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
