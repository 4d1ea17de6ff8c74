"""Host syncs and collectives of a block of code, each with the line that causes it."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.comm.comm
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import measure

ROOT = Path(__file__).parents[2]
# Operators whose result the host must know: for a scalar, or for the shape of what they return.
SYNCHRONISING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "_assert_async",
}
TO_HOST = ("tolist", "cpu", "numpy")  # methods of a tensor that copy it to the host, and wait
COLLECTIVES = (
    *measure.COLLECTIVES,
    "barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "all_to_all",
    "all_to_all_single",
)


def caller() -> str:
    """The innermost line of our code, or DeepSpeed's line if that is further in."""
    frames = traceback.extract_stack()[:-1]
    ours = [i for i, f in enumerate(frames) if _is_ours(f.filename)]
    theirs = [i for i, f in enumerate(frames) if "/deepspeed/" in f.filename]
    lines = [_line(frames[ours[-1]], str(ROOT))] if ours else []
    if theirs and (not ours or theirs[-1] > ours[-1]):
        lines.append(_line(frames[theirs[-1]], "site-packages"))
    return " > ".join(lines)


def _is_ours(file: str) -> bool:
    return file.startswith(f"{ROOT}/") and "/tests/" not in file and "/.venv/" not in file


def _line(frame: traceback.FrameSummary, after: str) -> str:
    return f"{frame.filename.partition(f'{after}/')[2]}:{frame.lineno}"


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        on_host = any(getattr(argument, "_is_on_host", False) for argument in args)
        if function.namespace == "aten" and name in SYNCHRONISING and not on_host:
            self._found[f"{name} {caller()}"] += 1
        return function(*args, **(kwargs or {}))


class CountedOperators(TorchDispatchMode):
    """Counts PyTorch's operators, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_syncs() -> Iterator[Counter[str]]:
    """The places in the block at which the host would wait for its GPU, by kind and line."""
    from tests.gpu_kit.device import waits

    found: Counter[str] = Counter()
    waits.clear()
    with contextlib.ExitStack() as patches:
        for name in TO_HOST:
            patches.enter_context(_counted(torch.Tensor, name, found))
        patches.enter_context(_Operators(found))
        yield found
    found.update(waits)


def _counted(owner: Any, name: str, found: Counter[str]) -> Any:
    kept = getattr(owner, name)

    @functools.wraps(kept)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(args[0], "_is_on_host", False):
            return kept(*args, **kwargs)
        found[f"{name} {caller()}"] += 1
        copy = kept(*args, **kwargs)
        if isinstance(copy, Tensor):
            copy.__dict__["_is_on_host"] = True
        return copy

    return mock.patch.object(owner, name, call)


@dataclass(frozen=True)
class Collective:
    """One call of a collective."""

    name: str
    bytes: int  # of the largest tensor: of a gather the result, of a scatter what is scattered
    line: str


@contextlib.contextmanager
def collectives() -> Iterator[list[Collective]]:
    """The collectives of the block, in order."""
    found: list[Collective] = []
    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(dist, name, _noted(getattr(dist, name), found)))
        several = "allgather_into_tensor_coalesced"
        plain = getattr(dist.ProcessGroup, several)
        patches.enter_context(mock.patch.object(dist.ProcessGroup, several, _noted(plain, found)))
        backend = getattr(deepspeed.comm.comm.cdb, "_backend", deepspeed.comm.comm.cdb)
        # DeepSpeed's backend has looked these up when it was made.
        for name, plain in (
            ("all_gather_function", "all_gather_into_tensor"),
            ("reduce_scatter_function", "reduce_scatter_tensor"),
        ):
            if hasattr(backend, name):
                patches.enter_context(mock.patch.object(backend, name, getattr(dist, plain)))
        yield found


def _noted(collective: Callable[..., Any], found: list[Collective]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = [_bytes(one) for one in (*args, *kwargs.values())]
        found.append(Collective(collective.__name__, max(sizes, default=0), caller()))
        return collective(*args, **kwargs)

    return call


def _bytes(argument: Any) -> int:
    tensors = argument if isinstance(argument, list | tuple) else [argument]
    return sum(one.nbytes for one in tensors if isinstance(one, Tensor))
