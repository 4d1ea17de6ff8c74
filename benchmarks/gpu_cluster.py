"""The section `cluster` of `gpu.py`: the step of `bert_large_cluster`, and where its time goes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

import configs
from benchmarks.gpu_facts import Row
from benchmarks.masked_batches import MASKED_FRACTION, masked_batch
from benchmarks.turns import median_seconds, wall_clock
from model import describe
from trainer.batch_config import StepShape
from trainer.config import JobConfig
from trainer.learner_config import LearnerConfig
from trainer.learners.learner import Learner
from trainer.record.gauges import known_device
from trainer.rehearsal import rehearsal
from trainer.step import train_step

ON_GPU = torch.cuda.is_available()
TURNS = 10 if ON_GPU else 1
SHOWN = 45  # kernels in a table


def cluster(device: torch.device) -> Iterator[Row]:
    """The step of `bert_large_cluster` on one card, in two precisions, and its kernels."""
    job = configs.load("bert_large_cluster", JobConfig, "job", ["data.path=none"])
    job = job if ON_GPU else rehearsal(job, 60)
    rows, length = (job.batch.micro_batch, job.data.sequence_length) if ON_GPU else (4, 32)
    batch = masked_batch(rows, length, job.teacher.model.vocab_size)
    shape = StepShape(job.steps, 0, rows, 1)
    for precision in ("bf16", "bf16_weights"):
        teacher, *students = (
            Learner(name, in_precision(one, precision), job.teacher.model, shape)
            for name, one in job.learners.items()
        )
        for company in ([], students):
            step = partial(train_step, teacher, company, batch, 0)
            seconds = median_seconds({"step": step}, TURNS, wall_clock)["step"]
            flops = rows * length * sum(flops_per_token(length, one) for one in (teacher, *company))
            what = f"bert_large_cluster, {rows} x {length}, {precision}, T+{len(company)}"
            yield (
                what,
                f"{1e3 * seconds:.1f} ms, MFU {mfu(flops / seconds, device)}{kernels(step, what)}",
            )
        del teacher, students, step, company


def mfu(flops_per_second: float, device: torch.device) -> str:
    """MFU relative to the device's bf16 peak; "-" where the peak is unknown."""
    known = known_device(device)
    return f"{flops_per_second / known.flops('bf16'):.1%}" if known else "-"


def in_precision(config: LearnerConfig, precision: str) -> LearnerConfig:
    """The learner in this precision."""
    return dataclasses.replace(config, precision=precision)


def flops_per_token(length: int, learner: Learner) -> float:
    """FLOPs of a token in training, in sequences of this length."""
    return describe(learner.config.architecture, length, MASKED_FRACTION).flops_per_token


def kernels(step: Callable[[], object], what: str) -> str:
    """How many kernels a step has and how long they take; a table of them goes to stderr."""
    if not ON_GPU:
        return ""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    events = seen.key_averages()
    on_device = [
        event
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    busy = sum(event.self_device_time_total for event in on_device) / 1e3
    print(what, file=sys.stderr)
    for event in sorted(on_device, key=lambda event: -event.self_device_time_total)[:SHOWN]:
        milliseconds = event.self_device_time_total / 1e3
        print(f"{milliseconds:9.3f} ms {event.count:6d}  {event.key[:140]}", file=sys.stderr)
    return f", {sum(event.count for event in on_device):,} kernels, busy {busy:.1f} ms"
