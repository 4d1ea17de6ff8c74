"""A plan as text, for a terminal."""

import math
from collections.abc import Iterator, Sequence

from cluster.config import ClusterConfig
from cluster.planning.machine import NODE_MTBF_HOURS, Machine
from cluster.planning.memory import LearnerMemory
from cluster.planning.plan import JOINT, SEPARATE, SHARED, Plan
from configs.plan_facts import CacheFacts, JobFacts
from configs.progress import counted, duration
from configs.tables import as_text, plain_table

_UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
_SCALES = (("B", 1e9), ("M", 1e6), ("K", 1e3))
FROM_GPU = "from a GPU to its host"


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
    largest = min(rows, job.micro_batch)
    passes = -(-rows // largest)
    return (
        f"{job.name}: {job.steps:,} steps of {job.rows:,} sequences of {job.length:g}, "
        f"{_many(job.rows * job.length * job.steps)} tokens, on {_place(machine)}\n"
        f"Each {machine.device.unit} takes {counted(rows, 'sequence')} per step, in "
        f"{counted(passes, 'micro-batch', 'micro-batches')} of "
        f"{'up to ' if rows % largest else ''}{largest}."
    )


def _place(machine: Machine) -> str:
    unit = machine.device.unit
    if machine.gpus_per_node == 1:
        return counted(machine.nodes, unit)
    return f"{machine.nodes} x {machine.gpus_per_node} {unit}s"


def _memory(plan: Plan) -> str:
    device = plan.machine.device
    size = max(max(_parts(learner)) for several in plan.by_stage.values() for learner in several)
    unit, divisor = _unit(size)
    stages = {learner.name: learner.zero_stage for learner in plan.job.learners}
    rows = [
        _memory_row(name if not stage else "", memory, stage == stages[name], divisor)
        for name, memories in plan.by_stage.items()
        for stage, memory in enumerate(memories)
    ]
    headings = (
        f"{unit} on a {device.unit}",
        "ZeRO",
        "parameters",
        "gradients",
        "optimizer",
        "buckets",
        "activations",
    )
    verdict = "it fits" if plan.fits else "it does NOT fit"
    return (
        f"{_table(headings, rows)}\n"
        f"* the config's stage. The tensors captured for students take "
        f"{_size(plan.memory.captured)}.\n"
        f"Peak: {_size(plan.memory.peak)} of tensors; with allocator and library overhead "
        f"{_size(plan.memory.needed)} of {device.memory_gb:g} GB: {verdict}."
    ) + ("" if device.is_cpu else _host(plan.host_bytes))


def _host(size: float) -> str:
    mem = math.ceil(size / 2**30)
    return f"\nHost memory of each node: {_size(size)}; sbatch: --mem={mem}G."


def _memory_row(name: str, memory: LearnerMemory, chosen: bool, divisor: float) -> list[str]:
    numbers = (_fraction(part / divisor) for part in _parts(memory))
    return [name, f"{memory.stage}{'*' if chosen else ' '}", *numbers]


def _parts(memory: LearnerMemory) -> tuple[float, ...]:
    return (
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.buckets,
        memory.activations,
    )


def _recommendation(plan: Plan) -> str:
    if plan.recommended is None:
        return "Nothing fits: not even a micro-batch of one sequence at ZeRO stage 3."
    best = plan.recommended.option
    students = f", students: {best.student_stage}" if len(plan.job.learners) > 1 else ""
    return (
        f"Recommended: zero_stage {best.teacher_stage} for the teacher{students}, "
        f"batch.micro_batch={best.micro_batch}: {_size(plan.recommended.memory.needed)}, "
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
    waiting = plan.time.exposed / plan.time.seconds
    cost = "" if plan.cost is None else f", costing {_amount(plan.cost)}"
    hours = f"{_amount(plan.gpu_hours)} {plan.machine.device.unit}-hours"
    return (
        f"{_table(headings, rows)}\n"
        f"A step takes {plan.time.seconds:.3g} s, {_share(waiting)} of it waiting for "
        f"other ranks; {plan.time.tokens_per_second:,.0f} tokens/s.\n"
        f"Without failures the run takes {_duration(plan.days)}: "
        f"{hours}{cost}."
    )


def _stored(plan: Plan) -> str:
    """The stored predictions of a teacher that does not run; empty where it runs."""
    stored = plan.job.stored
    if stored is None or plan.storing_gpu_hours is None:
        return ""
    return (
        f"The teacher does not run: a masked position has {stored.kept}, "
        f"{stored.position_bytes:,} bytes, and the job "
        f"{_size(stored.bytes)}.\n"
        f"`tandem store` writes them once, in {plan.storing_gpu_hours:,.3g} "
        f"{plan.machine.device.unit}-hours of the teacher's forward pass, which each job that "
        "reads them saves."
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
            RECIPES[cost.recipe],
            f"{cost.flops:.3g}",
            _amount(cost.gpu_hours),
            "" if cost.cost is None else _amount(cost.cost),
            f"{cost.ratio:.3f}",
            "" if cost.teacher_steps is None else f"{cost.teacher_steps:,}",
        ]
        for cost in plan.recipes
    ]
    hours = f"{plan.machine.device.unit}-hours"
    headings = ("recipe", "FLOPs", hours, "cost", "ratio", "teacher steps")
    return (
        f"{_table(headings, rows)}\n"
        f"Each learner trains for the same number of steps in all recipes. Ratio: this job's "
        f"{hours} divided by the recipe's.\nTeacher steps: the steps for which this job could "
        "train its teacher at the recipe's cost, with the students' steps unchanged."
    )


def _failures(plan: Plan) -> str:
    now, best, every = plan.reliability, plan.reliability_at_best, plan.best_checkpoint_every
    hours = now.mtbf / 3600
    often = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    count = f"{_amount(now.failures)} in the run" if now.effective else "so that the run never ends"
    return (
        f"Expect a failure every {often} hours, {count}. A checkpoint stalls training for "
        f"{now.stall:.2g} s and is on storage after {now.write:.2g} s.\n"
        f"With checkpoint.every={plan.job.checkpoint_every}, {_share(now.effective)} of the time "
        f"is spent on training; in 19 of 20 runs, at least {_share(now.effective_p5)}.\n"
        f"Best: checkpoint.every={every}, or {duration(every * plan.time.seconds)}: "
        f"{_share(best.effective)}; in 19 of 20 runs, at least {_share(best.effective_p5)}."
    )


def _starts(plan: Plan) -> str:
    if plan.starts is None or plan.machine.time_limit is None:
        return ""
    starts, saving = plan.starts, plan.reliability.stall + plan.reliability.write
    lines = [
        f"Time limit of {plan.machine.time_limit / 3600:.3g} hours: "
        f"{counted(starts.count, 'start')} of {starts.training / 3600:.3g} hours of training; each "
        f"spends {starts.overhead / 60:.3g} minutes on starting and saving, all of them "
        f"{starts.overhead * starts.count / 3600:.3g} hours, besides their waits in the queue."
    ]
    most = ClusterConfig.max_requeues
    if most is not None and starts.count - 1 + plan.reliability.failures > most:
        lines.append(
            f"With {_amount(plan.reliability.failures)} failures, that is more than max_requeues "
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
            f"{row.nodes}",
            f"{row.gpus:,}",
            f"{row.seconds_per_step:.3g}",
            duration(86400 * row.days) if math.isfinite(row.days) else "never ends",
            _amount(row.gpu_hours),
            _share(row.waiting),
            _share(row.effective),
        ]
        for row in plan.scaling
    ]
    unit = plan.machine.device.unit
    headings = ("nodes", f"{unit}s", "s per step", "time", f"{unit}-hours", "waiting", "training")
    return f"{_table(headings, rows)}\nIncluding failures, with checkpoints at the best interval."


def _assumptions(plan: Plan) -> str:
    """The assumptions behind the numbers, one line each."""
    lines = [*_assumed_of_machine(plan.machine), *_assumed_of_job(plan.job, plan.machine.nodes)]
    return "Assumed:\n" + "\n".join(f"- {line}" for line in lines)


def _assumed_of_machine(machine: Machine) -> Iterator[str]:
    device = machine.device
    rates = ", ".join(f"{name} {rate:g}" for name, rate in device.tflops.items())
    yield f"{device.unit}: {device.memory_gb:g} GB, {rates} TFLOP/s dense"
    launch = f"at least {machine.launch * 1e6:g} us per kernel"
    yield f"forward and backward passes: MFU {machine.mfu:.0%}, but {launch}"
    if machine.ranks > 1:
        yield (
            f"network: {device.link_bandwidth:g} GB/s within a node, "
            f"{device.network_bandwidth:g} GB/s per {device.unit} between nodes, "
            f"{machine.busy_bandwidth:.0%} reached, {machine.latency * 1e6:.0f} us per hop"
        )
    yield (
        f"memory: {machine.reserved_gb:g} GB for the context and libraries, "
        f"{machine.fragmented:.0%} lost in the allocator; all sequences at the maximum length"
    )
    if not device.is_cpu:
        held = "a copy of its part of a checkpoint"
        yield f"host: {machine.host_gb:g} GB for each rank, besides {held}"
    source = " (Llama 3's rate)" if machine.node_mtbf_hours == NODE_MTBF_HOURS else ""
    yield (
        f"failures: random, one per node every {machine.node_mtbf_hours:,.0f} hours{source}, "
        f"{machine.restart_seconds / 60:.0f} minutes to restart, a spare node available"
    )
    yield (
        f"checkpoints: {machine.copy_gbs:g} GB/s {'in memory' if device.is_cpu else FROM_GPU} "
        f"while training stalls, {machine.store_gbs:g} GB/s to storage in the background"
    )


def _assumed_of_job(job: JobFacts, nodes: int) -> Iterator[str]:
    teacher = job.learners[0]
    partly = any(learner.active < 1 for learner in job.learners)
    students = "students train from their start until their budget is spent"
    yield students if partly else "every learner takes part in every step"
    if teacher.training < 1:
        yield f"the teacher trains in {teacher.training:.0%} of the steps, and then only teaches"
    yield from job.assumed
    if job.cache is not None:
        yield from _assumed_of_cache(job.cache, rows=-(-job.rows // nodes))
    yield "data loading never delays a step; held-out evaluation is not counted"


def _assumed_of_cache(cache: CacheFacts, rows: int) -> Iterator[str]:
    """The cache of a node that computes this many rows of each step."""
    needed = rows * cache.shard_bytes / 1e9
    yield (
        f"URLs: a node caches a shard for each of its {rows:,} sequences of a step, "
        f"{needed:.3g} GB (data.cache_gb: {cache.limit_gb:g})"
    )
    yield "a smaller corpus is cached whole; of a web server that sends parts of files, nothing"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = plain_table(*headings)
    for row in rows:
        table.add_row(*row)
    return as_text(table)


def _unit(size: float) -> tuple[str, float]:
    """The unit in which this many bytes are written, and its bytes."""
    return next((unit for unit in _UNITS if size >= unit[1]), _UNITS[-1])


def _size(size: float) -> str:
    unit, divisor = _unit(size)
    return f"{_fraction(size / divisor)} {unit}"


def _many(count: float) -> str:
    """A count in billions, millions or thousands."""
    unit, divisor = next((unit for unit in _SCALES if count >= unit[1]), ("", 1.0))
    return f"{count / divisor:,.1f}{unit}" if unit else f"{count:,.0f}"


def _fraction(number: float) -> str:
    """A number of a table with two decimals, unless it is large or so small that none is seen."""
    if 0 < number < 0.005:
        return "<0.01"
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}"


def _amount(number: float) -> str:
    if 0 < number < 0.001:
        return "<0.001"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _share(part: float) -> str:
    return f"{part:.1%}"


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:.1f} days"
    return f"{24 * days:.1f} hours" if days >= 1 / 24 else duration(86400 * days)
