"""Failures, checkpoints and the time that is left for training.

The best interval between checkpoints is Daly's first-order one (Future Generation Computer Systems
22, 2006; Young 1974 without the second term): ``sqrt(2 d M) - d`` for a checkpoint that costs d and
a failure every M, on average. Checkpoints here are written while training goes on, so d is only
how long training stands still, and an interval is at least the time of writing.

What is expected comes from simulating the run. Assumed: failures come at random at a constant rate
per node and end the whole job; a spare node is there; every restart takes the same time, and
failures in it start it again; what was made since the last checkpoint that had been written is
lost; nothing else interrupts the job.

Where so many failures are to be expected that each run is like any other, the mean stands for the
simulation: Daly's complete solution (equation 20), with restarts that may fail and checkpoints that
count once they are written, ``M exp(R/M) (exp((t + d)/M) - 1) exp(w/M) W/t``.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

HOUR = 3600.0
RUNS = 200
MANY_FAILURES = 2000  # in a run
SEED = 1


@dataclass(frozen=True)
class Reliability:
    """What failures cost. Times in seconds, shares of the whole time."""

    mtbf: float  # of the whole job
    stall: float  # that a checkpoint costs
    write: float  # until it is safe
    best_interval: float
    failures: float  # expected in the run
    effective: float  # share of the time that makes steps that stay
    usual: float  # the least of it in 19 of 20 runs


def best_interval(stall: float, write: float, mtbf: float) -> float:
    """Seconds of training between checkpoints."""
    interval = math.sqrt(2 * stall * mtbf) - stall if stall < mtbf / 2 else mtbf
    return max(interval, write)


def expect(
    work: float, interval: float, stall: float, write: float, mtbf: float, restart: float
) -> Reliability:
    """What becomes of `work` seconds of steps with a checkpoint every `interval` seconds of it."""
    attempts = (_exp((interval + stall) / mtbf) - 1) * _exp(write / mtbf) * work / interval
    starts = attempts * _exp(restart / mtbf)
    if starts > MANY_FAILURES:
        failures, mean = attempts, mtbf * starts
        longest = mean
    else:
        generator = random.Random(SEED)
        runs = [
            simulate(work, interval, stall, write, mtbf, restart, generator) for _ in range(RUNS)
        ]
        failures = statistics.fmean(count for _, count in runs)
        mean = statistics.fmean(taken for taken, _ in runs)
        longest = sorted(taken for taken, _ in runs)[int(0.95 * RUNS)]
    return Reliability(
        mtbf=mtbf,
        stall=stall,
        write=write,
        best_interval=best_interval(stall, write, mtbf),
        failures=failures,
        effective=work / mean,
        usual=work / longest,
    )


def _exp(exponent: float) -> float:
    """Infinity where the power is beyond all numbers."""
    return math.exp(exponent) if exponent < 700 else math.inf


def simulate(
    work: float,
    interval: float,
    stall: float,
    write: float,
    mtbf: float,
    restart: float,
    generator: random.Random,
) -> tuple[float, int]:
    """One run: the seconds it takes and its number of failures."""
    done, clock, failures = 0.0, 0.0, 0
    cycle = interval + stall
    while True:
        life = generator.expovariate(1 / mtbf)  # of this attempt
        left = work - done
        needed = left + stall * math.floor(left / interval)
        if life >= needed:
            return clock + needed, failures
        saved = math.floor(max(0.0, life - write) / cycle)
        done += min(left, saved * interval)
        failures += 1
        clock += life + _restart(restart, mtbf, generator)


def _restart(seconds: float, mtbf: float, generator: random.Random) -> float:
    """How long until an attempt runs again, with restarts that fail."""
    spent = 0.0
    while (life := generator.expovariate(1 / mtbf)) < seconds:
        spent += life
    return spent + seconds
