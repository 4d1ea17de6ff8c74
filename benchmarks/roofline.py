"""Kernels and the ceiling of MFU of a job's learners, on fake CUDA tensors: no GPU is needed.

    make roofline                                     all shipped jobs
    python benchmarks/roofline.py bert_large_cluster --devices h100 a100_80gb

Every job runs forward, backward and a held-out score in each precision, with and without padding,
as it would on a GPU: a tensor on the wrong device, or an operation whose shape depends on data,
fails. Then follow, in the job's own precision and micro-batch, the kernels of each learner, the
least time that they take, the MFU that this allows, and the MFU if Python launches each in 6 us;
then the same with ``compile: true``, as Inductor fuses the layers. A C++ compiler is needed.
Kernels are taken to reach 70% of the peak in matrix products and 85% of the memory's bandwidth,
and to take 2.5 us at least. Optimizers and communication are left out. MFU is as in
`benchmarks/gpu.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fake_cuda import CUDA, fake_cuda

# isort: split

import torch

import configs
from benchmarks.roofline_compiled import counting
from benchmarks.roofline_kernels import Ceiling, Kernel, Kernels
from configs.devices import DeviceConfig
from configs.loading import SHIPPED
from model import Ability, Features, describe
from trainer.batches import MicroBatch
from trainer.config import JobConfig
from trainer.footprint.fake_step import fake_batch, fake_modules, fake_step
from trainer.learner_config import LearnerConfig
from trainer.learners.module import LearnerModule, Score, Train

PRECISIONS = ("bf16", "fp16", "fp32")
ROWS, LENGTH = 4, 128  # of the runs that only look for faults
# What a shipped job needs to be loaded without its data, or the model that it begins with.
OVERRIDES = {
    "continue": ["data.path=none", "teacher.model=bert_base", "teacher.init.pretrained=null"],
    "ettin_family": [],
    "modernbert_base": [],
    "modernbert_large": ["teacher.init.tile=null"],
}
SHIPPED_JOBS = sorted(path.stem for path in (SHIPPED / "job").glob("*.yaml"))


def main() -> None:
    """Look for faults, then print a table of all jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", nargs="*", default=SHIPPED_JOBS)
    parser.add_argument("--devices", nargs="+", default=["h100", "a100_80gb"])
    given = parser.parse_args()
    devices = {name: configs.load(name, DeviceConfig, "device") for name in given.devices}
    jobs = {name: load(name) for name in given.jobs}
    faults = list(find_faults(jobs))
    print("\n".join(faults))
    print(
        f"{len(faults)} faults in {len(jobs)} jobs, {len(PRECISIONS)} precisions, padded or not\n"
    )
    ways = "kernels", *devices
    print(row("job", "learner", *ways, *(f"compiled: {way}" for way in ways)))
    print("|---" * (2 + 2 * len(ways)) + "|")
    for name, job in jobs.items():
        for line in rows_of(name, job, devices):
            print(line, flush=True)
    sys.exit(bool(faults))


def load(name: str) -> JobConfig:
    """A job by name or file."""
    return configs.load(name, JobConfig, "job", OVERRIDES.get(name, ["data.path=none"]))


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
        name: dataclasses.replace(student, precision=precision)
        for name, student in job.students.items()
    }
    teacher = dataclasses.replace(job.teacher, precision=precision)
    return dataclasses.replace(job, teacher=teacher, students=students)


def run(
    job: JobConfig, rows: int, length: int, is_padded: bool = False, is_compiled: bool = False
) -> dict[str, list[Kernel]]:
    """The kernels of each learner's forward and backward pass.

    Learners are scored as well, unless their layers are compiled.
    """
    kernels = {}
    with fake_cuda() as mode:
        batch = fake_batch(mode.from_tensor, job, rows, length, CUDA, is_padded)
        meter = partial(_Meter, is_compiled=is_compiled)
        modules = fake_modules(job, job.learners, CUDA)
        for name, learner, _ in fake_step(modules, job.learners, batch, meter):
            kernels[name] = [*learner.mode.all]
            if not is_compiled:
                learner.score(job.learners[name], batch)
    return kernels


class _Meter:
    """Runs a learner on the GPU, and collects its kernels."""

    def __init__(self, module: LearnerModule, is_compiled: bool) -> None:
        self.module, self.mode = module, Kernels()
        if is_compiled and not module.model.config.cannot(Ability.COMPILE):
            module.compile_parts(backend=counting())

    def __call__(self, program: Train, batch: MicroBatch) -> Features:
        with self.mode:
            loss, shares, features = self.module(program, batch)
            if loss.requires_grad:
                loss.backward()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        for tensor in (loss, shares, *gradients) if gradients else ():
            assert tensor.device == CUDA, f"a loss or gradient is on {tensor.device}"
        return features

    @torch.no_grad()
    def score(self, config: LearnerConfig, batch: MicroBatch) -> None:
        """Score the learner on the batch."""
        self.module.eval()
        self.module(Score(config.metrics_among([config])), batch)


def rows_of(name: str, job: JobConfig, devices: Mapping[str, DeviceConfig]) -> Iterator[str]:
    """A row of the table for each learner, and one for the joint step."""
    rows, length = job.batch.micro_batch, longest(job)
    ways = run(job, rows, length), run(job, rows, length, is_compiled=True)
    joint = [dict.fromkeys(devices, Ceiling()) for _ in ways]
    for learner, config in job.learners.items():
        if learner not in ways[0]:
            continue
        size = describe(config.architecture, length, job.data.masking.highest_rate)
        per_token = size.flops_per_token_forward if config.frozen else size.flops_per_token
        flops = rows * length * per_token
        cells: list[object] = []
        for kernels, sums in zip(ways, joint, strict=True):
            cells.append(f"{len(kernels[learner]):,}")
            for each, device in devices.items():
                ceiling = Ceiling.of(kernels[learner], device, config.precision, flops)
                sums[each] += ceiling
                cells.append(ceiling)
        yield row(f"{name}, {rows} x {length}", f"{learner}, {config.precision}", *cells)
    if len(ways[0]) > 1:
        totals = (f"{sum(map(len, kernels.values())):,}" for kernels in ways)
        pairs = zip(totals, joint, strict=True)
        yield row(name, "joint step", *(cell for n, sums in pairs for cell in (n, *sums.values())))


def row(*cells: object) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
