"""What the numbers of a section may be."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

COUNT = (1, 2**53)  # larger whole numbers have no float of their own
INDEX = (0, 2**53)
ROWS = (1, 2**31)  # of a batch
SECONDS = (math.ulp(0.0), 1e9)  # more overflow the timers of the system
POSITIVE = (math.ulp(0.0), math.inf)
NOT_NEGATIVE = (0.0, math.inf)


def require_bounds(section: Any, **bounds: tuple[float, float]) -> None:
    """Raise ValueError, beginning with the key, for a number that is not in its (least, most).

    A key that is None is not looked at.
    """
    for key, (least, most) in bounds.items():
        value = getattr(section, key)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{key}: must be {_words(least, most)}, not {value}")


def require_choice(section: Any, **choices: Collection[Any]) -> None:
    """Raise ValueError, beginning with the key, for a value that is none of its choices."""
    for key, allowed in choices.items():
        if getattr(section, key) not in allowed:
            there = ", ".join(map(str, allowed))
            raise ValueError(f"{key}: must be one of {there}, not {getattr(section, key)}")


def _words(least: float, most: float) -> str:
    if least == math.ulp(0.0):
        return "positive" if most == math.inf else f"positive, and at most {most:g}"
    return f"at least {least:g}" if most >= 2**53 else f"{least:g} to {most:.10g}"
