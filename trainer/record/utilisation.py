"""MFU: model FLOPs utilisation, the fraction of the devices' peak rate (arXiv 2204.02311).

The FLOPs are those of the models' forward and backward matrix products (`model.flops_per_token`)
for the tokens trained on, without padding; a frozen teacher has no backward. Recomputation is not
counted, nor are matrix products of the losses beyond the learner's own projection. The peak is the
manufacturer's dense rate for the learner's precision (``configs/device``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from configs.devices import DeviceConfig, device_named
from data_pipeline import DataConfig
from model import describe
from trainer.learner_config import LearnerConfig


def known_device(device: torch.device) -> DeviceConfig | None:
    """The config of the device; None for a CPU, or a GPU without a file in configs/device."""
    return device_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def seconds_at_peak(
    learners: Iterable[LearnerConfig], data: DataConfig, step: int, device: DeviceConfig
) -> float:
    """Seconds that a device at its peak rate would need per token of `step` in all `learners`."""
    starts = [0, *(phase.from_step for phase in data.phases)]
    lengths = [length for length, _ in data.lengths_and_packings()]
    length = lengths[sum(start <= step for start in starts) - 1]
    total = 0.0
    for one in learners:
        size = describe(one.architecture, length, data.masking.rate_at(step))
        flops = size.flops_per_token_forward if one.frozen else size.flops_per_token
        total += flops / device.flops(one.precision)
    return total
