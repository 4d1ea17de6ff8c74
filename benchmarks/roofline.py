"""Kernels and the ceiling of MFU of a job's learners, on fake CUDA tensors: no GPU is needed.

    make roofline                                     all shipped jobs, with PyTorch's CUDA build
    python benchmarks/roofline.py bert_large_cluster --device h100 a100_80gb

Every job runs forward, backward and a held-out score in each precision, with and without padding,
as it would on a GPU: a tensor on the wrong device, or an operation whose shape depends on data,
fails. Then follow, in the job's own precision and micro-batch, the kernels of each learner and
their time at best: each at 70% of the peak for matrix products, 85% of the memory's rate, and no
less than 2.5 us; a host that launches one in 6 us may be slower than that. Optimizers and
communication are left out. MFU is as in `benchmarks/gpu.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fake_cuda import CUDA, fake_cuda  # before torch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import configs
from configs.devices import DeviceConfig
from configs.loading import SHIPPED
from model import Features, describe
from trainer.batches import MicroBatch
from trainer.config import JobConfig
from trainer.footprint.fake_step import fake_batch, fake_step
from trainer.learner_config import LearnerConfig
from trainer.learners.module import LearnerModule
from trainer.learners.programs import Score, Train

OF_PEAK, OF_BANDWIDTH = 0.70, 0.85  # what large matrix products and copies reach
SMALLEST, LAUNCH = 2.5e-6, 6e-6  # seconds of the smallest kernel, and of its launch by Python
PRECISIONS = ("bf16", "fp16", "fp32")
ROWS, LENGTH = 4, 128  # of the runs that only look for faults
# Operations that launch nothing: they allocate, or return a view without saying so.
NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh"),
}


def main() -> None:
    """Look for faults, then print a table for each job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shipped = sorted(path.stem for path in (SHIPPED / "job").glob("*.yaml"))
    parser.add_argument("jobs", nargs="*", default=shipped)
    parser.add_argument("--device", nargs="+", default=["h100", "a100_80gb"])
    given = parser.parse_args()
    devices = {name: configs.load(name, DeviceConfig, "device") for name in given.device}
    jobs = {
        name: configs.load(name, JobConfig, "job", ["data.path=none"]) for name in given.jobs
    }
    faults = list(find_faults(jobs))
    print(f"{len(faults)} faults in {len(jobs)} jobs, {len(PRECISIONS)} precisions, padded or not")
    print("\n".join(faults))
    head = (f"ms, ceiling, launched on {name}" for name in devices)
    print(f"| job, learner | kernels | of them small | {' | '.join(head)} |")
    print("|---" * (3 + len(devices)) + "|")
    for name, job in jobs.items():
        for line in table(name, job, devices):
            print(line, flush=True)
    sys.exit(bool(faults))


def find_faults(jobs: Mapping[str, JobConfig]) -> Iterator[str]:
    """A line for each job, precision and padding that does not run on a GPU."""
    for name, job in jobs.items():
        for precision in PRECISIONS:
            for is_padded in (False, True):
                try:
                    run(at_precision(job, precision), ROWS, min(LENGTH, longest(job)), is_padded)
                except Exception as error:
                    how = f"{name}, {precision}, {'' if is_padded else 'not '}padded"
                    yield f"{how}: {type(error).__name__}: {str(error)[:300]}"


def longest(job: JobConfig) -> int:
    """The job's longest sequences."""
    return max(length for length, _ in job.data.lengths_and_packings())


def at_precision(job: JobConfig, precision: str) -> JobConfig:
    """The job with all learners at one precision."""
    students = {
        name: dataclasses.replace(one, precision=precision) for name, one in job.students.items()
    }
    teacher = dataclasses.replace(job.teacher, precision=precision)
    return dataclasses.replace(job, teacher=teacher, students=students)


def run(job: JobConfig, rows: int, length: int, is_padded: bool) -> dict[str, Kernels]:
    """The kernels of forward and backward of each learner; evaluates it as well."""
    found = {}
    with fake_cuda() as mode:
        batch = fake_batch(mode, job, rows, length, CUDA, is_padded)
        for name, meter, _ in fake_step(job, job.learners, batch, _Meter):
            found[name] = meter.mode
            meter.evaluate(job.learners[name], batch)
    return found


class _Meter:
    """Runs a learner on the GPU, and notes its kernels."""

    def __init__(self, module: LearnerModule) -> None:
        self.module, self.mode = module, Kernels()

    def __call__(self, program: Train, batch: MicroBatch) -> Features:
        with self.mode:
            loss, shares, features = self.module(program, batch)
            if loss.requires_grad:
                loss.backward()
        gradients = [one.grad for one in self.module.parameters() if one.grad is not None]
        for tensor in (loss, shares, *gradients):
            if tensor.device != CUDA and self.module.training:
                raise AssertionError(f"a loss or gradient is on {tensor.device}")
        return features

    @torch.no_grad()
    def evaluate(self, config: LearnerConfig, batch: MicroBatch) -> None:
        """Score the learner on the batch."""
        self.module.eval()
        self.module(Score(config.metrics_among([config])), batch)


@dataclass(frozen=True)
class Kernel:
    """One kernel: its name, FLOPs of matrix products, and the bytes it reads and writes."""

    name: str
    flops: int
    bytes: int

    def seconds(self, device: DeviceConfig, precision: str) -> float:
        """Its time at best."""
        computing = self.flops / (OF_PEAK * device.flops(precision))
        moving = self.bytes / (OF_BANDWIDTH * 1e9 * device.memory_bandwidth)
        return max(computing, moving, SMALLEST)


class Kernels(TorchDispatchMode):
    """The kernels that PyTorch launches, one for each operation that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Kernel] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = function.overloadpacket
        name = packet.__name__
        is_kernel = function.namespace in ("aten", "torch_attn") and not function.is_view
        if is_kernel and name not in NO_KERNEL:
            count = flop_registry.get(packet)
            flops = count(*args, **kwargs, out_val=result) if count else 0
            self.all.append(Kernel(name, flops, _bytes(name, (args, kwargs), result)))
        return result


def _bytes(name: str, given: Any, result: Any) -> int:
    """What a kernel reads and writes. A lookup reads only the rows that it returns."""
    if name == "embedding":
        return 2 * int(result.nbytes)
    leaves = [one for one in tree_leaves((given, result)) if isinstance(one, Tensor)]
    parts = {(one.untyped_storage()._cdata, one.storage_offset(), one.numel()): one for one in leaves}
    return sum(one.nbytes for one in parts.values())


def table(name: str, job: JobConfig, devices: Mapping[str, DeviceConfig]) -> Iterator[str]:
    """A row for each learner and one for the joint step."""
    rows, length = job.batch.micro_batch, longest(job)
    kernels = {key: mode.all for key, mode in run(job, rows, length, False).items()}
    tokens, together = rows * length, {each: Ceiling(0.0, 0.0, 0.0) for each in devices}
    for key, config in job.learners.items():
        size = describe(config.architecture, length, job.data.masking.highest_rate)
        flops = tokens * (size.flops_per_token_forward if config.frozen else size.flops_per_token)
        cells = []
        for each, device in devices.items():
            one = Ceiling.of(kernels[key], device, config.precision, flops)
            together[each] += one
            cells.append(str(one))
        small = sum(one.seconds(next(iter(devices.values())), config.precision) == SMALLEST
                    for one in kernels[key])
        who = f"{name} ({rows} x {length}), {key}, {config.precision}"
        print("      ", Counter(one.name for one in kernels[key]).most_common(8), file=sys.stderr)
        yield f"| {who} | {len(kernels[key]):,} | {small:,} | {' | '.join(cells)} |"
    if len(kernels) > 1:
        total = sum(map(len, kernels.values()))
        cells = [str(one) for one in together.values()]
        yield f"| {name}, joint step | {total:,} | | {' | '.join(cells)} |"


@dataclass(frozen=True)
class Ceiling:
    """Seconds at the device's peak, at best on the device, and at best with launches."""

    peak: float
    device: float
    launched: float

    @classmethod
    def of(
        cls, kernels: list[Kernel], device: DeviceConfig, precision: str, flops: float
    ) -> Ceiling:
        """Of one learner, whose model's matrix products take these FLOPs."""
        seconds = sum(one.seconds(device, precision) for one in kernels)
        launched = max(seconds, LAUNCH * len(kernels))
        return cls(flops / device.flops(precision), seconds, launched)

    def __add__(self, other: Ceiling) -> Ceiling:
        return Ceiling(*(a + b for a, b in zip(self._parts, other._parts, strict=True)))

    @property
    def _parts(self) -> tuple[float, float, float]:
        return self.peak, self.device, self.launched

    def __str__(self) -> str:
        of_device, of_launched = self.peak / self.device, self.peak / self.launched
        return f"{1e3 * self.device:.1f}, {of_device:.1%}, {of_launched:.1%}"


if __name__ == "__main__":
    main()
