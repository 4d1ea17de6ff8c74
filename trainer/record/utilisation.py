"""MFU: the share of the devices' peak that the models' matrix products reach.

Counted are the forward and backward products of the models (`model.flops_per_token`) over the
tokens that were trained on, padding excluded; a frozen teacher has no backward. Matrix
products of the losses beyond the learner's own projection, and recomputation, are not counted. The
peak is the maker's dense rate for the learner's precision (``configs/device``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from configs.devices import DeviceConfig, device_named
from data_pipeline import DataConfig
from model import describe
from trainer.learner_config import LearnerConfig


def known_device(device: torch.device) -> DeviceConfig | None:
    """The facts of the device; None for a CPU, or a GPU that has no file."""
    return device_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def seconds_at_peak(
    learners: Iterable[LearnerConfig], data: DataConfig, step: int, device: DeviceConfig
) -> float:
    """Seconds that a device at its peak would need for a token of `step` in all `learners`."""
    starts = [0, *(phase.from_step for phase in data.phases)]
    lengths = [length for length, _ in data.lengths_and_packings()]
    length = lengths[sum(start <= step for start in starts) - 1]
    total = 0.0
    for one in learners:
        size = describe(one.architecture, length, data.masking.rate_at(step))
        flops = size.flops_per_token_forward if one.frozen else size.flops_per_token
        total += flops / device.flops(one.precision)
    return total
