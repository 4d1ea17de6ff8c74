"""Differences between two runs' results, to the last bit or by more than a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.linalg import norm
from numpy.typing import NDArray

from benchmarks.revisions.results import Place, Result, Results, Tensor


@dataclass(frozen=True)
class Difference:
    """A result that differs: its first place, and what it is in the two revisions."""

    place: Place
    old: str
    new: str

    def __str__(self) -> str:
        place = self.place
        return f"step {place.step}, {place.kind}, {place.name}: {self.old} | {self.new}"


def differences(old: Results, new: Results, within: float = 0.0) -> list[Difference]:
    """One for each name that differs, at its first step; in the order of steps.

    Floating-point numbers and tensors may differ by `within`, relative to their norm; 0: in no bit.
    """
    by_name: dict[tuple[str, str], Difference] = {}
    for place in sorted({*old, *new}):
        name = (place.kind, place.name)
        if name not in by_name and not _is_same(place, old, new, within):
            by_name[name] = Difference(place, *_shown(place, old, new))
    return list(by_name.values())


def _is_same(place: Place, old: Results, new: Results, within: float) -> bool:
    if place not in old or place not in new:
        return False
    ours, theirs = old[place], new[place]
    if within and _is_near(_floats(ours), _floats(theirs), within):
        return True
    if isinstance(ours, Tensor) or isinstance(theirs, Tensor):
        return ours == theirs
    return repr(ours) == repr(theirs)  # tells -0.0 from 0.0


def _is_near(ours: NDArray[Any] | None, theirs: NDArray[Any] | None, within: float) -> bool:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return False
    return bool(norm(ours - theirs) <= within * norm(ours))


def _floats(result: Result) -> NDArray[Any] | None:
    """The floating-point numbers of a result in float64; None: it has others."""
    values = result.values if isinstance(result, Tensor) else np.asarray(result)
    return values.astype(np.float64) if values.dtype.kind == "f" else None


def _shown(place: Place, old: Results, new: Results) -> tuple[str, str]:
    ours, theirs = (results.get(place, "absent") for results in (old, new))
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _tensors(ours, theirs)
    return _text(ours), _text(theirs)


def _tensors(ours: Tensor, theirs: Tensor) -> tuple[str, str]:
    """Their first elements that differ, and how many do."""
    if len({(tensor.dtype, tensor.shape, len(tensor.data)) for tensor in (ours, theirs)}) > 1:
        return _text(ours), _text(theirs)
    width = ours.values.itemsize
    bits = [np.frombuffer(t.data, np.uint8).reshape(-1, width) for t in (ours, theirs)]
    (changed,) = np.nonzero((bits[0] != bits[1]).any(axis=1))
    first = changed[0]
    where = f"(element {first}; {len(changed)} of {len(ours.values)} differ)"
    return f"{ours.values[first]}", f"{theirs.values[first]} {where}"


def _text(result: Result) -> str:
    if isinstance(result, Tensor):
        return f"{result.dtype} of {len(result.values)} elements, shape {list(result.shape)}"
    return str(result)
