"""Training without `torch._dynamo`, torch's compiler, which takes seconds to import.

Torch's optimizers and some of DeepSpeed's functions import the compiler only to exclude themselves
from compilation. Where nothing is compiled, a stand-in serves those calls instead.
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
    """Put a stand-in in place of `torch._dynamo`; any use beyond an exclusion imports the real one.

    Call this after the process group exists, and only where nothing will be compiled: the compiler
    does not know which functions the stand-in has excluded. It has no effect where the compiler
    has already been imported.
    """
    if _NAME in sys.modules:
        return
    sys.modules[_NAME] = _StandIn(_NAME)
    import_muon()


def import_muon() -> None:
    """Import DeepSpeed's Muon without compiling it, which would import torch's inductor.

    DeepSpeed needs the class: it checks every optimizer for being a Muon.
    """
    with mock.patch.object(torch, "compile", lambda function: function):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


class _StandIn(ModuleType):
    """The part of `torch._dynamo` that an eager step uses; anything else imports the real one."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return the function as it is: nothing would compile it."""
        return function

    @staticmethod
    def graph_break(message: str = "") -> None:
        """Do nothing: no graph is being recorded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # some callers inspect every loaded module
        if sys.modules[_NAME] is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
