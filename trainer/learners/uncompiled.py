"""Training without `torch._dynamo`, torch's compiler, whose import takes seconds.

Torch's optimizers and some of DeepSpeed's functions tell the compiler to keep away from them, and
import it to do so. Where nothing is compiled, a stand-in takes that word.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch

_NAME = "torch._dynamo"


def leave_compiler_out() -> None:
    """From here on, import `torch._dynamo` only for what asks more of it than to keep away.

    Call it after the process group exists, and not where something will be compiled: a function
    that has told the stand-in to keep away has not told the compiler. Without effect where the
    compiler is imported already.
    """
    if _NAME in sys.modules:
        return
    sys.modules[_NAME] = _StandIn(_NAME)
    with mock.patch.object(torch, "compile", lambda function: function):
        # DeepSpeed asks of each optimizer whether it is a Muon; this module compiles a function.
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


class _StandIn(ModuleType):
    """What of `torch._dynamo` an eager step calls; anything else brings in the real one."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Nothing compiles the function."""
        return function

    @staticmethod
    def graph_break(message: str = "") -> None:
        """Nothing records a graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # somebody looks through all modules
        if sys.modules[_NAME] is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
