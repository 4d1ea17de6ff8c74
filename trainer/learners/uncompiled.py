"""Training without `torch._dynamo`, torch's compiler, whose import takes seconds.

Torch's optimizers and some of DeepSpeed's functions import the compiler only to exclude themselves
from it. Where nothing is compiled, a stand-in accepts the exclusion.
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
    """From here on, import `torch._dynamo` only where it is used for more than an exclusion.

    Call it after the process group exists, and only where nothing will be compiled: the compiler
    knows nothing of functions that the stand-in has excluded. Without effect where the compiler is
    imported already.
    """
    if _NAME in sys.modules:
        return
    sys.modules[_NAME] = _StandIn(_NAME)
    import_muon()


def import_muon() -> None:
    """Import DeepSpeed's Muon without compiling its function, which imports torch's inductor.

    DeepSpeed asks of each optimizer whether it is a Muon.
    """
    with mock.patch.object(torch, "compile", lambda function: function):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


class _StandIn(ModuleType):
    """The part of `torch._dynamo` that an eager step calls; anything else imports the real one."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Nothing compiles the function."""
        return function

    @staticmethod
    def graph_break(message: str = "") -> None:
        """Nothing records a graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # something walks through all modules
        if sys.modules[_NAME] is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
