"""Just-in-time compilation of loops over bytes and words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable)


def compiled(function: Function) -> Function:
    """Compile a function of numbers and arrays to machine code on its first call.

    `numba` caches the machine code on disk: beside the module or, if that folder is not writable,
    in the user's cache. It compiles again only when the function's own module changes, and keeps
    constants and called functions as they were. So a constant that another module of this project
    defines must be passed as an argument, and a compiled function must stand in the module of its
    callers. Arguments are numbers, arrays and plain tuples: the cache names the classes of others,
    and breaks when one is renamed.
    """
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # neither folder is writable
        return cast(Function, numba.njit(function))


@contextmanager
def interruptible() -> Iterator[None]:
    """Re-raise the KeyboardInterrupt that `numba` turns into a SystemError."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while cause := cause and cause.__cause__:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
        raise
