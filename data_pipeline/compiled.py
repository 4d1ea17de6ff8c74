"""Loops over bytes and words, compiled when they are first called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable)


def compiled(function: Function) -> Function:
    """A function of numbers and arrays as machine code.

    It is kept on disk, which makes the first call of later processes quick, beside the module or,
    where that folder is not writable, in the user's cache. It is made again when its own module
    changes, not when others do: what may change there must be an argument.
    """
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # none of these can be written to
        return cast(Function, numba.njit(function))
