"""Measures a GPU: speed, savings of joint training, host syncs, ZeRO, checkpoints, resumption.

    python benchmarks/gpu.py [--only speed syncs] [--out figures] [--minutes 8]

It ends after 8 minutes on one card, whatever is left, and leaves `gpu_facts.json` (which
`gpu_facts.py` adopts into the pages), `gpu.md` and the logs of a real job and of the GPU tests.
With two or more cards, two ranks run all sections but `speed`, `joint` and `cluster`. Tokens are
random, 15% masked; no padding, no dropout, bf16, AdamW. Arms take turns; medians are reported. MFU
is the models' FLOPs (`model.describe`) over the vendor's dense peak. `transformers` is
BertForMaskedLM with SDPA under ``torch.compile``. Without a GPU, everything runs at toy size to
check that it works; its figures are meaningless.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_facts
from benchmarks.cotraining_speed import forward, learn
from benchmarks.gpu_cluster import ON_GPU, TURNS, cluster, mfu
from benchmarks.gpu_facts import Row
from benchmarks.gpu_runs import job, tests
from benchmarks.learners import (
    MASKED_FRACTION,
    Size,
    Step,
    batch_of,
    our_step,
    student,
    teacher,
    transformers_step,
)
from benchmarks.turns import median_seconds, wall_clock
from cluster.ranks import Ranks, export, free_port
from model import describe
from tests.gpu_kit.joint_step import SYNCS
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.writer import CheckpointWriter
from trainer.device import fix_order_of_sums
from trainer.learners.engine import join_process_group
from trainer.learners.learner import Learner
from trainer.step import train_step
from trainer.teacher_outputs import detach

BASE = Size("BERT-base", 768, 12, 128, 128)
LARGE = Size("BERT-large", 1024, 24, 128, 64)
SIZES = [
    BASE,
    Size("BERT-large", 1024, 24, 512, 32),
    LARGE,
    Size("BERT-base", 768, 12, 512, 32),
]
STUDENTS = [(384, 6), (256, 4), (128, 2)]  # hidden size, layers
TOY, TOY_STUDENTS = Size("toy", 128, 2, 32, 4, vocabulary=1000), [(64, 2)] * 3
STAGES = (0, 1, 2, 3)
LEAST_SECONDS = 10.0  # with fewer left, a section is not begun
MOST = 0.45  # of the time that a section may take
# What a host calls to wait for its GPU, by the profiler's names.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def main() -> None:
    """Run the sections, each in processes of its own: those that are timed first, and alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--out", type=Path, default=Path("figures"), help="the folder of figures")
    parser.add_argument("--minutes", type=float, default=8.0, help="what is left then is not run")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    facts, lock = gpu_facts.of_this_machine(), threading.Lock()
    until = time.monotonic() + 60 * given.minutes

    def measure(name: str) -> None:
        began = time.monotonic()
        seconds = min(until - began, MOST * 60 * given.minutes)
        rows = rows_of(name, given.out.resolve(), seconds)
        with lock:
            facts["sections"][name] = rows
            # After each section: what has been measured outlasts whatever ends this process.
            (given.out / "gpu_facts.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)

    for name in given.only:
        if name not in UNTIMED:
            measure(name)
    with ThreadPoolExecutor() as beside_each_other:
        list(beside_each_other.map(measure, (name for name in given.only if name in UNTIMED)))
    where = facts["device"] or "no GPU: figures of a GPU are missing"
    rows = [row for name in given.only for row in facts["sections"][name]]
    lines = [f"| {where} | |", "|---|---|", *(f"| {what} | {figures} |" for what, figures in rows)]
    (given.out / "gpu.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def rows_of(name: str, out: Path, seconds: float) -> list[Row]:
    """The rows of a section, as far as it comes in this many seconds; the last says why not all."""
    rows: list[Row] = []
    try:
        if seconds < LEAST_SECONDS:
            raise RuntimeError("not run: the time was up")
        work = RUNS[name](out, seconds) if name in RUNS else in_processes(name, seconds)
        rows.extend(work)
    except (RuntimeError, ProcessException) as error:
        print(error, file=sys.stderr)
        rows.append((name, " ".join(str(error).split())[-300:]))
    return rows


def ranks_of(section: str) -> int:
    """Two if there are two cards and the section is about ranks, and on a CPU; else one."""
    cards = torch.cuda.device_count() if ON_GPU else 2
    return 1 if section in ("speed", "joint", "cluster") else min(2, cards)


def in_processes(section: str, seconds: float) -> Iterator[Row]:
    """A section's rows, from rank 0, one by one."""
    ranks, until = ranks_of(section), time.monotonic() + seconds
    rows = multiprocessing.get_context("spawn").SimpleQueue()
    started = multiprocessing.spawn(
        _rank, (ranks, free_port(), section, rows), nprocs=ranks, join=False
    )
    try:
        while not started.join(timeout=0.5):
            while not rows.empty():
                yield rows.get()
            if time.monotonic() > until:
                raise RuntimeError(f"stopped after {seconds:.0f} s")
        while not rows.empty():
            yield rows.get()
    finally:
        for process in started.processes:
            process.terminate()


def _rank(rank: int, ranks: int, port: int, section: str, rows: Any) -> None:
    export(Ranks(rank, ranks, rank, ranks, 0, "127.0.0.1", port))
    if not ON_GPU:
        torch.set_num_threads(1)
    for row in SECTIONS[section](join_process_group()):
        if rank == 0:
            rows.put(row)
    dist.destroy_process_group()


def in_turns(arms: dict[str, Step]) -> dict[str, float]:
    """The median seconds of each arm."""
    return median_seconds(arms, TURNS, wall_clock)


def speed(device: torch.device) -> Iterator[Row]:
    """Tokens per second and MFU of a learner alone, beside `transformers`."""
    for size in SIZES if ON_GPU else [TOY]:
        batch = batch_of(size)
        arms = {
            f"Tandem, {precision}": our_step(teacher_of(size, precision=precision), batch)
            for precision in ("bf16", "bf16_weights")
        }
        if ON_GPU:
            arms["Tandem, bf16, eager"] = our_step(teacher_of(size, compile=False), batch)
        arms["transformers"] = transformers_step(size.encoder, batch, device, "bf16")
        flops = describe(size.encoder, size.length, MASKED_FRACTION).flops_per_token
        seconds = in_turns(arms)
        for name, median in seconds.items():
            what = f"{size.name}, {size.rows} x {size.length}, {name}"
            tokens = batch.input_ids.size / median
            yield what, f"{tokens:,.0f} tokens/s, MFU {mfu(tokens * flops, device)}"


def joint(device: torch.device) -> Iterator[Row]:
    """A step of a teacher and three students, and the cost of training them one after another."""
    size, shapes = (LARGE, STUDENTS) if ON_GPU else (TOY, TOY_STUDENTS)
    main, students = company(size, shapes)
    batch = batch_of(size)

    def sequential() -> None:
        train_step(main, [], batch, 0)
        for learner in students:
            features = forward(main, [learner], batch)
            learn(learner, detach(features, main.output_projection()), batch)

    together = partial(train_step, main, students, batch, 0)
    seconds = in_turns({"joint": together, "sequential": sequential})
    ratio = seconds["joint"] / seconds["sequential"]
    yield f"{size.name} + 3 students, joint step", f"{1e3 * seconds['joint']:.1f} ms"
    yield "the same, one after the other", f"{1e3 * seconds['sequential']:.1f} ms ({ratio:.3f})"


def teacher_of(size: Size, **settings: Any) -> Learner:
    """A teacher whose last layer computes masked positions only; in bf16 by default."""
    return teacher(size.encoder, size.rows, masked_only=True, **{"precision": "bf16", **settings})


def company(
    size: Size, shapes: Sequence[tuple[int, int]], stage: int = 0
) -> tuple[Learner, list[Learner]]:
    """A teacher and its students at a ZeRO stage."""
    students = [
        student(number, size, *shape, precision="bf16", zero_stage=stage)
        for number, shape in enumerate(shapes)
    ]
    return teacher_of(size, zero_stage=stage), students


def syncs(device: torch.device) -> Iterator[Row]:
    """The number of times the host waits for its GPU in a step, from the profiler."""
    size, shapes = (BASE, STUDENTS) if ON_GPU else (TOY, TOY_STUDENTS)
    batch = batch_of(size, dist.get_rank())
    for stage in STAGES:
        step = partial(train_step, *company(size, shapes, stage), batch, 0)
        for _ in range(3):
            step()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
        with profile(activities=activities) as seen:
            step()
        count = sum(event.count for event in seen.key_averages() if event.key in WAITS)
        figures = f"{count} (budget {SYNCS[stage]})" if ON_GPU else "- (needs a GPU)"
        yield f"host syncs of a step, T+3, stage {stage}", figures


def zero(device: torch.device) -> Iterator[Row]:
    """A joint step at each ZeRO stage."""
    size, shapes = (BASE, STUDENTS) if ON_GPU else (TOY, TOY_STUDENTS)
    batch = batch_of(size, dist.get_rank())
    for stage in STAGES:
        step = partial(train_step, *company(size, shapes, stage), batch, 0)
        median = in_turns({"step": step})["step"]
        peak = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most" if ON_GPU else ""
        ranks = dist.get_world_size()
        yield f"{size.name} + 3, stage {stage}, {ranks} rank(s)", f"{1e3 * median:.1f} ms{peak}"
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()


def stall(device: torch.device) -> Iterator[Row]:
    """How much longer a step takes while a checkpoint is saved, and the time of a save alone."""
    size = LARGE if ON_GPU else TOY
    learner = teacher_of(size, zero_stage=1)
    step = our_step(learner, batch_of(size, dist.get_rank()))
    with shared_folder() as folder:
        writer = CheckpointWriter(folder / "checkpoints", Retention(last=1))
        number = iter(range(1, 100))

        def save(wait: bool) -> None:
            writer.save(next(number), {learner.name: learner.engine}, {}, wait=wait)

        alone = in_turns({"step": step})["step"]
        waited = in_turns({"save": lambda: save(wait=True)})["save"]  # the first one allocates
        began = wall_clock()
        save(wait=False)
        step()
        beside = wall_clock() - began
        writer.wait()
    yield f"{size.name}, checkpoint that training waits for", f"{waited:.2f} s"
    yield "stall of a step beside a checkpoint", f"{max(0.0, beside - alone):.3f} s"


def resumed(device: torch.device) -> Iterator[Row]:
    """Whether a resumed learner equals an uninterrupted one bit for bit."""
    fix_order_of_sums()
    for stage in STAGES:
        size = BASE if ON_GPU else TOY
        once = teacher_of(size, zero_stage=stage)
        with shared_folder() as folder:
            steps(once, size, range(3))
            writer = CheckpointWriter(folder / "checkpoints", Retention(last=1))
            writer.save(3, {once.name: once.engine}, {}, wait=True)
            again = teacher_of(size, zero_stage=stage)
            Checkpoint(folder / "checkpoints", 3).load(again.name, again.engine)
        digests = [bits(steps(learner, size, range(3, 6))) for learner in (once, again)]
        same = "the same bits" if digests[0] == digests[1] else "OTHER BITS"
        yield f"{size.name}, resumed at step 3, at step 6, stage {stage}", same


def steps(learner: Learner, size: Size, numbers: range) -> Learner:
    """The learner after these steps."""
    for number in numbers:
        batch = batch_of(size, dist.get_world_size() * number + dist.get_rank())
        train_step(learner, [], batch, number)
    return learner


def bits(learner: Learner) -> str:
    """A digest of its weights. Collective."""
    digest = hashlib.sha256()
    for tensor in full_state_dict(learner.engine).values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder shared by all ranks, removed at the end. Collective."""
    names: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    folder = Path(str(names[0]))
    try:
        yield folder
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


SECTIONS: dict[str, Callable[[torch.device], Iterator[Row]]] = {
    section.__name__: section for section in (joint, cluster, resumed, syncs, zero, stall, speed)
}
RUNS = {"job": job, "tests": tests}
ORDER = ("cluster", "zero", "joint", "stall", "speed", "tests", "job", "resumed", "syncs")
UNTIMED = ("tests", "job", "resumed", "syncs")  # they run beside each other
MEASURES = {
    name: ({**SECTIONS, **RUNS}[name].__doc__ or "").split("\n")[0].rstrip(".") for name in ORDER
}

if __name__ == "__main__":
    main()
