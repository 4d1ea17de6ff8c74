"""Loops over bytes and words, compiled when they are first called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt for one within a call, of which `numba` makes a SystemError."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while cause := cause and cause.__cause__:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
        raise
