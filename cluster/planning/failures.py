"""Failures, checkpoints, and the fraction of time that is left for training.

The best interval between checkpoints is Daly's first-order one (Future Generation Computer Systems
22, 2006; Young 1974 without the second term): ``sqrt(2 d M) - d``, where a checkpoint costs d and
a failure comes every M on average. Checkpoints are written in the background. So d is only the time
that training stalls, and the interval is at least the time of writing.

The expected figures come from simulating the run, under these assumptions. Failures are random, at
a constant rate per node, and end the whole job. A spare node is available. Every restart takes the
same time; a failure during a restart begins it again. The steps since the last written checkpoint
are lost. Nothing else interrupts the job.

With very many failures all runs are alike, and the mean replaces the simulation. It is Daly's
complete solution (equation 20), with restarts that may fail and checkpoints that count once they
are written: ``M exp(R/M) (exp((t + d)/M) - 1) exp(w/M) W/t``.
"""

import math
import random
import statistics
from dataclasses import dataclass

HOUR = 3600.0
RUNS = 200
MANY_FAILURES = 2000  # per run; above it the mean is used
SEED = 1


@dataclass(frozen=True)
class Reliability:
    """The cost of failures. Times are in seconds."""

    mtbf: float  # of the whole job
    stall: float  # of training, for each checkpoint
    write: float  # until a checkpoint is complete on storage
    best_interval: float
    failures: float  # expected in the run
    effective: float  # fraction of the time spent on steps that are not lost
    effective_p5: float  # its 5th percentile over runs


@dataclass(frozen=True)
class Starts:
    """A run under a time limit. Times are in seconds."""

    training: float  # in each start but the last
    overhead: float  # of each start: until the first step, and from the warning until it has saved
    count: int


def starts_within(
    limit: float, warning: float, restart: float, saving: float, work: float
) -> Starts | None:
    """The starts that `work` seconds take; None where a start has no time to train."""
    training = limit - warning - restart
    if training <= 0:
        return None
    return Starts(training, restart + saving, math.ceil(work / training))


def best_interval(stall: float, write: float, mtbf: float) -> float:
    """Seconds of training between checkpoints."""
    interval = math.sqrt(2 * stall * mtbf) - stall if stall < mtbf / 2 else mtbf
    return max(interval, write)


def expect(
    work: float, interval: float, stall: float, write: float, mtbf: float, restart: float
) -> Reliability:
    """Simulate runs of `work` seconds of steps, with a checkpoint every `interval` seconds."""
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
        effective_p5=work / longest,
    )


def _exp(exponent: float) -> float:
    """`math.exp`, but infinity instead of an overflow."""
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
    """Simulate one run: its duration in seconds, and its number of failures."""
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
    """Seconds until training runs again, including failed restarts."""
    spent = 0.0
    while (life := generator.expovariate(1 / mtbf)) < seconds:
        spent += life
    return spent + seconds
