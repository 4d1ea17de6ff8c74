"""Functions of losses that are fused: run through torch.compile in the pass of a compiled learner.

Elsewhere, as on CPUs by default, they run as they are.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Options = Mapping[str, Any]  # of torch.compile

# The options of the enclosing `fusing`.
fusion_options: ContextVar[Options | None] = ContextVar("fusion_options", default=None)


@contextlib.contextmanager
def fusing(options: Options | None) -> Iterator[None]:
    """Compile the functions that `fused` marks with these options; None: do not."""
    token = fusion_options.set(options)
    try:
        yield
    finally:
        fusion_options.reset(token)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function of tensors; one that a marked function calls is compiled as its part.

    A number that changes from step to step must be a tensor: each value would be compiled anew.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        options = fusion_options.get()
        chosen = function if options is None else _compiled(function, **options)
        return chosen(*args, **kwargs)

    return run


@cache
def _compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    return torch.compile(function, **options)
