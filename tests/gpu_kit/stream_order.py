"""What precedes what on a device, told by vector clocks: all that a GPU's streams promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from tests.gpu_kit.device import PretendedGpu, pretend_gpu
from tests.gpu_kit.engine_step import deep_learner
from tests.trainer import tiny
from trainer.batches import to_micro_batches
from trainer.checkpoint.layout import refresh
from trainer.learners import zero
from trainer.step import train_step

Clock = Counter[int]  # by the number of a stream: how much of its work is known to be done


class Read(NamedTuple):
    """A gather of partitioned parameters: on the device's own stream, and after their update?"""

    on_default_stream: bool
    is_after_update: bool


class ClockedStream:
    """A stream that begins a piece of work when everything it has waited for is done."""

    _number = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        ClockedStream._number += 1
        self.number, self.clock = ClockedStream._number, Clock()

    def work(self) -> int:
        """Submit a piece of work; returns how many this stream has had."""
        self.clock |= ClockedGpu.host
        self.clock[self.number] += 1
        return self.clock[self.number]

    def wait_stream(self, other: ClockedStream) -> None:
        self.clock |= other.clock

    def wait_event(self, event: ClockedEvent) -> None:
        self.clock |= event.clock

    def synchronize(self) -> None:
        ClockedGpu.host |= self.clock

    def record_event(self, event: ClockedEvent | None = None) -> ClockedEvent:
        event = event or ClockedEvent()
        event.record(self)
        return event


class ClockedEvent:
    """A point in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def record(self, stream: ClockedStream | None = None) -> None:
        self.clock = Clock((stream or ClockedGpu.streams[-1]).clock)

    def synchronize(self) -> None:
        ClockedGpu.host |= self.clock

    def query(self) -> bool:
        return False  # nobody may count on a device that is quick


class ClockedGpu(PretendedGpu):
    """A pretended GPU with one stream that work goes to unless another is chosen."""

    Stream = ClockedStream  # type: ignore[assignment]
    Event = ClockedEvent  # type: ignore[assignment]
    host = Clock()
    streams = [ClockedStream()]  # noqa: RUF012  the default one, then those chosen inside each other

    @contextmanager
    def stream(self, stream: ClockedStream) -> Iterator[None]:  # type: ignore[override]
        self.streams.append(stream)
        yield
        self.streams.pop()

    def current_stream(self, device_index: int | None = None) -> Any:
        return self.streams[-1]

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.streams[0]

    def synchronize(self, device_index: int | None = None) -> None:
        self.streams[0].synchronize()


def gathers_at_stage_3(steps: int) -> list[list[Read]]:
    """The gathers of each step but the first, by a learner whose reductions overlap.

    Those of a forward pass after the weights have been written otherwise come last.
    """
    pretend_gpu(ClockedGpu())
    learner = deep_learner(3, layers=3)
    assert learner.engine.zero_overlap_comm()
    wrapper, gather = learner.engine.optimizer, zero._gather
    updates, reads = Clock(), []
    update = wrapper._reassign_or_swap_out_partitioned_parameters

    def note() -> None:  # that partitions have been written
        stream = ClockedGpu.streams[-1]
        updates[stream.number] = stream.work()

    def updating(group: int) -> None:
        update(group)
        note()

    def gathering(*arguments: Any) -> Any:
        stream = ClockedGpu.streams[-1]
        stream.work()
        reads.append(Read(stream is ClockedGpu.streams[0], updates <= stream.clock))
        return gather(*arguments)

    by_step = []
    with mock.patch.object(zero, "_gather", gathering):
        wrapper._reassign_or_swap_out_partitioned_parameters = updating
        for step in range(steps):
            reads.clear()
            train_step(learner, [], tiny.random_batch(1, 2), step)
            by_step.append([*reads])
        reads.clear()
        wrapper.invalidate_secondary_tensor = note  # called next
        refresh(learner.engine)
        batch = next(iter(to_micro_batches(tiny.random_batch(1, 2), 2, learner.device)))
        learner.evaluate(batch)
    return [*by_step[1:], reads]
