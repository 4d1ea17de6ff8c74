"""Facts about a process: how long it took to its first step, traces of steps, its machine."""

from __future__ import annotations

import itertools
import logging
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.profiler import ProfilerActivity, profile

from configs.progress import counted
from configs.rules import Doc, Matches
from configs.section import Refusal, Section

_log = logging.getLogger(__name__)
_jobs = itertools.count()  # that this process has started: its imports belong to the first
CPU_FACTS = Path("/proc/cpuinfo")
NOISE = re.compile(r"\((?:R|TM)\)| CPU| Processor| @ .*")  # in the names of processors


class Startup:
    """Times the parts of a start, up to the first step, which it logs as one line.

    It is created right after the imports. Where the ranks are forks of the launcher, the launcher
    creates it, and the time counts from the launcher's start, or from here where the launcher has
    started a job before, as for a suite.
    """

    def __init__(self) -> None:
        self._seconds = {"imports": 0.0 if next(_jobs) else _age_of_process()}
        self._last = time.monotonic()
        self._over = False

    def mark(self, part: str) -> None:
        """Note that the part of the start with this name has just ended."""
        now = time.monotonic()
        self._seconds[part] = now - self._last
        self._last = now

    def first_step_is_done(self) -> None:
        """Log the parts; later calls do nothing."""
        if not self._over:
            self._over = True
            self.mark("first step")
            _log.info("%s", self)

    def __str__(self) -> str:
        """`first step 12.3 s after the start: imports 6.0, …`."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._seconds.items())
        total = sum(self._seconds.values())
        return f"first step {total:.2f} s after the start: {parts}"


def _age_of_process() -> float:
    """Seconds since this process began, by the kernel's count (proc(5): stat, field 22)."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


@dataclass
class ProfileConfig(Section):
    """A trace of some steps, for chrome://tracing or https://ui.perfetto.dev."""

    steps: Annotated[
        str,
        Matches(r"(\d+:\d+)?", "two steps, as in 100:103"),
        Doc("The steps to trace, A:B without B, as in `100:103`; empty: none."),
    ] = ""

    def conflicts(self) -> Iterator[Refusal]:
        if self.span and self.span[0] >= self.span[1]:
            yield "steps", f"must be two steps, as in 100:103, not {self.steps!r}"

    @property
    def span(self) -> tuple[int, int] | None:
        """The first step of the trace, and the first that is not in it."""
        if not self.steps:
            return None
        first, _, last = self.steps.partition(":")
        return int(first), int(last)


class Tracer:
    """Traces this rank's steps of the config's span into `file`."""

    def __init__(self, config: ProfileConfig, file: Path) -> None:
        self._span, self._file = config.span, file
        self._profile: Any = None

    def before(self, step: int) -> None:
        """Called before the job's `step`."""
        if self._span is None:
            return
        if self._profile is not None and step >= self._span[1]:
            self.close()
        elif self._profile is None and self._span[0] <= step < self._span[1]:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
            self._profile.start()

    def close(self) -> None:
        """Write the trace to the file."""
        if self._profile is None:
            return
        self._profile.stop()
        self._file.parent.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(self._file))
        _log.warning("a trace of the steps is in %s", self._file)
        self._profile = None


def describe_machine() -> str:
    """This machine, such as "8 x NVIDIA H100, 64 cores, 512 GiB" or "AMD EPYC, 2 cores, 24 GiB".

    Counts only what this process may use.
    """
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {counted(cores, 'core')}, {memory:.0f} GiB"


def _processor() -> str:
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        return f"{count} x {name}" if count > 1 else name
    if CPU_FACTS.exists():
        for line in CPU_FACTS.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return NOISE.sub("", line.partition(":")[2]).strip()
    return platform.machine()
