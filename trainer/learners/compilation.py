"""Whether a learner's layers are compiled."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

from model import Ability
from trainer.learner_config import LearnerConfig

LEAST_CAPABILITY = (7, 0)  # of a GPU for which Triton generates kernels


def is_compiled(config: LearnerConfig, device: torch.device) -> bool:
    """Whether `compile` asks for it; by default on a GPU, where the model and the machine allow."""
    if config.compile is not None:
        return config.compile
    allows = config.zero_stage < 3 and not config.model.cannot(Ability.COMPILE)
    return device.type == "cuda" and allows and has_generator(device)


def has_generator(device: torch.device) -> bool:
    """Whether Triton serves this GPU; it needs a C compiler for what launches its kernels."""
    compilers = os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")
    has_triton = find_spec("triton") is not None and any(compilers)
    return has_triton and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
