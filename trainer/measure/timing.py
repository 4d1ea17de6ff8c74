"""The time of a step by part: each learner's forward, backward, step and communication.

Only steps that will be logged are timed. On a GPU, events are recorded in its stream and read long
after the step, so nothing has to wait; on a CPU the wall clock is used.

Collectives are timed by a wrapper around DeepSpeed's backend, and charged to the learner that is
running. Their time is part of the pass that they run in: reductions are part of the backward pass,
gathering parameters is part of the step. On a GPU, a reduction on its own stream may overlap with
computation; the parts then add up to more than the step.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# The parts of a learner's step, as metrics name them.
FORWARD, BACKWARD, STEP, COMMUNICATION = PARTS = ("forward", "backward", "step", "communication")
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
        self._on_gpu = torch.cuda.is_available()
        self._most = 0
        self._learner = ""
        self._spans: dict[tuple[str, str], list[tuple[Instant, Instant]]] = defaultdict(list)
        self._sent: dict[str, int] = defaultdict(int)
        self._peaks: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def part(self, learner: str, part: str) -> Iterator[None]:
        """A pass of `learner`; communication meanwhile is charged to it."""
        if not self.running:
            yield
            return
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
