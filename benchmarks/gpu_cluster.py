"""The section `cluster` of `gpu.py`: the step of `bert_large_cluster`, and where its time goes."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import configs
from benchmarks.gpu_facts import Row
from benchmarks.learners import MASKED_FRACTION, masked_batch
from benchmarks.turns import median_seconds, seconds_of, wall_clock
from model import describe
from trainer.batch_config import StepShape
from trainer.config import JobConfig
from trainer.learners.learner import Learner
from trainer.record.gauges import known_device
from trainer.rehearsal import rehearsal
from trainer.step import train_step

ON_GPU = torch.cuda.is_available()
TURNS = 10 if ON_GPU else 1
SHOWN = 45  # kernels in a table


CUDNN = (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)  # MATH: where cuDNN has no such kernel
ARMS = (("bf16_weights", ()), ("fp8", ()), ("bf16_weights", CUDNN), ("bf16", ()))


def cluster(device: torch.device) -> Iterator[Row]:
    """The step of `bert_large_cluster` on one card, in three precisions, and its kernels."""
    job = configs.load("bert_large_cluster", JobConfig, "job", ["data.path=none"])
    job = job if ON_GPU else rehearsal(job, 60)
    rows, length = (job.batch.micro_batch, job.data.sequence_length) if ON_GPU else (4, 32)
    batch = masked_batch(rows, length, job.teacher.model.vocab_size)
    shape = StepShape(job.steps, 0, rows, 1)
    for precision, attention in ARMS:
        torch.compiler.reset()  # compiled code keeps its kernel of attention
        teacher, *students = (
            Learner(
                name, dataclasses.replace(config, precision=precision), job.teacher.model, shape
            )
            for name, config in job.learners.items()
        )
        for company in ([], students):
            step = partial(train_step, teacher, company, batch, 0)
            flops = rows * length * sum(flops_per_token(length, x) for x in (teacher, *company))
            kind = f"{precision}, cuDNN attention" if attention else precision
            what = f"bert_large_cluster, {rows} x {length}, {kind}, T+{len(company)}"
            with sdpa_kernel([*attention]) if attention else contextlib.nullcontext():
                yield what, pace(step, flops, device) + kernels(step, what)
        del teacher, students, step, company


def pace(step: Callable[[], object], flops: float, device: torch.device) -> str:
    """A step's time and MFU: that the GPU ends first, one right after another, and the host's."""
    synced = median_seconds({"step": step}, TURNS, wall_clock)["step"]

    def in_succession() -> None:
        for _ in range(TURNS):
            step()

    wall_clock()
    times = []
    for _ in range(TURNS):
        times.append(seconds_of(step, time.perf_counter))
        wall_clock()  # a full queue would make the host wait
    each = seconds_of(in_succession, wall_clock) / TURNS
    host = statistics.median(times)
    return (
        f"{1e3 * synced:.1f} ms, MFU {mfu(flops / synced, device)}; in succession "
        f"{1e3 * each:.1f} ms, MFU {mfu(flops / each, device)}; host {1e3 * host:.1f} ms"
    )


def mfu(flops_per_second: float, device: torch.device) -> str:
    """MFU relative to the device's bf16 peak; "-" where the peak is unknown."""
    known = known_device(device)
    return f"{flops_per_second / known.flops('bf16'):.1%}" if known else "-"


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
