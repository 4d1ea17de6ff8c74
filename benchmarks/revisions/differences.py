"""What differs between two runs' results, to the last bit or by more than a tolerance."""

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
    found: dict[tuple[str, str], Difference] = {}
    for place in sorted({*old, *new}):
        name = (place.kind, place.name)
        if name not in found and not _is_same(place, old, new, within):
            found[name] = Difference(place, *_shown(place, old, new))
    return list(found.values())


def _is_same(place: Place, old: Results, new: Results, within: float) -> bool:
    if place not in old or place not in new:
        return False
    one, other = old[place], new[place]
    if within and _is_near(_floats(one), _floats(other), within):
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one == other
    return repr(one) == repr(other)  # tells -0.0 from 0.0


def _is_near(one: NDArray[Any] | None, other: NDArray[Any] | None, within: float) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool(norm(one - other) <= within * norm(one))


def _floats(result: Result) -> NDArray[Any] | None:
    """The floating-point numbers of a result in float64; None: it has others."""
    values = result.values if isinstance(result, Tensor) else np.asarray(result)
    return values.astype(np.float64) if values.dtype.kind == "f" else None


def _shown(place: Place, old: Results, new: Results) -> tuple[str, str]:
    one, other = (results.get(place, "absent") for results in (old, new))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _tensors(one, other)
    return _text(one), _text(other)


def _tensors(one: Tensor, other: Tensor) -> tuple[str, str]:
    """Their first elements that differ, and how many do."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or len(one.data) != len(other.data):
        return _text(one), _text(other)
    width = one.values.itemsize
    bits = [np.frombuffer(t.data, np.uint8).reshape(-1, width) for t in (one, other)]
    (changed,) = np.nonzero((bits[0] != bits[1]).any(axis=1))
    first = changed[0]
    where = f"(element {first}; {len(changed)} of {len(one.values)} differ)"
    return f"{one.values[first]}", f"{other.values[first]} {where}"


def _text(result: Result) -> str:
    if isinstance(result, Tensor):
        return f"{result.dtype} of {len(result.values)} elements, shape {list(result.shape)}"
    return str(result)
