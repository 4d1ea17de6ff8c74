"""A plan as text, for a terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from cluster.config import ClusterConfig
from cluster.planning.duration import StepTime
from cluster.planning.machine import NODE_MTBF_HOURS, Machine
from cluster.planning.memory import LearnerMemory
from cluster.planning.plan import Plan
from cluster.planning.recipes import JOINT, SEPARATE, SHARED
from configs.plan_facts import CacheFacts, JobFacts

WIDTH = 100


def describe(plan: Plan) -> str:
    """The whole plan as text."""
    parts = [
        _head(plan),
        _memory(plan),
        _recommendation(plan),
        _time(plan),
        _stored(plan),
        _recipes(plan),
        _failures(plan),
        _starts(plan),
        _scaling(plan),
        _assumptions(plan),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(plan: Plan) -> str:
    job, machine = plan.job, plan.machine
    rows = job.rows // machine.ranks
    passes = -(-rows // job.micro_batch)
    return (
        f"{job.name}: {job.steps:,} steps of {job.rows:,} sequences of {job.length:g}, "
        f"{job.rows * job.length * job.steps / 1e9:,.1f}B tokens, on {machine.nodes} x "
        f"{machine.gpus_per_node} GPUs\n"
        f"Each GPU takes {rows} sequences per step, in {passes} micro-batch{'es' * (passes > 1)} "
        f"of {min(rows, job.micro_batch)}."
    )


def _memory(plan: Plan) -> str:
    rows = [
        _memory_row(name if not stage else "", memory, stage == stages[name])
        for stages in [{one.name: one.zero_stage for one in plan.job.learners}]
        for name, memories in plan.by_stage.items()
        for stage, memory in enumerate(memories)
    ]
    headings = (
        "GB on a GPU",
        "ZeRO",
        "parameters",
        "gradients",
        "optimizer",
        "buckets",
        "activations",
    )
    room = plan.machine.device.memory_gb
    verdict = "it fits" if plan.fits else "it does NOT fit"
    return (
        f"{_table(headings, rows)}\n"
        f"* the config's stage. The tensors captured for students take "
        f"{_gb(plan.memory.captured)} GB.\n"
        f"Peak: {_gb(plan.memory.peak)} GB of tensors; with allocator and library overhead "
        f"{_gb(plan.memory.needed)} of {room:g} GB: {verdict}.\n"
        f"Host memory of each node: {_gb(plan.host_bytes)} GB; sbatch: "
        f"--mem={math.ceil(plan.host_bytes / 2**30)}G."
    )


def _memory_row(name: str, memory: LearnerMemory, chosen: bool) -> list[str]:
    numbers = (
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.buckets,
        memory.activations,
    )
    return [name, f"{memory.stage}{'*' if chosen else ' '}", *map(_gb, numbers)]


def _recommendation(plan: Plan) -> str:
    if plan.recommended is None:
        return "Nothing fits: not even a micro-batch of one sequence at ZeRO stage 3."
    best = plan.recommended.option
    students = f", students: {best.student_stage}" if len(plan.job.learners) > 1 else ""
    return (
        f"Recommended: zero_stage {best.teacher_stage} for the teacher{students}, "
        f"batch.micro_batch={best.micro_batch}: {_gb(plan.recommended.memory.needed)} GB, "
        f"{plan.recommended.time.seconds:.3g} s per step."
    )


def _time(plan: Plan) -> str:
    rows = [
        [name, *(f"{1e3 * value:.1f}" for value in (
            time.forward, time.backward, time.update, time.communication, time.hidden, time.total
        ))]
        for name, time in plan.time.learners.items()
    ]  # fmt: skip
    headings = (
        "ms per step",
        "forward",
        "backward",
        "update",
        "communication",
        "overlapped",
        "total",
    )
    cost = "" if plan.cost is None else f", costing {plan.cost:,.0f}"
    return (
        f"{_table(headings, rows)}\n"
        f"A step takes {plan.time.seconds:.3g} s, {_share(_waiting(plan.time))} of it waiting for "
        f"other ranks; {plan.time.tokens_per_second:,.0f} tokens/s.\n"
        f"Without failures the run takes {_duration(plan.days)}: "
        f"{plan.gpu_hours:,.0f} GPU-hours{cost}."
    )


def _stored(plan: Plan) -> str:
    """What is read of a teacher that does not run; empty where it runs."""
    stored = plan.job.stored
    if stored is None or plan.storing_gpu_hours is None:
        return ""
    return (
        f"The teacher does not run: a masked position has {stored.top_k:,} of its logits in "
        f"{stored.precision}, {stored.position_bytes:,} bytes with their tokens, and the job "
        f"{stored.bytes / 1e9:,.3g} GB.\n"
        f"`tandem store` writes them once, in {plan.storing_gpu_hours:,.3g} GPU-hours of the "
        "teacher's forward pass, which each job that reads them saves."
    )


RECIPES = {
    JOINT: "this job",
    SEPARATE: "teacher, then a job for each student",
    SHARED: "teacher, then one job for all students",
}


def _recipes(plan: Plan) -> str:
    """The job beside the usual recipe; empty where there is nothing to compare."""
    if not plan.recipes:
        return ""
    rows = [
        [
            RECIPES[one.recipe],
            f"{one.flops:.3g}",
            f"{one.gpu_hours:,.0f}" if one.gpu_hours >= 100 else f"{one.gpu_hours:.3g}",
            "" if one.cost is None else f"{one.cost:,.0f}",
            f"{one.ratio:.3f}",
            "" if one.teacher_steps is None else f"{one.teacher_steps:,}",
        ]
        for one in plan.recipes
    ]
    headings = ("recipe", "FLOPs", "GPU-hours", "cost", "ratio", "teacher steps")
    return (
        f"{_table(headings, rows)}\n"
        "Every learner trains for as many steps in each recipe. Ratio: of this job's GPU-hours to "
        "the recipe's.\nTeacher steps: as many as this job's teacher could make at the recipe's "
        "cost, its students as many as now."
    )


def _failures(plan: Plan) -> str:
    now, best, every = plan.reliability, plan.reliability_at_best, plan.best_checkpoint_every
    minutes = every * plan.time.seconds / 60
    hours = now.mtbf / 3600
    often = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    count = f"{now.failures:,.1f} in the run" if now.effective else "so that the run never ends"
    return (
        f"Expect a failure every {often} hours, {count}. A checkpoint stalls training for "
        f"{now.stall:.2g} s and is on storage after {now.write:.2g} s.\n"
        f"With checkpoint.every={plan.job.checkpoint_every}, {_share(now.effective)} of the time "
        f"is spent on training; in 19 of 20 runs, at least {_share(now.effective_p5)}.\n"
        f"Best: checkpoint.every={every}, or {minutes:.3g} minutes: {_share(best.effective)}; in "
        f"19 of 20 runs, at least {_share(best.effective_p5)}."
    )


def _starts(plan: Plan) -> str:
    if plan.starts is None or plan.machine.time_limit is None:
        return ""
    starts, saving = plan.starts, plan.reliability.stall + plan.reliability.write
    lines = [
        f"Time limit of {plan.machine.time_limit / 3600:.3g} hours: {starts.count:,} "
        f"start{'s' * (starts.count > 1)} of {starts.training / 3600:.3g} hours of training; each "
        f"spends {starts.overhead / 60:.3g} minutes on starting and saving, all of them "
        f"{starts.overhead * starts.count / 3600:.3g} hours, besides their waits in the queue."
    ]
    most = ClusterConfig.max_requeues
    if most is not None and starts.count - 1 + plan.reliability.failures > most:
        lines.append(
            f"With {plan.reliability.failures:,.1f} failures, that is more than max_requeues "
            f"allows ({most} by default); set it higher."
        )
    if saving > plan.machine.warning_seconds:
        lines.append(
            f"Saving takes {saving:,.0f} s, longer than the {plan.machine.warning_seconds} s of "
            f"warning; set warning_seconds higher."
        )
    return "\n".join(lines)


def _scaling(plan: Plan) -> str:
    rows = [
        [
            f"{one.nodes}",
            f"{one.gpus:,}",
            f"{one.seconds_per_step:.3g}",
            f"{one.days:.2f}",
            f"{one.gpu_hours:,.0f}",
            _share(one.waiting),
            _share(one.effective),
        ]
        for one in plan.scaling
    ]
    headings = ("nodes", "GPUs", "s per step", "days", "GPU-hours", "waiting", "training")
    return f"{_table(headings, rows)}\nIncluding failures, with checkpoints at the best interval."


def _assumptions(plan: Plan) -> str:
    """What the numbers rest on, one line each."""
    lines = [*_assumed_of_machine(plan.machine), *_assumed_of_job(plan.job, plan.machine.nodes)]
    return "Assumed:\n" + "\n".join(f"- {line}" for line in lines)


def _assumed_of_machine(machine: Machine) -> Iterator[str]:
    device = machine.device
    rates = ", ".join(f"{name} {rate:g}" for name, rate in device.tflops.items())
    yield (
        f"GPU: {device.memory_gb:g} GB, {rates} TFLOP/s dense; MFU {machine.mfu:.0%} in forward "
        f"and backward, but at least {machine.launch * 1e6:g} us per kernel"
    )
    yield (
        f"network: {device.link_bandwidth:g} GB/s within a node, {device.network_bandwidth:g} GB/s "
        f"per GPU between nodes, {machine.busy_bandwidth:.0%} reached, "
        f"{machine.latency * 1e6:.0f} us per hop"
    )
    yield (
        f"memory: {machine.reserved_gb:g} GB for the context and libraries, "
        f"{machine.fragmented:.0%} lost in the allocator; all sequences at the maximum length"
    )
    yield f"host: {machine.host_gb:g} GB for each rank, besides a copy of its part of a checkpoint"
    source = " (Llama 3's rate)" if machine.node_mtbf_hours == NODE_MTBF_HOURS else ""
    yield (
        f"failures: random, one per node every {machine.node_mtbf_hours:,.0f} hours{source}, "
        f"{machine.restart_seconds / 60:.0f} minutes to restart, a spare node available"
    )
    yield (
        f"checkpoints: {machine.copy_gbs:g} GB/s from a GPU to its host while training stalls, "
        f"{machine.store_gbs:g} GB/s to storage in the background"
    )


def _assumed_of_job(job: JobFacts, nodes: int) -> Iterator[str]:
    teacher = job.learners[0]
    partly = any(one.active < 1 for one in job.learners)
    students = "students train from their start until their budget is spent"
    yield students if partly else "every learner takes part in every step"
    if teacher.training < 1:
        yield f"the teacher trains in {teacher.training:.0%} of the steps, and then only teaches"
    yield from job.assumed
    if job.cache is not None:
        yield from _assumed_of_cache(job.cache, rows=-(-job.rows // nodes))
    yield "data loading never delays a step; held-out evaluation is not counted"


def _assumed_of_cache(cache: CacheFacts, rows: int) -> Iterator[str]:
    """Of a node that computes this many rows of each step."""
    needed = rows * cache.shard_bytes / 1e9
    yield (
        f"URLs: a node caches a shard for each of its {rows:,} sequences of a step, "
        f"{needed:.3g} GB (data.cache_gb: {cache.limit_gb:g})"
    )
    yield "a smaller corpus is cached whole; of a web server that sends parts of files, nothing"


def _waiting(time: StepTime) -> float:
    return time.exposed / time.seconds


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = Table(box=None, pad_edge=False, header_style="")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _gb(number: float) -> str:
    return f"{number / 1e9:.2f}" if number < 1e11 else f"{number / 1e9:,.0f}"


def _share(part: float) -> str:
    return f"{part:.1%}"


def _duration(days: float) -> str:
    return f"{days:.1f} days" if days >= 1 else f"{24 * days:.1f} hours"
