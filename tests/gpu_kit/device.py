"""A DeepSpeed accelerator that pretends to be asynchronous, so GPU code paths run on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.gpu_kit.counting import caller

waits: Counter[str] = Counter()  # what waits for the device: the kind, and the line that asks


def pretend_gpu(gpu: PretendedGpu | None = None) -> None:
    """From here on, DeepSpeed and `trainer.learners` believe that this process has one GPU."""
    real_accelerator.set_accelerator(gpu or PretendedGpu())
    mock.patch.object(torch.Tensor, "record_stream", _record_stream).start()
    mock.patch("trainer.learners.engine.on_gpu", return_value=True).start()


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """A mock would take longer than what is measured, where DeepSpeed calls it for every rank."""


class Stream:
    """A stream whose work is done as soon as it is submitted."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None:
        waits[f"stream.synchronize {caller()}"] += 1

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """An event of a device that lags behind: never reached yet when the host asks."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        waits[f"event.synchronize {caller()}"] += 1

    def query(self) -> bool:
        return False


class _Inside:
    def __init__(self, stream: Stream) -> None: ...

    def __enter__(self) -> _Inside:
        return self

    def __exit__(self, *_: Any) -> None: ...


_Stream = Stream  # a class by that name is an attribute of DeepSpeed's accelerators


class PretendedGpu(CPU_Accelerator):
    """CPU tensors on a device that DeepSpeed takes to be asynchronous."""

    Stream = Stream
    Event = Event
    _default = Stream()

    def is_synchronized_device(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def stream(self, stream: _Stream) -> _Inside:
        return _Inside(stream)

    def current_stream(self, device_index: int | None = None) -> _Stream:
        return self._default

    def default_stream(self, device_index: int | None = None) -> _Stream:
        return self._default

    def synchronize(self, device_index: int | None = None) -> None:
        waits[f"device.synchronize {caller()}"] += 1
