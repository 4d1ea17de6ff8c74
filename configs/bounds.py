"""What the numbers of a section may be."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

COUNT = (1, 2**53)  # larger whole numbers have no float of their own
INDEX = (0, 2**53)
ROWS = (1, 2**31)  # of a batch
_ABOVE_ZERO = math.ulp(0.0)
SECONDS = (_ABOVE_ZERO, 1e9)  # more overflow the timers of the system
HOURS = (_ABOVE_ZERO, 1e6)  # a century
WEIGHT = (0.0, 1e6)
GIGABYTES = (0.0, 1e9)


def positive(most: float) -> tuple[float, float]:
    """Above 0, and no more than this."""
    return _ABOVE_ZERO, most


def require_bounds(section: Any, **bounds: tuple[float, float]) -> None:
    """Raise ValueError, beginning with the key, for a number that is not in its (least, most).

    Of a list, and of values by step, each counts; a key that is None is not looked at.
    """
    for key, (least, most) in bounds.items():
        for value in _numbers(getattr(section, key)):
            if not least <= value <= most:
                raise ValueError(f"{key}: must be {_words(least, most)}, not {value}")


def require_choice(section: Any, **choices: Collection[Any]) -> None:
    """Raise ValueError, beginning with the key, for a value that is none of its choices."""
    for key, allowed in choices.items():
        if getattr(section, key) not in allowed:
            there = ", ".join(map(str, allowed))
            raise ValueError(f"{key}: must be one of {there}, not {getattr(section, key)}")


def _numbers(value: Any) -> Collection[float]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else [] if value is None else [value]


def _words(least: float, most: float) -> str:
    if least == _ABOVE_ZERO:
        return f"positive, and at most {most:g}"
    return f"at least {least:g}" if most >= 2**53 else f"{least:g} to {most:.10g}"
