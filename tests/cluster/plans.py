"""What tests of plans start from: a machine, and a learner in round numbers."""

from __future__ import annotations

import configs
from configs.devices import DeviceConfig
from configs.plan_facts import LearnerFacts

H100 = configs.load("h100", DeviceConfig, "device")
TEACHER = LearnerFacts(
    name="teacher",
    zero_stage=0,
    precision="bf16",
    parameters=1_000_000,
    trained=1_000_000,
    bucket=1_000_000,
    forward_flops=1e9,
    backward_flops=2e9,
    kernels=1,
    activations=(0.0, 1e6),
    captured=(0.0, 1e5),
)
