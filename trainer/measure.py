"""Instruments: the time of a step by part, traces of steps, facts about a process.

Only steps that will be logged are timed. On a GPU, events are recorded in its stream and read long
after the step, so nothing has to wait; on a CPU the wall clock is used.

Collectives are timed by a wrapper around DeepSpeed's backend, and charged to the learner that is
running. Their time is part of the pass that they run in: reductions are part of the backward pass,
gathering parameters is part of the step. On a GPU, a reduction on its own stream may overlap with
computation; the parts then add up to more than the step.
"""

import contextlib
import functools
import itertools
import logging
import os
import platform
import re
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from configs.progress import counted
from configs.rules import Matches
from configs.section import Refusal, Section
from trainer.learner_names import COMMUNICATION

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_base",
    "all_gather_coalesced",
)

Instant = float | torch.cuda.Event


class StepClock:
    """Times parts of a step while it is `running`."""

    def __init__(self) -> None:
        self.running = False
        self._most = 0
        self._learner = ""
        self._spans: dict[tuple[str, str], list[tuple[Instant, Instant]]] = defaultdict(list)
        self._sent: dict[str, int] = defaultdict(int)
        self._peaks: dict[str, int] = defaultdict(int)

    @functools.cached_property
    def _on_gpu(self) -> bool:
        """Read when the device of the process has been chosen."""
        return torch.cuda.is_available()

    @contextlib.contextmanager
    def part(self, learner: str, part: str) -> Iterator[None]:
        """A pass of `learner`, to be timed; communication meanwhile is charged to it."""
        self._learner = learner
        if self._on_gpu:
            self._most = self.most_bytes()
            torch.cuda.reset_peak_memory_stats()
        begun = self._now()
        yield
        self._spans[learner, part].append((begun, self._now()))
        if self._on_gpu:
            self._peaks[learner] = max(self._peaks[learner], torch.cuda.max_memory_allocated())
        self._learner = ""

    @contextlib.contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """A collective over tensors of `size` bytes."""
        if not self._learner:
            yield
            return
        begun = self._now()
        yield
        self._spans[self._learner, COMMUNICATION].append((begun, self._now()))
        self._sent[self._learner] += size

    def take(self) -> dict[str, float]:
        """The metrics of the timed step, by key; resets the clock. On a GPU it waits for the step.

        ``LEARNER/seconds_PART`` and ``LEARNER/bytes_communication``, and on a GPU
        ``LEARNER/bytes_peak``, the peak of allocated memory while the learner was running.
        """
        if self._on_gpu and self._spans:
            torch.cuda.synchronize()
        row: dict[str, float] = {}
        for (learner, part), spans in self._spans.items():
            row[f"{learner}/seconds_{part}"] = sum(_between(*span) for span in spans)
        for learner, size in self._sent.items():
            row[f"{learner}/bytes_communication"] = size
        for learner, peak in self._peaks.items():
            row[f"{learner}/bytes_peak"] = peak
        for kept in (self._spans, self._sent, self._peaks):
            kept.clear()
        return row

    def most_bytes(self) -> int:
        """The peak of allocated bytes so far: on the GPU or, without one, of this process."""
        if not self._on_gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(self._most, torch.cuda.max_memory_allocated())

    def _now(self) -> Instant:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# One clock per process, because DeepSpeed's collectives are global too.
clock = StepClock()


class TimedBackend:
    """Wraps DeepSpeed's communication backend, and times its collectives."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        for name in COLLECTIVES:
            if method := getattr(backend, name, None):
                setattr(self, name, _timed(method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def watch_collectives() -> None:
    """Let the clock time DeepSpeed's collectives."""
    import deepspeed.comm.comm  # late: the report reads the names of the parts without it

    if not isinstance(deepspeed.comm.comm.cdb, TimedBackend):
        deepspeed.comm.comm.cdb = TimedBackend(deepspeed.comm.comm.cdb)


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not clock.running:
            return method(*arguments, **keywords)
        with clock.sending(_size([*arguments, *keywords.values()])):
            return method(*arguments, **keywords)

    return call


def _size(arguments: list[Any]) -> int:
    """The bytes of the largest argument: a gather's result, or a scatter's input."""
    sizes = [0]
    for argument in arguments:
        tensors = argument if isinstance(argument, list | tuple) else [argument]
        sizes.append(sum(part.nbytes for part in tensors if isinstance(part, Tensor)))
    return max(sizes)


def _between(begun: Instant, ended: Instant) -> float:
    if isinstance(begun, float):
        assert isinstance(ended, float)
        return ended - begun
    return 1e-3 * begun.elapsed_time(ended)  # type: ignore[arg-type]


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
        self.begin()

    def begin(self) -> None:
        """Time from here on. The launcher calls this again before it starts the ranks once more."""
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
    stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    began = int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


@dataclass
class ProfileConfig(Section):
    """A trace of some steps, for chrome://tracing or https://ui.perfetto.dev."""

    steps: Annotated[
        str,
        Matches(r"(\d+:\d+)?", "two steps, as in 100:103"),
        "The steps to trace, A:B without B, as in `100:103`; empty: none.",
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
