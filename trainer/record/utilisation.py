"""MFU: model FLOPs utilisation, the fraction of the devices' peak rate (arXiv 2204.02311).

The FLOPs are those of the models' forward and backward matrix products (`model.flops_per_token`)
for the tokens trained on, without padding; a frozen teacher has no backward, and counts too in
steps in which nobody reads it. Recomputation is not counted, nor are matrix products of the losses
beyond the learner's own projection. The peak is the manufacturer's dense rate for the learner's
precision (``configs/device``).
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
    length, _ = data.length_and_packing_at(step)
    total = 0.0
    for one in learners:
        if one.stored is not None:
            continue  # its predictions are read, and it does not run
        size = describe(one.architecture, length, data.masking.rate_at(step))
        flops = size.flops_per_token_forward if one.frozen else size.flops_per_token
        total += flops / device.flops(one.precision)
    return total
