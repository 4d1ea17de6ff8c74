"""How long a job takes from `tandem train` to its first step, and where that time goes.

    python benchmarks/startup.py configs/job/demo.yaml data.path=CORPUS --nproc 2 --starts 5
    python benchmarks/startup.py ... --checkout OTHER    the same with the code of another checkout

Each start is a new run in a folder of its own; it is ended after its first logged step, so let
`log.every` be 1. The clock is only worth something on an idle machine; processor time is that of
all processes of the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

LIMIT = 300.0  # seconds for one start


def main() -> None:
    """Print seconds and processor seconds of each start, and their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    given = parser.parse_args()
    words = [str(given.job.resolve()), *given.overrides, "--nproc", str(given.nproc)]
    starts = [start(given.checkout.resolve(), words) for _ in range(given.starts)]
    for (clock, processor), parts in starts:
        print(f"{clock:6.2f} s by the clock, {processor:6.2f} s of processor time; {parts}")
    clock = statistics.median(times[0] for times, _ in starts)
    processor = statistics.median(times[1] for times, _ in starts)
    print(f"{clock:6.2f} s by the clock, {processor:6.2f} s of processor time: medians")


def start(checkout: Path, words: list[str]) -> tuple[tuple[float, float], str]:
    """(seconds, processor seconds) to the first step, and their parts as rank 0 logs them."""
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        began = time.monotonic()
        process = psutil.Popen(
            [sys.executable, "-m", "tandem", "train", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
        )
        try:
            while not any(map(has_rows, Path(folder).glob("runs/*/metrics.jsonl"))):
                if process.poll() is not None or time.monotonic() > began + LIMIT:
                    sys.exit("the job has ended, or made no step in time")
                time.sleep(0.01)
            seconds = time.monotonic() - began
            processor = sum(map(processor_seconds, [process, *process.children(recursive=True)]))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                process.terminate()
            process.wait(LIMIT)
        (log,) = Path(folder).glob("runs/*/logs/rank-000.log")
        (parts,) = (line for line in log.read_text().splitlines() if "first step " in line)
        return (seconds, processor), parts.rpartition("the start: ")[2]


def has_rows(metrics: Path) -> bool:
    """Whether a step has been logged."""
    return metrics.stat().st_size > 0


def processor_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process, and of its children that have ended, so far."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


if __name__ == "__main__":
    main()
