"""Kinds of options that click does not have."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number in a range, of which click takes NaN for a part."""

    name = "number"

    def convert(self, value: Any, *context: Any) -> float:
        number: float = super().convert(value, *context)
        if math.isnan(number):
            self.fail(f"{value} is not a number", *context)
        return number


MOST_DIGITS = 18  # of a number that fits into 64 bits


class PlaceName(click.ParamType):
    """A file, a folder, or the name of a run or config: any word but an empty one."""

    name = "path"

    def convert(self, value: Any, *context: Any) -> str:
        """The word as it is."""
        if not value:
            self.fail("must not be empty", *context)
        return str(value)


PLACE = PlaceName()
POSITIVE = Number(0, 1e9, min_open=True)


def slice_of(text: str, separator: str, option: str) -> tuple[int, int]:
    """Two numbers with a separator between them."""
    first, _, last = text.partition(separator)
    if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < MOST_DIGITS):
        raise click.UsageError(f"{option} {text}: must be two numbers, as in 0{separator}4")
    return int(first), int(last)
