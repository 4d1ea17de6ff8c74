"""The cost of random kills: a real run whose processes are killed again and again.

    python benchmarks/faults.py CONFIG [KEY=VALUE]... [--minutes 8] [--mtbf 60] [--max-restarts 99]

SIGKILL strikes after exponentially distributed times with a mean of `--mtbf` seconds: one rank, all
ranks or the launcher. The job is started again at once, by the launcher if it lives and has
`--max-restarts`, and in the end stopped politely. Printed
are the share of the time whose steps are part of the final run, the steps that were done in vain,
and where the time between a kill and the next new step goes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.checkpoint.folder import all_steps
from trainer.run_folder import metrics

PARTS = re.compile(r"first step ([\d.]+) s after the start: (.*)")


@dataclass
class Tally:
    """Totals of the whole measurement; times in seconds."""

    kills: int = 0
    steps_done: int = 0  # also those done in vain
    recoveries: list[dict[str, float]] = field(default_factory=list)


class Victim:
    """The job, started and killed."""

    def __init__(self, command: list[str], folder: Path, restarts: int) -> None:
        self.command, self.folder, self.restarts = command, folder, restarts
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def step(self) -> int:
        """The newest logged step."""
        rows = metrics.read(self.folder / "metrics.jsonl")
        return int(rows[-1]["step"]) if rows else 0

    def start(self) -> None:
        """`tandem train`, unless a launcher is left that starts the ranks again by itself."""
        if self.process is not None and self.process.poll() is None:
            return
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def check(self) -> None:
        """End the measurement if the job has ended by itself."""
        assert self.process is not None
        if code := self.process.poll():
            sys.exit(f"faults: exit code {code} of {shlex.join(self.command)}")

    def kill(self, chance: random.Random) -> None:
        """Kill something of it, and wait until its ranks are gone."""
        assert self.process is not None
        pids = [child.pid for child in psutil.Process(self.process.pid).children()]
        launcher = [self.process.pid]
        chosen = chance.choice([launcher, pids, pids[-1:]]) or launcher
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        if not self.restarts or chosen == launcher:
            self.process.wait()
        while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
            time.sleep(0.01)

    def stop(self) -> None:
        """Politely, if it runs."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()

    def parts(self) -> dict[str, float]:
        """Where the newest start spent its time, as rank 0 logged it; empty before its step."""
        text = (self.folder / "logs" / "rank-000.log").read_text()
        *_, newest = PARTS.finditer(text)
        named = (part.rpartition(" ") for part in newest[2].split(", "))
        return {name: float(seconds) for name, _, seconds in named}

    def starts_logged(self) -> int:
        """How many starts have come to their first step."""
        log = self.folder / "logs" / "rank-000.log"
        return len(PARTS.findall(log.read_text())) if log.exists() else 0


def disturb(job: Victim, seconds: float, mtbf: float, chance: random.Random) -> Tally:
    """Run the job for so long under kills; it is running when this returns."""
    tally, end, killed = Tally(), time.monotonic() + seconds, None
    while True:
        strike = time.monotonic() + chance.expovariate(1 / mtbf)
        before, resumed_at = job.starts_logged(), newest_checkpoint(job.folder)
        started = time.monotonic()
        job.start()
        while job.starts_logged() == before and time.monotonic() < min(strike, end):
            job.check()
            time.sleep(0.02)
        if job.starts_logged() > before and killed is not None:
            tally.recoveries.append(recovery(job, killed, started, time.monotonic()))
        time.sleep(max(0.0, min(strike, end) - time.monotonic()))
        if time.monotonic() >= end:
            tally.steps_done += max(0, job.step - resumed_at)
            return tally
        killed = time.monotonic()
        job.kill(chance)
        tally.kills += 1
        if job.starts_logged() > before:
            tally.steps_done += max(0, job.step - resumed_at)


def recovery(job: Victim, killed: float, started: float, stepped: float) -> dict[str, float]:
    """The time from a kill to the first new step, in parts."""
    inside = job.parts()
    return {
        "until all processes were gone": started - killed,
        "beside what the rank's log says": stepped - started - sum(inside.values()),
        **inside,
    }


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max(all_steps(folder / "checkpoints"), default=0)


def report(tally: Tally, seconds: float, final: metrics.Row) -> None:
    """Print what was found."""
    steps = int(final["step"])
    vain = tally.steps_done - steps
    print(f"{tally.kills} kills in {seconds:.0f} s; the run is at step {steps}")
    print(f"time that made lasting progress: {final['seconds'] / seconds:.1%}")
    print(f"steps done in vain: {vain} of {tally.steps_done} ({vain / tally.steps_done:.1%})")
    if not tally.recoveries:
        return
    totals = [sum(parts.values()) for parts in tally.recoveries]
    median = statistics.median
    print(f"from a kill to the next new step, median of {len(totals)}: {median(totals):.1f} s")
    for part in tally.recoveries[0]:
        print(f"  {part}: {median([parts[part] for parts in tally.recoveries]):.2f} s")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--mtbf", type=float, default=60.0, help="seconds")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    runs = Path(tempfile.mkdtemp(prefix="faults-"))
    command = [sys.executable, "-m", "tandem", "train", arguments.config, "steps=10000000"]
    command += [*arguments.overrides, "name=faults", f"output_dir={runs}"]
    command += ["log.every=1", "log.wandb=disabled", "--nproc", str(arguments.nproc)]
    command += ["--max-restarts", str(arguments.max_restarts)]
    job = Victim(command, runs / "faults", arguments.max_restarts)
    began = time.monotonic()
    try:
        chance = random.Random(arguments.seed)
        tally = disturb(job, arguments.minutes * 60, arguments.mtbf, chance)
        seconds = time.monotonic() - began
        final = [row for row in metrics.read(job.folder / "metrics.jsonl") if "seconds" in row][-1]
        report(tally, seconds, final)
    finally:
        job.stop()
        shutil.rmtree(runs)


if __name__ == "__main__":
    main()
